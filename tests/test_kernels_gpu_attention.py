"""The Hopper attention kernels on a GPU, against their float32 references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention as decode
from pallas_kernels import prefill_attention as prefill
from pallas_kernels.cases import MODEL_SHAPES, DecodeCase, PrefillCase, decode_inputs, log_uniform_lens, prefill_inputs

pytestmark = pytest.mark.gpu

PAGE_SIZES = (16, 32, 64, 128, 256)
CONFIGS = (None, decode.Config(max_chunk=3), decode.Config(streams=1, stages=4), decode.Config(block_k=128, streams=1))


def check(got, expected, dtype):
    """Within a few roundings of the dtype of the float32 result, and a shuffled result would not be."""
    tolerance = 8 * float(jnp.finfo(dtype).eps) * max(1.0, float(jnp.abs(expected).max()))
    assert float(jnp.abs(got.astype(jnp.float32) - expected).max()) < tolerance
    if expected.shape[0] > 1:
        assert float(jnp.abs(jnp.roll(expected, 1, axis=0) - expected).max()) > 2 * tolerance


def wide(*arrays):
    return tuple(a.astype(jnp.float32) for a in arrays)


@pytest.mark.parametrize("index,model", list(enumerate(MODEL_SHAPES)))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode(index, model, page_size):
    """Rows of every kind of length: none, one entry, a page, one more, one less, several tiles."""
    drawn = np.random.default_rng(page_size).integers(1, 1500, 6).tolist()
    lens = (0, 1, page_size, page_size + 1, page_size - 1, 640, *drawn)
    which = index + PAGE_SIZES.index(page_size)
    dtype = jnp.float16 if which % 3 == 1 else jnp.bfloat16
    q, k, v, table, cache_len = decode_inputs(DecodeCase("", lens, model, page_size, jnp.dtype(dtype).name), seed=which)
    run = jax.jit(functools.partial(decode.paged_attention, implementation="pallas", config=CONFIGS[which % 4]))
    got = run(q, k, v, table, cache_len)
    check(got, decode.paged_attention(*wide(q, k, v), table, cache_len, implementation="xla"), dtype)
    assert not got[0].any()
    for _ in range(3):
        np.testing.assert_array_equal(got, run(q, k, v, table, cache_len))


@pytest.mark.parametrize("lens", [(20000,), log_uniform_lens(32, 8192)])
def test_decode_of_rows_in_many_chunks(lens):
    q, k, v, table, cache_len = decode_inputs(DecodeCase("", lens))
    got = jax.jit(functools.partial(decode.paged_attention, implementation="pallas"))(q, k, v, table, cache_len)
    check(got, decode.paged_attention(*wide(q, k, v), table, cache_len, implementation="xla"), jnp.bfloat16)


def test_decode_at_the_far_end_of_a_pool_of_more_than_two_to_the_31_elements():
    q, k, v, table, cache_len = decode_inputs(DecodeCase("", (700, 3, 256)))
    far = 9000
    assert far * k[0].size > 2**31
    pools = [jnp.zeros((far + len(k), *k.shape[1:]), k.dtype).at[far:].set(x) for x in (k, v)]
    run = jax.jit(functools.partial(decode.paged_attention, implementation="pallas"))
    np.testing.assert_array_equal(run(q, *pools, table + far, cache_len), run(q, k, v, table, cache_len))


@pytest.mark.parametrize("index,model", list(enumerate(MODEL_SHAPES)))
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_prefill(index, model, page_size):
    """The first tokens of a row see few entries, so that one too many or too few shows."""
    query_lens, prefix_lens = (1, 0, 37, 300, 128, 5), (0, 0, 256, 100, 511, 3)
    which = index + PAGE_SIZES.index(page_size)
    dtype = jnp.float16 if which % 3 == 1 else jnp.bfloat16
    config = prefill.TUNING_CONFIGS[which % len(prefill.TUNING_CONFIGS)]
    case = PrefillCase("", query_lens, prefix_lens, model, page_size, jnp.dtype(dtype).name)
    q, *rest = prefill_inputs(case, seed=which)
    q = jnp.concatenate([q, q[:41]])
    got = jax.jit(functools.partial(prefill.prefill_attention, implementation="pallas", config=config))(q, *rest)
    expected = prefill.prefill_attention(*wide(q, *rest[:2]), *rest[2:], implementation="xla")
    check(got, expected, dtype)
    assert not got[sum(query_lens) :].any()
