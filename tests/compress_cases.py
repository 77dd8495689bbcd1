"""Inputs of the compression ops: paged keys of every kind, with NaN wherever nobody may look."""

import numpy as np

from tests.reference import compress_ops as oracle


def random_keys(rng, kind, shape):
    """[... n head_dim] keys: white noise, clusters of near-duplicates, exact duplicates, some zeros, or a common direction."""
    keys = rng.standard_normal(shape)
    n = shape[-2]
    if kind == "clusters":
        centre = rng.integers(0, max(n // 8, 1), shape[:-1])
        keys = np.take_along_axis(keys, centre[..., None], axis=-2) + 0.3 * keys
    elif kind == "duplicates":
        keys = np.take_along_axis(keys, rng.integers(0, n // 2, shape[:-1])[..., None], axis=-2)
    elif kind == "zeros":
        keys = np.where(rng.random(shape[:-1])[..., None] < 0.3, 0.0, keys)
    elif kind == "common":
        keys = keys + 2.0 * rng.standard_normal((*shape[:-2], 1, *shape[-1:]))
    return keys


KEY_KINDS = ("noise", "clusters", "duplicates", "zeros", "common")


def paged(rng, entries, cache_len, page_size, dtype=np.float32, spare=2):
    """Entries [rows kv_heads n head_dim] in pages of random ids: (pool, page_ids); NaN past cache_len and in spare pages."""
    rows, kv_heads, n, head_dim = entries.shape
    row_pages = n // page_size
    pool = np.full((rows * row_pages + spare, kv_heads, page_size, head_dim), np.nan, np.float32)
    page_ids = (rng.permutation(pool.shape[0] - 1)[: rows * row_pages] + 1).reshape(rows, row_pages).astype(np.int32)
    entries = np.where(np.arange(n)[None, None, :, None] < np.asarray(cache_len)[:, None, None, None], entries, np.nan)
    pages = entries.reshape(rows, kv_heads, row_pages, page_size, head_dim).transpose(0, 2, 1, 3, 4)
    pool[page_ids] = pages
    return pool.astype(dtype), page_ids


def select_scores(rng, kind, shape):
    scores = rng.standard_normal(shape).astype(np.float32)
    if kind == "ties":
        scores = np.round(scores).astype(np.float32)
        scores[scores == 0] = rng.choice(np.array([0.0, -0.0], np.float32), int((scores == 0).sum()))
    elif kind == "equal":
        scores[:] = 1.0
    elif kind == "infinite":
        scores[rng.random(shape) < 0.3] = -np.inf
        scores[rng.random(shape) < 0.1] = np.inf
    return scores


def compact_case(rng, order, page_size=8, tail=(4,), dtype=np.float32):
    """Three rows of 3 pages into 2 targets: own pages, swapped, or fresh ones; the last row keeps one page's worth only."""
    kv_heads = 2
    pools = tuple(
        rng.standard_normal((16, kv_heads, page_size, *rest)).astype(kind)
        for rest, kind in ((tail, dtype), (tail, dtype), ((), np.float32))
    )
    ids = rng.permutation(15) + 1
    page_ids = ids[:9].reshape(3, 3).astype(np.int32)
    fresh = ids[9:15].reshape(3, 2).astype(np.int32)
    targets = {
        "own": page_ids[:, :2],
        "last": page_ids[:, 1:],
        "swapped": page_ids[:, 1::-1],
        "fresh": fresh,
        "mixed": np.stack([page_ids[:, 2], fresh[:, 0]], axis=1),
    }
    scores = rng.standard_normal((3, kv_heads, 3 * page_size)).astype(np.float32)
    kept = oracle.select_entries(scores, np.array([2, 2, 1]) * page_size, 2 * page_size)
    return pools, page_ids, kept, targets[order].copy()
