"""The Hopper attention kernels on a GPU, against their float32 references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention as decode
from pallas_kernels import prefill_attention as prefill

pytestmark = pytest.mark.gpu

SHAPES = {
    "qwen3-8b": (32, 8, 128),
    "qwen3-14b": (40, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-0.6b": (16, 8, 128),
    "qwen2.5-0.5b": (14, 2, 64),
    "smollm2": (9, 3, 64),
}


def pools(lens, kv_heads, page_size, head_dim, dtype, seed=0):
    """(k_pages, v_pages, page_ids, cache_len): rows of the given lengths on shuffled pages of a pool larger than needed."""
    num_pages = [-(-n // page_size) for n in lens]
    total, width = sum(num_pages) + 5, max(*num_pages, 1)
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.arange(1, total))
    table, at = np.zeros((len(lens), width), np.int32), 0
    for row, num in enumerate(num_pages):
        table[row, :num] = order[at : at + num]
        at += num
    keys = jax.random.split(jax.random.key(seed), 2)
    shape = (total, kv_heads, page_size, head_dim)
    k, v = (jax.random.normal(key, shape, dtype) for key in keys)
    return k, v, jnp.asarray(table), jnp.asarray(lens, jnp.int32)


def check(got, expected, dtype):
    """Within a few roundings of the dtype of the float32 result, and a shuffled result would not be."""
    tolerance = 8 * float(jnp.finfo(dtype).eps) * max(1.0, float(jnp.abs(expected).max()))
    error = float(jnp.abs(got.astype(jnp.float32) - expected).max())
    assert error < tolerance
    if expected.shape[0] > 1:
        assert float(jnp.abs(jnp.roll(expected, 1, axis=0) - expected).max()) > 2 * tolerance


def wide(*arrays):
    return tuple(a.astype(jnp.float32) for a in arrays)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_decode(name, page_size):
    heads, kv_heads, head_dim = SHAPES[name]
    lens = [0, 1, page_size, page_size + 1, 640, *np.random.default_rng(page_size).integers(1, 1500, 7).tolist()]
    for dtype, config in (
        (jnp.bfloat16, decode.Config()),
        (jnp.float16, decode.Config(max_chunk=3)),
        (jnp.bfloat16, decode.Config(streams=1, stages=4)),
    ):
        k, v, table, cache_len = pools(lens, kv_heads, page_size, head_dim, dtype)
        q = jax.random.normal(jax.random.key(7), (len(lens), heads, head_dim), dtype)
        run = jax.jit(functools.partial(decode.paged_attention, implementation="pallas", config=config))
        got = run(q, k, v, table, cache_len)
        expected = decode.paged_attention(*wide(q, k, v), table, cache_len, implementation="xla")
        check(got, expected, dtype)
        assert not got[0].any()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_prefill(name, page_size):
    heads, kv_heads, head_dim = SHAPES[name]
    query_lens = [1, 0, 37, 300, 128, 5]
    prefixes = [0, 0, 256, 100, 511, 3]
    lens = [q + p for q, p in zip(query_lens, prefixes, strict=True)]
    start = jnp.asarray(np.concatenate([[0], np.cumsum(query_lens)]), jnp.int32)
    tokens = 512
    for dtype, config in ((jnp.bfloat16, prefill.Config()), (jnp.float16, prefill.Config(block_k=64, stages=4))):
        k, v, table, cache_len = pools(lens, kv_heads, page_size, head_dim, dtype)
        q = jax.random.normal(jax.random.key(7), (tokens, heads, head_dim), dtype)
        run = jax.jit(functools.partial(prefill.prefill_attention, implementation="pallas", config=config))
        got = run(q, k, v, table, start, cache_len)
        expected = prefill.prefill_attention(*wide(q, k, v), table, start, cache_len, implementation="xla")
        check(got, expected, dtype)
        assert not got[sum(query_lens) :].any()
