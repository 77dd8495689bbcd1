"""Scores that remember: the global score."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax.numpy as jnp

from zipage_jax.scoring.attention import Attention
from zipage_jax.scoring.context import ScoreContext
from zipage_jax.scoring.policy import Scored, ScoringPolicy, check_choice, check_range


@dataclass(frozen=True)
class GlobalScore(ScoringPolicy):
    """F := max(A, α·F) for entries that survived the compression before, F := A for the others; returns and stores F.

    `combine="sum"` accumulates instead: F := A + α·F. `decay` is α; 0 forgets.
    Source: arXiv 2603.08743, app. C.3, algorithm 2 (after G-KV, arXiv 2512.00504).
    """

    source: ScoringPolicy = field(default_factory=Attention)
    decay: float = 0.8
    combine: str = "max"
    needs: ClassVar = frozenset({"history"})

    def __post_init__(self):
        check_range(self, "decay", 0.0, 1.0, "α = 0.8 is the published decay, 0 keeps no history")
        check_choice(self, "combine", ("max", "sum"))

    def score(self, context: ScoreContext) -> Scored:
        fresh = self.source.score(context).scores
        past = self.decay * context.history
        merged = jnp.maximum(fresh, past) if self.combine == "max" else fresh + past
        merged = jnp.where(context.has_history, merged, fresh)
        return Scored(merged, history=merged)
