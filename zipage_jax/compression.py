"""Compression: score -> protect -> select -> compact, one function a stage, for a slice of layers at once.

Layers and requests are flattened into rows, so that each kernel runs once a slice. The host chose sources and targets
(`CompressBatch`); what is kept is decided here. Source: arXiv 2603.08743, sec. 4.2 and app. C.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.compact_pages import compact_pages
from pallas_kernels.select_entries import select_entries
from zipage_jax.config import CompressionConfig
from zipage_jax.scoring import ScoreContext, Scored, ScoringPolicy
from zipage_jax.state import CacheState, CompressBatch

CHUNK = 1 << 24
"""Numbers that an XLA form of a kernel holds at a time, or one row's if those are more."""
LOWEST = float(jnp.finfo(jnp.float32).min)
"""Score of a valid entry that a policy calls NaN or -inf: still before padding, which is -inf."""


def compress_layers(
    cache: CacheState,
    batch: CompressBatch,
    config: CompressionConfig,
    *,
    layer_start: Int[Array, ""],
    num_layers: int,
    implementation: str | None = None,
) -> CacheState:
    """The cache with layers layer_start : layer_start + num_layers of the batch's requests compressed into their targets.

    Each (request, layer, kv head) keeps its own budget[row] best entries, in time order: the j-th is entry j % page_size of
    page target_ids[row, j // page_size]. Pages that are no target keep their contents. `cache` is donated.
    """
    if not config.policy.evicts:
        raise ValueError("policy='full' evicts nothing; run the engine without compression")
    if config.policy.keeps_history and cache.scores is None:
        raise ValueError(f"{config.policy} keeps a history, but the cache has no scores; build it for this policy")
    context, target_ids = flatten_layers(cache, batch, layer_start, num_layers, config.policy, implementation)
    scored = score_entries(context, config.policy, num_layers)
    scores = protect_entries(scored.scores, context, config.sink_len)
    max_budget = target_ids.shape[1] * context.page_size
    kept = select_entries(scores, context.budget, max_budget=max_budget, implementation=implementation)
    return compact_cache(cache, context, kept, target_ids, scored.history)


def flatten_layers(
    cache: CacheState,
    batch: CompressBatch,
    layer_start: Int[Array, ""],
    num_layers: int,
    policy: ScoringPolicy,
    implementation: str | None = None,
) -> tuple[ScoreContext, Int[Array, "rows targets"]]:
    """Context of the slice's rows (layer by layer, the batch's rows inside) and the target pages of each, absolute."""
    layers = jnp.asarray(layer_start, jnp.int32) + jnp.arange(num_layers, dtype=jnp.int32)

    def flat(x):
        return jnp.broadcast_to(x, (num_layers, *x.shape)).reshape(-1, *x.shape[1:])

    def absolute(ids, per_layer):
        offset = (layers * per_layer).reshape(-1, *(1,) * ids.ndim)
        return (ids[None] + offset).reshape(-1, *ids.shape[1:])

    page_ids = absolute(batch.page_ids, cache.num_pages)
    page_size = cache.k_pages.shape[2]
    history_len = flat(batch.history_len)
    history = None
    if policy.keeps_history:
        # The barrier keeps XLA from copying the pool: the scatter into the targets must not overtake this read.
        taken = jax.lax.optimization_barrier(cache.scores[page_ids]).astype(jnp.float32)
        rows, pages, kv_heads, _ = taken.shape
        taken = taken.transpose(0, 2, 1, 3).reshape(rows, kv_heads, pages * page_size)
        known = jnp.arange(pages * page_size, dtype=jnp.int32)[None, :] < history_len[:, None]
        history = jnp.where(known[:, None], taken, 0.0)
    context = ScoreContext(
        queries=cache.window_queries[absolute(batch.slots, cache.num_slots)],
        k_pages=cache.k_pages,
        v_pages=cache.v_pages,
        page_ids=page_ids,
        num_entries=flat(batch.num_pages) * page_size,
        budget=flat(batch.budget),
        history=history,
        history_len=history_len,
        layer=jnp.repeat(layers, batch.page_ids.shape[0]),
        seed=flat(batch.seeds),
        entries_readable=False,
        implementation=implementation,
    )
    return context, absolute(batch.target_ids, cache.num_pages)


