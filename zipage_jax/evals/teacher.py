"""Teacher forcing over a compressed cache: how far a policy's predictions are from full KV, token by token.

All documents advance together, a page of tokens at a time: compress every document to its budget, append the next page,
compare the predictions of its tokens with those of full KV. The attention here is dense over the gathered pages, so that the
measurement depends on the policies and the pipeline alone, not on the serving kernels.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import models
from models import LoadedModel
from zipage_jax.compression import compress_layers
from zipage_jax.config import CompressionConfig
from zipage_jax.state import CacheState, CompressBatch


@dataclass(frozen=True)
class FullPass:
    """What full KV computes for each document: hidden states of all tokens, and of the first `kept` ones K, V and queries."""

    tokens: Int[Array, "docs length"]
    hidden: Float[Array, "docs length hidden"]
    queries: Float[np.ndarray, "docs layers kept heads head_dim"]
    keys: Float[np.ndarray, "docs layers kept kv_heads head_dim"]
    values: Float[np.ndarray, "docs layers kept kv_heads head_dim"]


@dataclass(frozen=True)
class Divergence:
    """Per document and token: KL(full ‖ compressed) in nats, and whether both think the same token most likely."""

    kl: Float[np.ndarray, "docs tokens"]
    agrees: Float[np.ndarray, "docs tokens"]


def full_pass(model: LoadedModel, tokens: Int[np.ndarray, "docs length"], kept: int) -> FullPass:
    """Full KV over each document, one document at a time."""
    run = jax.jit(functools.partial(_full_document, config=model.config, kept=kept))
    found = [run(model.params, jnp.asarray(ids)) for ids in tokens]
    hidden = jnp.stack([hidden for hidden, _ in found])
    queries, keys, values = (np.stack([np.asarray(entries[i]) for _, entries in found]) for i in range(3))
    return FullPass(jnp.asarray(tokens), hidden, queries, keys, values)


def divergence(
    model: LoadedModel,
    full: FullPass,
    config: CompressionConfig,
    *,
    page_size: int,
    num_tokens: int,
    table_pages: int | None = None,
    seed: int = 0,
    implementation: str | None = None,
) -> Divergence:
    """The policy's divergence on the `num_tokens` tokens that follow each document's first compression.

    Page tables are padded to `table_pages` (N_max by default): one width for all budgets compiles one program for them.
    """
    docs, pages = full.tokens.shape[0], config.max_pages
    width = table_pages or pages
    cache = start_cache(model.config.num_layers, full, config, page_size, width)
    page_ids = np.zeros((docs, width), np.int32)
    page_ids[:, :pages] = 1 + np.arange(docs * pages, dtype=np.int32).reshape(docs, pages)
    targets = np.where(np.arange(width) < config.budget_pages, page_ids, 0)[:, : width - 1]
    common = dataclasses.replace(config, budget_pages=width - 1)
    compress = compress_program(common, model.config.num_layers, implementation)
    advance = advance_program(model.config, page_size)
    start, found = pages * page_size, []
    for turn, at in enumerate(range(start, start + num_tokens, page_size)):
        batch = CompressBatch(
            page_ids=page_ids,
            num_pages=np.full(docs, pages, np.int32),
            target_ids=targets,
            budget=np.full(docs, config.budget_pages * page_size, np.int32),
            history_len=np.full(docs, config.budget_pages * page_size if turn else 0, np.int32),
            slots=1 + np.arange(docs, dtype=np.int32),
            seeds=(seed + np.arange(docs) * 1009 + turn).astype(np.int32),
        )
        cache = compress(cache=cache, batch=batch, layer_start=np.int32(0))
        cache, kl, agrees = advance(
            model.params, cache, page_ids, np.int32(pages), full.tokens, full.hidden, np.int32(at)
        )
        found.append((kl, agrees))
    kl, agrees = (np.concatenate([np.asarray(part) for part in parts], axis=1) for parts in zip(*found, strict=True))
    return Divergence(kl, agrees)


def start_cache(num_layers: int, full: FullPass, config: CompressionConfig, page_size: int, width: int) -> CacheState:
    """Every document's first N_max pages, full and about to be compressed for the first time, in a pool for `width` pages."""
    docs, _, _, kv_heads, head_dim = full.keys.shape
    pages, entries = config.max_pages, config.max_pages * page_size
    spare = docs * (width - pages)

    def paged(x):
        x = x[:, :, :entries].reshape(docs, num_layers, pages, page_size, kv_heads, head_dim)
        x = np.moveaxis(x, 0, 1).reshape(num_layers, docs * pages, page_size, kv_heads, head_dim).swapaxes(2, 3)
        x = np.pad(x, ((0, 0), (1, spare), (0, 0), (0, 0), (0, 0)))  # the null page in front
        return jnp.asarray(x.reshape(-1, kv_heads, page_size, head_dim))

    queries = np.moveaxis(full.queries[:, :, entries - config.window : entries], 0, 1)
    queries = np.pad(queries, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
    k_pages = paged(full.keys)
    return CacheState(
        k_pages=k_pages,
        v_pages=paged(full.values),
        scores=jnp.zeros(k_pages.shape[:3], jnp.float32) if config.policy.keeps_history else None,
        window_queries=jnp.asarray(queries.reshape(-1, *queries.shape[2:])),
        num_layers=num_layers,
    )


@functools.cache
def compress_program(config: CompressionConfig, num_layers: int, implementation: str | None):
    """The jitted compression of all layers; how much is kept is data, so one program serves all budgets of a width."""
    run = functools.partial(compress_layers, config=config, num_layers=num_layers, implementation=implementation)
    return jax.jit(run, donate_argnames="cache")


@functools.cache
def advance_program(config: models.ModelConfig, page_size: int):
    """The jitted step that appends one page of tokens to every document and compares its predictions with full KV's."""

    def advance(params, cache, page_ids, num_pages, tokens, hidden, at):
        docs = tokens.shape[0]
        new = jax.lax.dynamic_slice_in_dim(tokens, at, page_size, axis=1).reshape(-1)
        positions = jnp.tile(at + jnp.arange(page_size, dtype=jnp.int32), docs)
        own, cache = models.forward(params, config, new, positions, cache, _page_attend(page_ids, num_pages))
        reference = jax.lax.dynamic_slice_in_dim(hidden, at, page_size, axis=1).reshape(own.shape)
        p = jax.nn.log_softmax(models.logits(params, config, reference))
        q = jax.nn.log_softmax(models.logits(params, config, own))
        kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
        agrees = (p.argmax(axis=-1) == q.argmax(axis=-1)).astype(jnp.float32)
        return cache, kl.reshape(docs, page_size), agrees.reshape(docs, page_size)

    return jax.jit(advance, donate_argnums=1)


def _page_attend(page_ids, num_pages):
    """Write a page of new entries into every document's last page; attend over its `num_pages` pages, causal in the last."""
    docs, width = page_ids.shape

    def attend(layer, cache, q, k, v):
        page_size, slots = cache.k_pages.shape[2], 1 + jnp.arange(docs)
        ids = page_ids + layer * cache.num_pages
        last = jnp.take(ids, num_pages - 1, axis=1)
        k_pages, v_pages = (
            pool.at[last].set(new.reshape(docs, page_size, *new.shape[1:]).swapaxes(1, 2))
            for pool, new in ((cache.k_pages, k), (cache.v_pages, v))
        )
        q = q.reshape(docs, page_size, *q.shape[1:])
        window = cache.window_queries.shape[1]
        queries = cache.window_queries.at[slots + layer * cache.num_slots].set(q[:, page_size - window :])
        keys, values = (pool[ids].swapaxes(1, 2) for pool in (k_pages, v_pages))
        keys, values = (x.reshape(*x.shape[:2], width * page_size, -1) for x in (keys, values))
        seen = jnp.arange(width * page_size)[None] <= ((num_pages - 1) * page_size + jnp.arange(page_size))[:, None]
        out = _attention(q, keys, values, seen)
        return cache.replace(k_pages=k_pages, v_pages=v_pages, window_queries=queries), out.reshape(-1, *out.shape[2:])

    return attend


def _full_document(params, tokens, *, config, kept):
    """Hidden states of one document, and the queries, keys and values of its first tokens, stacked over layers."""
    length = tokens.shape[0]
    seen = jnp.tril(jnp.ones((length, length), bool))

    def attend(layer, taken, q, k, v):
        out = _attention(q[None], k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None], seen)
        return (*taken, (q[:kept], k[:kept], v[:kept])), out[0]

    hidden, taken = models.forward(params, config, tokens, jnp.arange(length), (), attend)
    return hidden, tuple(jnp.stack(parts) for parts in zip(*taken, strict=True))


def _attention(q, keys, values, seen):
    """softmax(q kᵀ/√d) v: q [docs tokens heads head_dim], keys and values [docs kv_heads entries head_dim]."""
    docs, tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    q = q.reshape(docs, tokens, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("btkgd,bked->bkgte", q, keys, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], logits, -jnp.inf))
    out = jnp.einsum("bkgte,bked->btkgd", weights.astype(values.dtype), values)
    return out.reshape(docs, tokens, heads, head_dim)
