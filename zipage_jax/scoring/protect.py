"""Policies that put some entries above all others of another policy."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from zipage_jax.scoring.attention import Attention
from zipage_jax.scoring.context import ScoreContext
from zipage_jax.scoring.policy import Scored, ScoringPolicy, check_range

PROTECTED = float(np.finfo(np.float32).max)
"""Score of a protected entry: above every ordinary score, below the window's and the sinks' +inf."""


@dataclass(frozen=True)
class KeepFirst(ScoringPolicy):
    """The first `num` entries of the sequence (attention sinks), then what `source` says.

    Source: StreamingLLM (arXiv 2309.17453).
    """

    source: ScoringPolicy = field(default_factory=Attention)
    num: int = 4

    def __post_init__(self):
        if not isinstance(self.num, int) or isinstance(self.num, bool) or self.num < 0:
            raise ValueError(f"KeepFirst: num={self.num!r} must be an integer of at least 0")

    def score(self, context: ScoreContext) -> Scored:
        return _raise(self.source.score(context), context.entry[None] < self.num)


@dataclass(frozen=True)
class KeepRecent(ScoringPolicy):
    """The newest share·budget entries, then what `source` says. Source: H2O (arXiv 2306.14048)."""

    source: ScoringPolicy = field(default_factory=Attention)
    share: float = 0.5

    def __post_init__(self):
        check_range(self, "share", 0.0, 1.0, "it is a share of the budget")

    def score(self, context: ScoreContext) -> Scored:
        recent = jnp.floor(self.share * context.budget.astype(jnp.float32)).astype(jnp.int32)
        start = (context.num_entries - recent)[:, None, None]
        return _raise(self.source.score(context), context.entry[None] >= start)


@dataclass(frozen=True)
class ValueGuard(ScoringPolicy):
    """The ⌊share·entries⌋ entries of largest ‖v‖₂ per head (ties: the later), then what `source` says.

    Source: VaSE (arXiv 2606.03928): evicting values of unusually large magnitude sends reasoning models into loops.
    """

    source: ScoringPolicy = field(default_factory=Attention)
    share: float = 0.05
    needs: ClassVar = frozenset({"entries"})

    def __post_init__(self):
        check_range(self, "share", 0.0, 1.0, "it is a share of the entries; 0.05 protects one in twenty")

    def score(self, context: ScoreContext) -> Scored:
        norms = jnp.sqrt(jnp.sum(jnp.square(context.values), axis=-1))
        norms = jnp.where(context.valid, norms, -1.0)
        # Ascending and stable: the last of equal norms is the later entry, which therefore ranks higher.
        rank = jnp.argsort(jnp.argsort(norms, axis=-1, stable=True), axis=-1, stable=True)
        guarded = jnp.floor(self.share * context.num_entries.astype(jnp.float32)).astype(jnp.int32)
        return _raise(self.source.score(context), rank >= context.max_entries - guarded[:, None, None])


def _raise(scored: Scored, protected) -> Scored:
    return scored._replace(scores=jnp.where(protected, PROTECTED, scored.scores))
