"""The Hopper attention kernels: interpreted on the CPU, and compiled for the H200 without one."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_attention as decode
from pallas_kernels import prefill_attention as prefill
from pallas_kernels.cases import MODEL_SHAPES
from pallas_kernels.write_pages import write_pages
from tests.aot import compile_for_gpu
from tests.attention_cases import close, pools, renamed
from tests.reference import attention as oracle

HEAD_DIM, SCALE = 64, 0.125
TOLERANCE = 8 * float(jnp.finfo(jnp.bfloat16).eps)


@pytest.fixture
def interpreted():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def wide(*arrays):
    return (x.astype(np.float32) for x in arrays)


def run(op, *args, config):
    got = op(*map(jnp.asarray, args), implementation="pallas", config=config)
    return np.asarray(got.astype(jnp.float32))


@pytest.mark.parametrize(
    "heads,kv_heads,page_size,lens,config",
    [
        (2, 1, 64, [70, 0, 130], decode.Config(streams=1, num_programs=1)),
        # Pages smaller than a tile; rows split into chunks of one tile; more programs than work.
        (3, 1, 16, [70, 1, 64], decode.Config(streams=1, stages=1, num_programs=7, max_chunk=1)),
        (4, 2, 128, [150, 128], decode.Config(streams=2, num_programs=1, max_chunk=2)),
    ],
)
def test_decode_interpreted(interpreted, capfd, heads, kv_heads, page_size, lens, config):
    rng = np.random.default_rng(0)
    config = dataclasses.replace(config, weights_in_smem=True)
    k, v, page_ids, cache_len = pools(rng, lens, kv_heads, page_size, HEAD_DIM, jnp.bfloat16, tail=0)
    queries = rng.standard_normal((len(lens), heads, HEAD_DIM)).astype(jnp.bfloat16)
    got = run(decode.paged_attention, queries, k, v, page_ids, cache_len, config=config)
    close(got, oracle.paged_attention(*wide(queries, k, v), page_ids, cache_len, SCALE), TOLERANCE)
    assert not got[cache_len == 0].any()
    again = run(decode.paged_attention, queries, *renamed(rng, k, v, page_ids), cache_len, config=config)
    np.testing.assert_array_equal(got, again)
    assert "race" not in "".join(capfd.readouterr()).lower()


@pytest.mark.parametrize(
    "heads,page_size,query_lens,prefix_lens,config",
    [
        (2, 64, [40, 0, 1], [5, 0, 66], prefill.Config(block_k=64, consumers=1)),
        (3, 16, [30], [50], prefill.Config(block_k=64, stages=1, consumers=2)),
    ],
)
def test_prefill_interpreted(interpreted, capfd, heads, page_size, query_lens, prefix_lens, config):
    rng = np.random.default_rng(1)
    config = dataclasses.replace(config, weights_in_smem=True)
    lens = np.add(query_lens, prefix_lens)
    k, v, page_ids, cache_len = pools(rng, lens, 1, page_size, HEAD_DIM, jnp.bfloat16, tail=0)
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    queries = rng.standard_normal((start[-1] + 3, heads, HEAD_DIM)).astype(jnp.bfloat16)
    got = run(prefill.prefill_attention, queries, k, v, page_ids, start, cache_len, config=config)
    want = oracle.prefill_attention(*wide(queries, k, v), page_ids, start, cache_len, SCALE)
    # The first tokens see few entries, so that one too many would show.
    close(got, want, 2 * TOLERANCE)
    assert not got[start[-1] :].any()
    assert "race" not in "".join(capfd.readouterr()).lower()


def test_the_work_list_covers_every_tile_once_longest_first():
    cache_len = jnp.asarray([0, 1, 64, 65, 1000, 129], jnp.int32)
    config = decode.Config(max_chunk=4)
    items, count = decode.work_list(cache_len, 4, config)
    items, (count,) = np.asarray(items), np.asarray(count)
    assert np.all(np.diff(items[:, 2]) <= 0) and np.all(items[:count, 2] > 0) and not items[count:, 2].any()
    for row, n in enumerate(cache_len):
        chunks = sorted(items[(items[:, 0] == row) & (items[:, 2] > 0)][:, 1].tolist())
        assert chunks == list(range(len(chunks)))
        assert items[items[:, 0] == row][:, 2].sum() == -(-int(n) // 64)
    items, count = decode.work_list(cache_len, 1, config)
    assert count[0] == 6 and items[:, 0].tolist() == list(range(6))


def shape(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


def compiled(tmp_path, monkeypatch, function, args, **options):
    """The compiled function, after asserting that no register of its kernels spills."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    result = compile_for_gpu(function, args, **options)
    reports = [file.read_text() for file in tmp_path.glob("*.ptxas")]
    assert not any(int(n) for text in reports for n in re.findall(r"(\d+) bytes spill", text))
    return result


