"""The XLA forms of the attention ops and of the writes into pages, against NumPy oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.write_pages import write_pages, write_window_queries
from tests.attention_cases import close, pools, renamed
from tests.reference import attention as oracle


def run(op, *args, **options):
    return np.asarray(
        functools.partial(op, implementation="xla", **options)(*map(jnp.asarray, args)).astype(jnp.float32)
    )


@pytest.mark.parametrize("heads,kv_heads", [(6, 2), (5, 1), (3, 3), (8, 1)])
@pytest.mark.parametrize("page_size,lens", [(4, [0, 1, 4, 11, 16]), (16, [33, 5])])
def test_decode(heads, kv_heads, page_size, lens):
    rng = np.random.default_rng(0)
    k, v, page_ids, cache_len = pools(rng, lens, kv_heads, page_size, 16, np.float32)
    queries = rng.standard_normal((len(lens), heads, 16)).astype(np.float32)
    got = run(paged_attention, queries, k, v, page_ids, cache_len)
    close(got, oracle.paged_attention(queries, k, v, page_ids, cache_len, 0.25), 1e-5)
    assert not got[cache_len == 0].any()
    np.testing.assert_array_equal(got, run(paged_attention, queries, *renamed(rng, k, v, page_ids), cache_len))


def test_decode_in_bfloat16_of_huge_logits_and_with_a_scale():
    rng = np.random.default_rng(1)
    k, v, page_ids, cache_len = pools(rng, [9, 30], 2, 8, 32, jnp.bfloat16)
    queries = (rng.standard_normal((2, 4, 32)) * 30).astype(jnp.bfloat16)
    got = run(paged_attention, queries, k, v, page_ids, cache_len, scale=0.3)
    wide = (x.astype(np.float32) for x in (queries, k, v))
    close(got, oracle.paged_attention(*wide, page_ids, cache_len, 0.3), 0.05)


def test_bfloat16_is_rounded_once():
    """Logits and sums are float32: an output is the oracle's, rounded to bfloat16 and no further."""
    rng = np.random.default_rng(4)
    k, v, page_ids, cache_len = pools(rng, [64, 40], 2, 8, 128, jnp.bfloat16)
    queries = (rng.standard_normal((2, 8, 128)) * 8).astype(jnp.bfloat16)
    wide = [x.astype(np.float32) for x in (queries, k, v)]
    start = np.arange(3, dtype=np.int32)
    expected = oracle.paged_attention(*wide, page_ids, cache_len, 128**-0.5)
    allowed = np.abs(expected) * 2.0**-8 + 1e-5
    assert (np.abs(run(paged_attention, queries, k, v, page_ids, cache_len) - expected) <= allowed).all()
    assert (np.abs(run(prefill_attention, queries, k, v, page_ids, start, cache_len) - expected) <= allowed).all()


@pytest.mark.parametrize("heads,kv_heads", [(6, 2), (3, 3)])
@pytest.mark.parametrize(
    "query_lens,prefix_lens,padding", [([5, 0, 1, 9], [3, 0, 12, 0], 4), ([70], [1], 0), ([1, 1], [0, 7], 1)]
)
def test_prefill(heads, kv_heads, query_lens, prefix_lens, padding):
    rng = np.random.default_rng(2)
    lens = np.add(query_lens, prefix_lens)
    k, v, page_ids, cache_len = pools(rng, lens, kv_heads, 8, 16, np.float32)
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    queries = rng.standard_normal((start[-1] + padding, heads, 16)).astype(np.float32)
    got = run(prefill_attention, queries, k, v, page_ids, start, cache_len)
    close(got, oracle.prefill_attention(queries, k, v, page_ids, start, cache_len, 0.25), 1e-5)
    assert not got[start[-1] :].any()
    k, v, page_ids = renamed(rng, k, v, page_ids)
    np.testing.assert_array_equal(got, run(prefill_attention, queries, k, v, page_ids, start, cache_len))


def test_prefill_of_one_token_a_row_is_decode():
    rng = np.random.default_rng(3)
    k, v, page_ids, cache_len = pools(rng, [9, 17, 1], 2, 8, 16, np.float32)
    queries = rng.standard_normal((3, 4, 16)).astype(np.float32)
    start = np.arange(4, dtype=np.int32)
    got = run(prefill_attention, queries, k, v, page_ids, start, cache_len)
    np.testing.assert_allclose(got, run(paged_attention, queries, k, v, page_ids, cache_len), atol=1e-6)


