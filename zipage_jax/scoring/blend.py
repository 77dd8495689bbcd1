"""Combining scores."""

from dataclasses import dataclass, field

import jax.numpy as jnp

from zipage_jax.scoring.attention import Attention
from zipage_jax.scoring.context import ScoreContext
from zipage_jax.scoring.policy import Scored, ScoringPolicy, check_choice, check_range
from zipage_jax.scoring.redundancy import Redundancy


@dataclass(frozen=True)
class Blend(ScoringPolicy):
    """λ·A − (1 − λ)·R, or with `form="paper"` A − λ·R. `weight` is λ; A is the importance, R the redundancy.

    The history is the importance's. Where λ leaves nothing of R, R is not computed.
    Source: arXiv 2603.08743, eq. (4) prints the paper form; its search over λ (fig. 17) and R-KV use the convex one.
    """

    importance: ScoringPolicy = field(default_factory=Attention)
    redundancy: ScoringPolicy = field(default_factory=Redundancy)
    weight: float = 0.2
    form: str = "convex"

    def __post_init__(self):
        check_choice(self, "form", ("convex", "paper"))
        if self.form == "convex":
            check_range(self, "weight", 0.0, 1.0, "λ = 0.2 is the published weight, 1 ignores redundancy")
        else:
            check_range(self, "weight", 0.0, 1e3, "λ = 0 ignores redundancy")

    def score(self, context: ScoreContext) -> Scored:
        scored = self.importance.score(context)
        keep, drop = (self.weight, 1.0 - self.weight) if self.form == "convex" else (1.0, self.weight)
        scores = keep * scored.scores
        if drop > 0.0:
            scores = scores - drop * self.redundancy.score(context).scores
        return scored._replace(scores=scores)


@dataclass(frozen=True)
class MaxNorm(ScoringPolicy):
    """The source divided by its maximum over the row's entries (unchanged where that is not positive).

    Inside a `GlobalScore` it normalises what is remembered, around one only what is compared.
    Source: G-KV (arXiv 2512.00504), which normalises attention and redundancy before it combines them.
    """

    source: ScoringPolicy = field(default_factory=Attention)

    def score(self, context: ScoreContext) -> Scored:
        scored = self.source.score(context)
        peak = jnp.max(jnp.where(context.valid, scored.scores, -jnp.inf), axis=-1, keepdims=True)
        return scored._replace(scores=scored.scores / jnp.where(peak > 0.0, peak, 1.0))
