"""Attention scores of cached entries, as the queries of the last window see them.

p[h, u, t] = softmax over t of q[u, h] · k[t] · scale, where row u sees entries t ≤ cache_len − window + u;
A[t] = mean (or maximum) over u of the maximum of p over the query heads of a kv head. All in float32.
Source: arXiv 2603.08743, sec. 4.1 and app. C.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve

REDUCTIONS = ("mean", "max")
CHUNK_LOGITS = 1 << 24
"""Logits that the XLA form holds at a time (64 MiB), or those of one row if that is more."""


def window_scores(
    queries: Float[Array, "rows window heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows row_pages"],
    cache_len: Int[Array, " rows"],
    *,
    scale: float | None = None,
    reduce: str = "mean",
    implementation: str | None = None,
) -> Float[Array, "rows kv_heads entries"]:
    """A of every entry, float32; entries past cache_len score 0, whatever their pages hold.

    The window is entries cache_len − window … cache_len − 1; entries = row_pages · page_size. `scale` is 1/√head_dim by default.

    Raises:
        ValueError: unknown `reduce`, or heads that kv_heads does not divide.
    """
    heads, head_dim = queries.shape[2:]
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce={reduce!r} is not one of {list(REDUCTIONS)}")
    if heads % k_pages.shape[1]:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={k_pages.shape[1]}")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    resolve("window_scores", implementation, ("xla",))
    return _reference(queries, k_pages, page_ids, cache_len, scale, reduce)


def _reference(queries, k_pages, page_ids, cache_len, scale, reduce):
    _, window, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    entries = page_ids.shape[1] * page_size
    entry = jnp.arange(entries, dtype=jnp.int32)

    def one_row(arrays):
        q, ids, length = arrays
        keys = k_pages[ids].astype(q.dtype).transpose(1, 0, 2, 3).reshape(kv_heads, entries, head_dim)
        q = q.reshape(window, kv_heads, heads // kv_heads, head_dim)
        logits = jnp.einsum(
            "ukgd,ktd->kgut", q, keys, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
        )
        seen = entry[None, :] <= length - window + jnp.arange(window, dtype=jnp.int32)[:, None]
        logits = jnp.where(seen[None, None], logits * scale, -jnp.inf)
        # A window row before the first entry sees nothing: zeros, not NaN.
        highest = jnp.maximum(logits.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
        p = jnp.exp(logits - highest)
        p = p / jnp.maximum(p.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        p = p.max(axis=1)
        return p.mean(axis=1) if reduce == "mean" else p.max(axis=1)

    rows_at_once = max(1, CHUNK_LOGITS // (heads * window * entries))
    return lax.map(one_row, (queries, page_ids, cache_len), batch_size=min(rows_at_once, queries.shape[0]))