PER_ROW = ("queries", "page_ids", "num_entries", "budget", "history", "history_len", "layer", "seed")


def score_entries(context: ScoreContext, policy: ScoringPolicy, num_layers: int) -> Scored:
    """The policy's scores. One that reads single entries goes layer by layer, so that their keys exist for one at a time."""
    if not policy.reads_entries:
        return policy.score(context)

    def one_layer(arrays):
        return policy.score(dataclasses.replace(context, **arrays, entries_readable=True, _computed={}))

    arrays = {name: getattr(context, name) for name in PER_ROW if getattr(context, name) is not None}
    layered = {name: x.reshape(num_layers, -1, *x.shape[1:]) for name, x in arrays.items()}
    scored = jax.lax.map(one_layer, layered)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), scored)


def protect_entries(
    scores: Float[Array, "rows kv_heads entries"], context: ScoreContext, sink_len: int
) -> Float[Array, "rows kv_heads entries"]:
    """Scores with +inf for the window and the first `sink_len` entries, -inf for padding and a finite value elsewhere."""
    scores = jnp.where(scores > LOWEST, scores.astype(jnp.float32), LOWEST)
    sinks = context.entry[None] < sink_len
    scores = jnp.where(context.in_window | sinks, jnp.inf, scores)
    return jnp.where(context.valid, scores, -jnp.inf)


def compact_cache(
    cache: CacheState,
    context: ScoreContext,
    kept: Int[Array, "rows kv_heads max_budget"],
    target_ids: Int[Array, "rows targets"],
    history: Float[Array, "rows kv_heads entries"] | None,
) -> CacheState:
    """The cache with the kept entries (and their positions, if recorded) moved to the targets, and their history written there.

    The history comes from the computed scores, never through the source pages: other requests may share those.
    """
    pools = (cache.k_pages, cache.v_pages)
    if cache.positions is not None:
        pools += (cache.positions,)
    pools = compact_pages(pools, context.page_ids, kept, target_ids, implementation=context.implementation)
    changes = dict(zip(("k_pages", "v_pages", "positions"), pools, strict=False))
    if history is not None:
        values = jnp.take_along_axis(history, jnp.minimum(kept, context.max_entries - 1), axis=2)
        rows, kv_heads, _ = values.shape
        values = values.reshape(rows, kv_heads, -1, context.page_size).transpose(0, 2, 1, 3)
        changes["scores"] = cache.scores.at[target_ids].set(values.astype(cache.scores.dtype))
    return dataclasses.replace(cache, **changes)


def workspace_bytes(
    config: CompressionConfig,
    *,
    rows: int,
    pages: int,
    target_pages: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    itemsize: int,
) -> int:
    """Bytes of temporaries that one call of `compress_layers` may take, an upper bound for every implementation.

    Per entry of every row ten float32 (scores, history, redundancy, the selection's sort); and the largest of: a chunk of rows
    in six arrays (logits or similarities, and the keys they come from); the keys, values and logits of one layer, for policies
    that read entries; K and V of all kept entries, staged before they are written, with one more of both in flight.
    """
    flat, entries, kept = rows * num_layers, pages * page_size, target_pages * page_size
    per_entry = 10 * 4 * flat * num_kv_heads * entries
    row = entries * max(num_heads * config.window, num_kv_heads * head_dim, num_kv_heads * page_size)
    chunk = 6 * 4 * max(row, min(CHUNK, flat * row))
    layer = 0
    if config.policy.reads_entries:
        layer = 4 * rows * entries * (3 * num_kv_heads * head_dim + 3 * num_heads * config.window)
    staged = flat * num_kv_heads * kept * (3 * head_dim * itemsize + 6 * 4)
    return per_entry + max(chunk, layer, staged)
