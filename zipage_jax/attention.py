"""The `attend` functions that steps hand to a model: write the new entries, keep window queries, read the pages.

A model calls `attend(layer, cache, q, k, v) -> (cache, out)` and never sees a page. Entries are written before they are
read, so a token sees itself. Source: arXiv 2603.08743, sec. 4.1 and 4.2.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.write_pages import write_pages, write_window_queries
from zipage_jax.state import NULL_SLOT, CacheState, PrefillBatch, RowBatch

Attend = Callable[..., tuple]


def decode_attend(rows: RowBatch, *, implementation: str | None = None) -> Attend:
    """Attention of one new token a row over the row's entries, the new one included (`cache_len` counts it)."""
    cache_len, slots = rows.ints("cache_len"), rows.ints("slot")

    def attend(layer: int, cache: CacheState, q, k, v):
        page_size = cache.k_pages.shape[2]
        # A padding row has no entries; it writes to the null page that its table points at.
        entry = jnp.maximum(cache_len - 1, 0)
        page_ids = rows.page_ids + layer * cache.num_pages
        page_id = jnp.take_along_axis(page_ids, (entry // page_size)[:, None], axis=1)[:, 0]
        offset = entry % page_size
        cache = _write_entries(cache, k, v, page_id, offset, rows.ints("position"), implementation)
        if cache.window_queries is not None:
            window_row = offset - (page_size - cache.window_queries.shape[1])
            slot = jnp.where(window_row >= 0, slots, NULL_SLOT)
            cache = _keep_queries(cache, layer, q, slot, jnp.maximum(window_row, 0), implementation)
        out = paged_attention(q, cache.k_pages, cache.v_pages, page_ids, cache_len, implementation=implementation)
        return cache, out

    return attend


def prefill_attend(batch: PrefillBatch, *, implementation: str | None = None) -> Attend:
    """Causal attention of a ragged batch of new tokens over their rows' entries, themselves included."""
    cache_len = batch.rows.ints("cache_len")

    def attend(layer: int, cache: CacheState, q, k, v):
        first_page = layer * cache.num_pages
        page_id, offset = batch.column("page_id") + first_page, batch.column("offset")
        cache = _write_entries(cache, k, v, page_id, offset, batch.column("position"), implementation)
        if cache.window_queries is not None:
            cache = _keep_queries(cache, layer, q, batch.column("slot"), batch.column("window_row"), implementation)
        page_ids = batch.rows.page_ids + first_page
        out = prefill_attention(
            q, cache.k_pages, cache.v_pages, page_ids, batch.query_start, cache_len, implementation=implementation
        )
        return cache, out

    return attend


def _write_entries(cache: CacheState, k, v, page_ids, offsets, positions, implementation) -> CacheState:
    k_pages, v_pages = write_pages(cache.k_pages, cache.v_pages, k, v, page_ids, offsets, implementation=implementation)
    recorded = cache.positions
    if recorded is not None:
        recorded = recorded.at[page_ids, :, offsets].set(jnp.broadcast_to(positions[:, None], k.shape[:2]))
    return dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages, positions=recorded)


def _keep_queries(cache: CacheState, layer: int, q, slots, window_rows, implementation) -> CacheState:
    """Store the queries of the last `window` tokens of a page: those that will score it (SPEC: window queries)."""
    queries = write_window_queries(
        cache.window_queries, q, slots + layer * cache.num_slots, window_rows, implementation=implementation
    )
    return dataclasses.replace(cache, window_queries=queries)
