"""The Hopper kernels of the compression ops: interpreted on the CPU, compiled for the H200, and run on one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compact_pages as compact
from pallas_kernels import window_scores as window
from pallas_kernels.compact_pages import compact_pages
from pallas_kernels.key_redundancy import FlashConfig, LightningConfig, key_redundancy
from pallas_kernels.select_entries import select_entries
from pallas_kernels.window_scores import window_scores
from tests.aot import compile_for_gpu
from tests.compress_cases import KEY_KINDS, compact_case, paged, random_keys, select_scores
from tests.reference import compress_ops as oracle


@pytest.fixture
def interpreted(capfd):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    # jax 0.11 prints what 0.12 raises.
    out = capfd.readouterr()
    assert "RACE DETECTED" not in out.out + out.err


def as_float(x):
    return np.asarray(x).astype(np.float32)


def check_window_scores(window_rows, heads, kv_heads, head_dim, page_size, cache_len, reduce="mean", config=None):
    """Against the oracle on the same bfloat16 inputs; NaN past cache_len and in pages of nobody."""
    rng = np.random.default_rng(10)
    cache_len = np.asarray(cache_len, np.int32)
    entries = (-(-int(cache_len.max()) // page_size) + 1) * page_size
    keys = random_keys(rng, "common", (len(cache_len), kv_heads, entries, head_dim))
    pool, page_ids = paged(rng, keys, cache_len, page_size, jnp.bfloat16)
    queries = rng.standard_normal((len(cache_len), window_rows, heads, head_dim)).astype(jnp.bfloat16)
    args = queries, pool, page_ids, cache_len
    got = window_scores(*map(jnp.asarray, args), reduce=reduce, implementation="pallas", config=config)
    want = oracle.window_scores(as_float(queries), as_float(pool), page_ids, cache_len, head_dim**-0.5, reduce)
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-4)
    assert want.max() > 1e-3


def check_redundancy(mode, kind, kv_heads, head_dim, page_size, cache_len, config=None):
    rng = np.random.default_rng(11)
    cache_len = np.asarray(cache_len, np.int32)
    entries = -(-int(cache_len.max()) // page_size) * page_size
    keys = random_keys(rng, kind, (len(cache_len), kv_heads, entries, head_dim))
    pool, page_ids = paged(rng, keys, cache_len, page_size, jnp.bfloat16)
    args = map(jnp.asarray, (pool, page_ids, cache_len))
    got = key_redundancy(*args, mode=mode, implementation="pallas", config=config)
    want = oracle.key_redundancy(as_float(pool), page_ids, cache_len, mode, 0.5)
    np.testing.assert_allclose(got, want, atol=1e-4 if mode == "lightning" else 2e-4)
    assert np.abs(want).max() > 0.1


def check_select(kind, rows, kv_heads, entries, max_budget):
    rng = np.random.default_rng(12)
    scores = select_scores(rng, kind, (rows, kv_heads, entries))
    budget = rng.integers(0, min(max_budget, entries) + 1, rows).astype(np.int32)
    budget[0] = min(max_budget, entries)
    got = select_entries(jnp.asarray(scores), jnp.asarray(budget), max_budget=max_budget, implementation="pallas")
    np.testing.assert_array_equal(got, oracle.select_entries(scores, budget, max_budget))


@pytest.mark.parametrize(
    "page_size,slots,num_programs,cache_len",
    [(128, 1, 1, [300, 0, 140]), (64, 2, 2, [260, 5]), (256, 1, 1, [256, 512])],
)
def test_window_scores_interpreted(interpreted, page_size, slots, num_programs, cache_len):
    config = window.Config(consumers=2, slots=slots, num_programs=num_programs)
    check_window_scores(16, 2, 1, 64, page_size, cache_len, config=config)


def test_window_scores_interpreted_with_padded_windows(interpreted):
    config = window.Config(consumers=1, slots=1, num_programs=1)
    check_window_scores(10, 6, 1, 64, 128, [130], reduce="max", config=config)


@pytest.mark.parametrize("kind", ["clusters", "duplicates", "zeros"])
def test_lightning_interpreted(interpreted, kind):
    check_redundancy("lightning", kind, 1, 64, 128, [330, 0], LightningConfig(consumers=2, num_programs=1))


@pytest.mark.parametrize(
    "kind,page_size,num_programs", [("clusters", 64, 1), ("duplicates", 128, 2), ("zeros", 256, 1)]
)
def test_flash_interpreted(interpreted, kind, page_size, num_programs):
    check_redundancy(
        "flash", kind, 1, 64, page_size, [230], FlashConfig(consumers=2, slots=2, num_programs=num_programs)
    )


@pytest.mark.parametrize("kind", ["ties", "infinite"])
@pytest.mark.parametrize("entries,max_budget", [(300, 129), (100, 128)])
def test_select_interpreted(interpreted, kind, entries, max_budget):
    check_select(kind, 2, 1, entries, max_budget)


@pytest.mark.parametrize("order", ["own", "last", "swapped", "fresh", "mixed"])
@pytest.mark.parametrize("tile", [2, 8])
def test_rows_that_go_in_order_can_be_written_tile_by_tile(order, tile):
    """What one program of the kernel does, in NumPy: wherever `goes_in_order` says so, it is right in place."""
    rng = np.random.default_rng(13)
    for _ in range(20):
        (pool, *_), page_ids, kept, target_ids = compact_case(rng, order)
        page_size, entries = pool.shape[2], page_ids.shape[1] * pool.shape[2]
        used = kept[:, 0, ::page_size] < entries
        in_order = np.asarray(compact.goes_in_order(*map(jnp.asarray, (page_ids, target_ids, used))))
        assert in_order.tolist() == {"own": [1, 1, 1], "fresh": [1, 1, 1]}.get(order, in_order.tolist())
        (want,) = oracle.compact_pages((pool,), page_ids, kept, target_ids)
        got = pool.copy()
        for r, h in np.ndindex(kept.shape[:2]):
            source = got if in_order[r] else pool
            for start in range(0, kept.shape[2], tile):
                chosen = kept[r, h, start : start + tile]
                j = start + np.flatnonzero(chosen < entries)
                i = chosen[chosen < entries]
                taken = source[page_ids[r, i // page_size], h, i % page_size].copy()
                got[target_ids[r, j // page_size], h, j % page_size] = taken
        np.testing.assert_array_equal(got, want)


def test_refusals():
    ids, length = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
    pages = jnp.zeros((1, 1, 32, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="page_size=32 must be 64, 128 or 256"):
        key_redundancy(pages, ids, length, implementation="pallas")
    with pytest.raises(ValueError, match="'pallas' takes bfloat16 or float16; use 'xla'"):
        window_scores(jnp.zeros((1, 4, 1, 64)), pages, ids, length, implementation="pallas")
    with pytest.raises(ValueError, match="9000 entries exceed the 8192"):
        select_entries(jnp.zeros((1, 1, 9000)), length, max_budget=8, implementation="pallas")


ROWS, PAGES, KV, PAGE, DIM, BUDGET = 288, 9, 8, 256, 128, 2048


def shape(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


POOL = shape(3000, KV, PAGE, DIM, dtype=jnp.bfloat16)
IDS, LENGTHS = shape(ROWS, PAGES), shape(ROWS)
PALLAS = {"implementation": "pallas"}
COMPILED = {
    "window_scores": (
        functools.partial(window_scores, **PALLAS),
        (shape(ROWS, 16, 32, DIM, dtype=jnp.bfloat16), POOL, IDS, LENGTHS),
    ),
    # Two wgmma tiles of queries a kv head.
    "window_scores_40_heads": (
        functools.partial(window_scores, **PALLAS),
        (shape(ROWS, 16, 40, DIM, dtype=jnp.bfloat16), POOL, IDS, LENGTHS),
    ),
    "lightning": (functools.partial(key_redundancy, **PALLAS), (POOL, IDS, LENGTHS)),
    "flash": (functools.partial(key_redundancy, mode="flash", **PALLAS), (POOL, IDS, LENGTHS)),
    "select_entries": (
        functools.partial(select_entries, max_budget=BUDGET, **PALLAS),
        (shape(ROWS, KV, PAGES * PAGE, dtype=jnp.float32), LENGTHS),
    ),
    "compact_pages": (
        functools.partial(compact_pages, **PALLAS),
        ((POOL, POOL, shape(3000, KV, PAGE)), IDS, shape(ROWS, KV, BUDGET), shape(ROWS, BUDGET // PAGE)),
    ),
}


@pytest.mark.aot
@pytest.mark.parametrize("op", COMPILED)
def test_compiles_for_the_h200(op, tmp_path, monkeypatch):
    """Down to machine code: next to no spilled registers, no copy of a pool, scratch as stated."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    function, args = COMPILED[op]
    donated = (0,) if op == "compact_pages" else ()
    memory = compile_for_gpu(function, args, donate_argnums=donated).memory_analysis()
    if op == "compact_pages":
        staging = compact.Config().staging_programs * BUDGET * (2 * DIM * 2 + 4)
        assert memory.alias_size_in_bytes == sum(int(np.prod(p.shape)) * p.dtype.itemsize for p in args[0])
        assert memory.temp_size_in_bytes < staging + 2**20
    else:
        # The queries regrouped; norms, sums, last similarities and where they are.
        scratch = {
            "window_scores": ROWS * 16 * 32 * DIM * 2,
            "window_scores_40_heads": 2 * ROWS * 16 * 64 * DIM * 2,  # padded to 128 rows a kv head
            "flash": 8 * ROWS * KV * PAGES * PAGE * 4,
        }
        assert memory.temp_size_in_bytes <= scratch.get(op, 0)
    spilled = [int(n) for file in tmp_path.glob("*.ptxas") for n in re.findall(r"(\d+) bytes spill", file.read_text())]
    assert not spilled or max(spilled) <= 16


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,page_size,window_rows",
    [(32, 8, 128, 256, 16), (16, 8, 128, 64, 16), (40, 8, 128, 128, 16), (14, 2, 64, 16, 16), (9, 3, 64, 32, 8)],
)
def test_window_scores_on_gpu(heads, kv_heads, head_dim, page_size, window_rows, reduce):
    cache_len = [2304, 2048, 1, 0, 777, 16, 2303]
    check_window_scores(window_rows, heads, kv_heads, head_dim, page_size, cache_len, reduce)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KEY_KINDS)
