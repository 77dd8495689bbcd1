"""The XLA forms of the compression ops against NumPy oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compact_pages import compact_pages
from pallas_kernels.key_redundancy import key_redundancy
from pallas_kernels.select_entries import select_entries
from pallas_kernels.window_scores import window_scores
from tests.compress_cases import KEY_KINDS, compact_case, paged, random_keys, select_scores
from tests.reference import compress_ops as oracle


def close(got, want, atol):
    """Near the oracle; zeros and a shuffled oracle are not."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=atol, rtol=0)
    assert np.abs(want).max() > 4 * atol
    assert np.abs(want - np.roll(want, 1, axis=-1)).max() > 4 * atol


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("window,heads,kv_heads", [(4, 6, 2), (3, 3, 3)])
def test_window_scores(reduce, window, heads, kv_heads):
    rng = np.random.default_rng(0)
    cache_len = np.array([24, 17, 2, 0], np.int32)
    keys = random_keys(rng, "common", (4, kv_heads, 24, 16))
    pool, page_ids = paged(rng, keys, cache_len, 8)
    queries = rng.standard_normal((4, window, heads, 16)).astype(np.float32)
    got = window_scores(*map(jnp.asarray, (queries, pool, page_ids, cache_len)), reduce=reduce, implementation="xla")
    want = oracle.window_scores(queries, pool, page_ids, cache_len, 0.25, reduce)
    close(got, want, 1e-6)
    # The softmax over the group's heads cannot sum below one head's.
    if reduce == "mean":
        assert np.all(np.asarray(got)[0].sum(axis=-1) >= 1 - 1e-5)


def test_window_scores_of_huge_logits_are_finite():
    rng = np.random.default_rng(1)
    pool, page_ids = paged(rng, 100 * rng.standard_normal((1, 1, 16, 8)), [16], 8)
    queries = (100 * rng.standard_normal((1, 4, 2, 8))).astype(np.float32)
    args = queries, pool, page_ids, np.array([16], np.int32)
    got = window_scores(*map(jnp.asarray, args), scale=1.0)
    close(got, oracle.window_scores(*args, 1.0, "mean"), 1e-4)


@pytest.mark.parametrize("mode", ["lightning", "flash"])
@pytest.mark.parametrize("kind", KEY_KINDS)
def test_key_redundancy(mode, kind):
    rng = np.random.default_rng(2)
    cache_len = np.array([24, 13, 0], np.int32)
    keys = random_keys(rng, kind, (3, 2, 24, 16)).astype(np.float32)
    pool, page_ids = paged(rng, keys, cache_len, 8)
    got = key_redundancy(*map(jnp.asarray, (pool, page_ids, cache_len)), mode=mode, implementation="xla")
    want = oracle.key_redundancy(pool, page_ids, cache_len, mode, 0.5)
    close(got, want, 1e-5)
    if kind in ("clusters", "duplicates", "common"):
        plain = oracle.key_redundancy(pool, page_ids, cache_len, mode, 2.0)
        assert np.abs(plain - want).max() > 0.4, "the case never crosses the threshold"


@pytest.mark.parametrize("kind", ["noise", "ties", "equal", "infinite"])
def test_select_entries(kind):
    rng = np.random.default_rng(3)
    scores = select_scores(rng, kind, (4, 2, 40))
    budget = np.array([16, 7, 0, 1], np.int32)
    got = select_entries(jnp.asarray(scores), jnp.asarray(budget), max_budget=16, implementation="xla")
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, oracle.select_entries(scores, budget, 16))


def test_select_entries_with_a_budget_wider_than_the_row():
    scores = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    got = select_entries(jnp.asarray(scores), jnp.asarray([8], jnp.int32), max_budget=12)
    np.testing.assert_array_equal(got[0, 0], [*range(8), 8, 8, 8, 8])


@pytest.mark.parametrize("order", ["own", "last", "swapped", "fresh", "mixed"])
def test_compact_pages(order):
    pools, page_ids, kept, target_ids = compact_case(np.random.default_rng(4), order)
    target_ids[2, 1] = 0
    for pool in pools:
        pool[0] = np.nan
    got = compact_pages(tuple(map(jnp.asarray, pools)), *map(jnp.asarray, (page_ids, kept, target_ids)))
    want = oracle.compact_pages(pools, page_ids, kept, target_ids)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine).view(np.int32), theirs.view(np.int32))


def test_compact_pages_works_in_place():
    pools, page_ids, kept, target_ids = compact_case(np.random.default_rng(5), "swapped")
    pools = tuple(jnp.asarray(np.tile(pool, (64, *[1] * (pool.ndim - 1)))) for pool in pools)
    args = pools, *map(jnp.asarray, (page_ids, kept, target_ids))
    memory = jax.jit(compact_pages, donate_argnums=0).lower(*args).compile().memory_analysis()
    total = sum(pool.nbytes for pool in pools)
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < total / 4


def test_refusals():
    x = jnp.zeros((1, 1, 8, 4))
    ids, length = jnp.zeros((1, 1), jnp.int32), jnp.full((1,), 8, jnp.int32)
    with pytest.raises(ValueError, match=r"reduce='sum' is not one of \['mean', 'max'\]"):
        window_scores(jnp.zeros((1, 4, 2, 4)), x, ids, length, reduce="sum")
    with pytest.raises(ValueError, match="heads=3 must be a multiple of kv_heads=2"):
        window_scores(jnp.zeros((1, 4, 3, 4)), jnp.zeros((1, 2, 8, 4)), ids, length)
    with pytest.raises(ValueError, match="mode='raw'"):
        key_redundancy(x, ids, length, mode="raw")
    with pytest.raises(ValueError, match="scores must be float32, not bfloat16"):
        select_entries(jnp.zeros((1, 1, 8), jnp.bfloat16), length, max_budget=4)
    with pytest.raises(ValueError, match="1 targets of 8 entries cannot hold exactly 4 kept ones"):
        compact_pages((x,), ids, jnp.zeros((1, 1, 4), jnp.int32), ids)
    with pytest.raises(ValueError, match="pools must agree"):
        compact_pages((x, jnp.zeros((2, 1, 8))), ids, jnp.zeros((1, 1, 8), jnp.int32), ids)
