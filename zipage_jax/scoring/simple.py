"""Policies that look at no query: age, key geometry, chance, and none at all."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from zipage_jax.scoring.context import ScoreContext
from zipage_jax.scoring.policy import Scored, ScoringPolicy


@dataclass(frozen=True)
class Recency(ScoringPolicy):
    """Newer entries first."""

    def score(self, context: ScoreContext) -> Scored:
        return Scored(_over_heads(context.entry[None].astype(jnp.float32), context))


@dataclass(frozen=True)
class KeyDiff(ScoringPolicy):
    """−cos(k, a), a the mean of the normalised keys of the head: keys unlike the average are kept.

    Difference: keys are compared as cached, i.e. after the rotation. Source: KeyDiff (arXiv 2504.15364).
    """

    needs: ClassVar = frozenset({"entries"})

    def score(self, context: ScoreContext) -> Scored:
        directions = normalised(context.keys)
        anchor = directions.sum(axis=2, keepdims=True)  # of the mean's direction; entries past the end are 0
        return Scored(-jnp.sum(directions * normalised(anchor), axis=-1))


@dataclass(frozen=True)
class Random(ScoringPolicy):
    """A uniform number per (seed, layer, head, entry): the floor that every method must beat.

    Independent of neighbours, rows and buckets. Source: ours.
    """

    def score(self, context: ScoreContext) -> Scored:
        shape = (context.page_ids.shape[0], context.k_pages.shape[1], context.max_entries)
        bits = _mix(context.seed.astype(jnp.uint32))
        bits = _mix(bits ^ context.layer.astype(jnp.uint32))[:, None]
        bits = _mix(bits ^ jnp.arange(shape[1], dtype=jnp.uint32)[None, :])[:, :, None]
        bits = _mix(bits ^ jnp.arange(shape[2], dtype=jnp.uint32)[None, None, :])
        return Scored((bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24))


@dataclass(frozen=True)
class Full(ScoringPolicy):
    """Full KV: nothing is ever evicted. An engine with this policy runs without compression; as a part, all scores are equal."""

    evicts: ClassVar = False

    def score(self, context: ScoreContext) -> Scored:
        return Scored(_over_heads(jnp.zeros((1, 1, 1), jnp.float32), context))


def normalised(vectors):
    """vectors / max(‖vectors‖₂, 1e-6)."""
    norms = jnp.sqrt(jnp.sum(jnp.square(vectors), axis=-1, keepdims=True))
    return vectors / jnp.maximum(norms, 1e-6)


def _over_heads(scores, context: ScoreContext):
    rows, kv_heads = context.page_ids.shape[0], context.k_pages.shape[1]
    return jnp.broadcast_to(scores, (rows, kv_heads, context.max_entries))


def _mix(bits):
    """MurmurHash3's 32-bit finaliser on bits + the golden ratio: every input bit flips every output bit half of the time."""
    bits = bits + jnp.uint32(0x9E3779B9)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