def test_writes_touch_nothing_else_and_copy_no_pool():
    rng = np.random.default_rng(4)
    pool = rng.standard_normal((2, 6, 2, 4, 8)).astype(np.float32)
    new = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    page_ids, offsets = np.array([3, 1, 3], np.int32), np.array([0, 3, 2], np.int32)
    args = [jnp.asarray(x) for x in (*pool, *new, page_ids, offsets)]
    compiled = jax.jit(write_pages, donate_argnums=(0, 1)).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes and memory.temp_size_in_bytes < pool.nbytes // 2
    for got, before, tokens in zip(compiled(*args), pool, new, strict=True):
        want = before.copy()
        want[page_ids, :, offsets] = tokens
        assert np.asarray(got).tobytes() == want.tobytes()


def test_window_queries_go_to_their_slots():
    rng = np.random.default_rng(5)
    stored = rng.standard_normal((3, 4, 2, 8)).astype(np.float32)
    queries = rng.standard_normal((4, 2, 8)).astype(np.float32)
    slots, rows = np.array([2, 0, 0, 1], np.int32), np.array([3, 0, 0, 1], np.int32)
    got = np.array(write_window_queries(*map(jnp.asarray, (stored, queries, slots, rows))))
    want = stored.copy()
    want[2, 3], want[1, 1] = queries[0], queries[3]
    assert got[1:].tobytes() == want[1:].tobytes() and got[0, 1:].tobytes() == want[0, 1:].tobytes()


def test_names_that_an_op_does_not_have_are_refused():
    x = jnp.zeros((1, 2, 64), jnp.bfloat16)
    pool = jnp.zeros((2, 1, 8, 64), jnp.bfloat16)
    ids, n = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=r"'cuda'.*xla"):
        paged_attention(x, pool, pool, ids, n, implementation="cuda")
    assert dispatch.resolve("paged_attention", "pallas") == "pallas"
    if jax.default_backend() == "cpu":
        assert dispatch.resolve("paged_attention", None) == "xla"


@pytest.fixture
def on_gpu(monkeypatch):
    """Pretend that the default device is a GPU of some compute capability."""

    def pretend(capability):
        dispatch.default_implementation.cache_clear()
        dispatch._warn_once.cache_clear()
        monkeypatch.setattr(dispatch, "_gpu_capability", lambda: capability)

    yield pretend
    dispatch.default_implementation.cache_clear()
    dispatch._warn_once.cache_clear()


def test_the_device_chooses(on_gpu, caplog):
    for capability, chosen in ((None, "xla"), (8, "xla"), (9, "pallas"), (10, "xla")):
        on_gpu(capability)
        assert dispatch.resolve("op", None) == chosen
    assert dispatch.resolve("op", "xla") == "xla"
    with pytest.raises(ValueError, match="capability 9, not 10"):
        dispatch.resolve("op", "pallas")
    on_gpu(9)
    caplog.clear()
    assert [dispatch.resolve("op", None, problem="of the shape") for _ in range(2)] == ["xla"] * 2
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize(
    "dtype,heads,kv_heads,head_dim,page_size,says",
    [
        (jnp.float32, 2, 1, 64, 8, "float32"),
        (jnp.bfloat16, 2, 1, 96, 8, "head_dim=96"),
        (jnp.bfloat16, 3, 2, 64, 8, "heads=3"),
        (jnp.bfloat16, 2, 1, 64, 12, "page_size=12"),
        (jnp.bfloat16, 2, 1, 64, 4, "page_size=4"),
    ],
)
def test_shapes_that_pallas_cannot_tile_are_refused_by_name(dtype, heads, kv_heads, head_dim, page_size, says):
    queries = jax.ShapeDtypeStruct((1, heads, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((2, kv_heads, page_size, head_dim), dtype)
    ids, n, start = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, 1), (1,), (2,)))
    decode = functools.partial(paged_attention, implementation="pallas")
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(decode, queries, pool, pool, ids, n)
    prefill = functools.partial(prefill_attention, implementation="pallas")
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(prefill, queries, pool, pool, ids, start, n)
