"""Attention over pages in float64, row by row: the oracle of both attention ops. Imports nothing of the project."""

import numpy as np


def row_attention(queries, keys, values, visible, scale):
    """[tokens, heads, head_dim]: softmax(q·kᵀ·scale) v over the first visible[i] entries; keys [kv_heads, entries, head_dim]."""
    tokens, heads, head_dim = queries.shape
    group = heads // keys.shape[0]
    out = np.zeros((tokens, heads, head_dim))
    for i in range(tokens):
        for h in range(heads):
            k, v = (
                keys[h // group, : visible[i]].astype(np.float64),
                values[h // group, : visible[i]].astype(np.float64),
            )
            if len(k):
                logits = k @ queries[i, h].astype(np.float64) * scale
                weights = np.exp(logits - logits.max())
                out[i, h] = weights @ v / weights.sum()
    return out


def gather(pool, page_ids, length):
    """[kv_heads, length, head_dim] of one row."""
    pages = [pool[page] for page in page_ids[: -(-length // pool.shape[2])]]
    return np.concatenate(pages, axis=1)[:, :length] if pages else pool[0][:, :0]


def paged_attention(queries, k_pages, v_pages, page_ids, cache_len, scale):
    out = np.zeros(queries.shape)
    for r, length in enumerate(cache_len):
        keys, values = (gather(pool, page_ids[r], length) for pool in (k_pages, v_pages))
        out[r] = row_attention(queries[r : r + 1], keys, values, [length], scale)[0]
    return out


def prefill_attention(queries, k_pages, v_pages, page_ids, query_start, cache_len, scale):
    out = np.zeros(queries.shape)
    for r, length in enumerate(cache_len):
        first, end = query_start[r], query_start[r + 1]
        keys, values = (gather(pool, page_ids[r], length) for pool in (k_pages, v_pages))
        visible = length - (end - first) + 1 + np.arange(end - first)
        out[first:end] = row_attention(queries[first:end], keys, values, visible, scale)
    return out
