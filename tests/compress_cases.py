"""Inputs of the compression ops: paged keys of every kind, with NaN wherever nobody may look."""

import numpy as np


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
