"""Prefill attention: a ragged batch of new tokens over their rows' pages, causal.

out[i] = softmax(q_i · Kᵀ · scale) V over entries 0 … cache_len − q_len + i of the row, in float32. The new tokens' own keys are
the last q_len entries, already written.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve

QUERY_BLOCK = 64
"""Tokens that the reference handles at once: a block never spans two rows."""


def prefill_attention(
    queries: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows max_pages"],
    query_start: Int[Array, " rows+1"],
    cache_len: Int[Array, " rows"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Attention of row r's tokens query_start[r] : query_start[r + 1]; tokens past the last row give zeros."""
    scale = 1.0 / math.sqrt(queries.shape[-1]) if scale is None else scale
    resolve("prefill_attention", implementation, ("xla",))
    return _reference(queries, k_pages, v_pages, page_ids, query_start, cache_len, scale)


def _reference(queries, k_pages, v_pages, page_ids, query_start, cache_len, scale):
    """Blocks of one row's tokens in a loop of as many trips as there are blocks; each gathers its row's pages once."""
    tokens, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    block = min(QUERY_BLOCK, tokens)
    group = heads // kv_heads
    entries = page_ids.shape[1] * page_size
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None

    query_len = query_start[1:] - query_start[:-1]
    first_block = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-query_len // block), dtype=jnp.int32)])
    padded = jnp.concatenate([queries, jnp.zeros((block, heads, head_dim), queries.dtype)])

    def gather(pool, row):
        pages = pool[jax.lax.dynamic_index_in_dim(page_ids, row, keepdims=False)]
        return pages.transpose(1, 0, 2, 3).reshape(kv_heads, entries, head_dim)

    def one_block(i, out):
        row = jnp.searchsorted(first_block, i, side="right").astype(jnp.int32) - 1
        start = query_start[row] + (i - first_block[row]) * block
        q = jax.lax.dynamic_slice_in_dim(padded, start, block).reshape(block, kv_heads, group, head_dim)
        logits = jnp.einsum("tkgd,ksd->kgts", q, gather(k_pages, row), precision=precision)
        last = cache_len[row] - query_start[row + 1] + start + jnp.arange(block, dtype=jnp.int32)
        visible = jnp.arange(entries, dtype=jnp.int32)[None, :] <= last[:, None]
        logits = jnp.where(visible[None, None], logits.astype(jnp.float32) * scale, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1, where=visible[None, None])
        live = jnp.arange(entries, dtype=jnp.int32)[None, :, None] < cache_len[row]
        values = jnp.where(live, gather(v_pages, row), 0)
        attended = jnp.einsum("kgts,ksd->tkgd", weights.astype(values.dtype), values, precision=precision)
        token = start + jnp.arange(block, dtype=jnp.int32)
        token = jnp.where(token < query_start[row + 1], token, tokens)
        return out.at[token].set(attended.reshape(block, heads, head_dim), mode="drop")

    return jax.lax.fori_loop(0, first_block[-1], one_block, jnp.zeros_like(queries))