@pytest.mark.parametrize("head_dim,page_size", [(128, 256), (64, 64), (64, 128)])
@pytest.mark.parametrize("mode", ["lightning", "flash"])
def test_key_redundancy_on_gpu(mode, kind, head_dim, page_size):
    check_redundancy(mode, kind, 3, head_dim, page_size, [1024, 1, 0, 700])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["noise", "ties", "equal", "infinite"])
@pytest.mark.parametrize("entries,max_budget", [(2304, 2048), (1280, 1024), (90, 48), (8192, 512), (64, 128)])
def test_select_on_gpu(kind, entries, max_budget):
    check_select(kind, 5, 3, entries, max_budget)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["own", "last", "swapped", "fresh", "mixed"])
@pytest.mark.parametrize(
    "page_size,tail,dtype", [(8, (4,), np.float32), (256, (128,), jnp.bfloat16), (16, (64,), np.float16)]
)
def test_compact_on_gpu(order, page_size, tail, dtype):
    pools, page_ids, kept, target_ids = compact_case(np.random.default_rng(14), order, page_size, tail, dtype)
    target_ids[2, 1] = 0
    for pool in pools:
        pool[0] = np.nan
    step = jax.jit(functools.partial(compact_pages, implementation="pallas"), donate_argnums=0)
    got = step(tuple(map(jnp.asarray, pools)), *map(jnp.asarray, (page_ids, kept, target_ids)))
    for mine, theirs in zip(got, oracle.compact_pages(pools, page_ids, kept, target_ids), strict=True):
        assert np.asarray(mine).tobytes() == theirs.tobytes()