def decode_args(model, page_size, rows, width, dtype=jnp.bfloat16):
    heads, kv_heads, head_dim = MODEL_SHAPES[model]
    pool = shape(1000, kv_heads, page_size, head_dim, dtype=dtype)
    return shape(rows, heads, head_dim, dtype=dtype), pool, pool, shape(rows, width), shape(rows)


@pytest.mark.aot
@pytest.mark.parametrize(
    "model,page_size,rows,width,dtype",
    [
        ("qwen3-8b", 256, 256, 9, jnp.bfloat16),
        ("qwen3-14b", 64, 16, 128, jnp.bfloat16),
        ("qwen3-32b", 128, 1, 256, jnp.float16),
        ("qwen2.5-0.5b", 32, 64, 64, jnp.bfloat16),
        ("smollm2", 16, 8, 128, jnp.bfloat16),
    ],
)
def test_decode_compiles_for_the_h200(tmp_path, monkeypatch, model, page_size, rows, width, dtype):
    args = decode_args(model, page_size, rows, width, dtype)
    function = functools.partial(decode.paged_attention, implementation="pallas")
    memory = compiled(tmp_path, monkeypatch, function, args).memory_analysis()
    # Parts of split rows and their sums; nothing of the size of a pool.
    chunks = -(-width * page_size // (4 * 64))
    assert memory.temp_size_in_bytes < 4 * chunks * args[0].size * 4 + 2**20


@pytest.mark.aot
@pytest.mark.parametrize("config", range(len(decode.TUNING_CONFIGS)))
def test_every_decode_configuration_compiles(tmp_path, monkeypatch, config):
    function = functools.partial(decode.paged_attention, implementation="pallas", config=decode.TUNING_CONFIGS[config])
    compiled(tmp_path, monkeypatch, function, decode_args("qwen3-8b", 256, 16, 32))


@pytest.mark.aot
@pytest.mark.parametrize(
    "model,page_size,config",
    [("qwen3-8b", 256, c) for c in (None, *prefill.TUNING_CONFIGS[1:])] + [("smollm2", 16, None)],
)
def test_prefill_compiles_for_the_h200(tmp_path, monkeypatch, model, page_size, config):
    queries, *rest = decode_args(model, page_size, 16, 16)
    queries = shape(2048, *queries.shape[1:], dtype=queries.dtype)
    args = queries, *rest[:3], shape(17), rest[3]
    function = functools.partial(prefill.prefill_attention, implementation="pallas", config=config)
    memory = compiled(tmp_path, monkeypatch, function, args).memory_analysis()
    # Queries and outputs in blocks, of which each row wastes one at most.
    assert memory.temp_size_in_bytes < 8 * (queries.size + 16 * 128 * 8 * 128) * 2


@pytest.mark.aot
def test_writes_compile_in_place_for_the_h200():
    pool = shape(1000, 8, 256, 128, dtype=jnp.bfloat16)
    new = shape(512, 8, 128, dtype=jnp.bfloat16)
    memory = compile_for_gpu(
        write_pages, (pool, pool, new, new, shape(512), shape(512)), donate_argnums=(0, 1)
    ).memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pool.size * 2
    assert memory.temp_size_in_bytes < 2**24
