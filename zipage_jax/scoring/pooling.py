"""Pooling over the sequence: entries next to an important one count as important."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from zipage_jax.scoring.attention import Attention
from zipage_jax.scoring.context import ScoreContext
from zipage_jax.scoring.policy import Scored, ScoringPolicy, check_choice


@dataclass(frozen=True)
class Pool(ScoringPolicy):
    """Maximum of the source's scores over `kernel` neighbouring entries, across page borders. The history stays un-pooled.

    `when`: "first" pools only at a request's first compression, "always" at each, "none" never. `over_window=False` leaves
    the window's own scores out, so that they do not spill to the entries before it.
    Source: arXiv 2603.08743, app. C.4 and table 5 (after SnapKV).
    """

    source: ScoringPolicy = field(default_factory=Attention)
    kernel: int = 5
    when: str = "first"
    over_window: bool = True

    def __post_init__(self):
        check_choice(self, "when", ("none", "first", "always"))
        if not isinstance(self.kernel, int) or isinstance(self.kernel, bool) or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"Pool: kernel={self.kernel!r} must be an odd integer of at least 1, so that it has a middle"
            )

    def score(self, context: ScoreContext) -> Scored:
        scored = self.source.score(context)
        if self.when == "none" or self.kernel == 1:
            return scored
        counted = context.valid if self.over_window else context.valid & ~context.in_window
        pooled = max_pool(jnp.where(counted, scored.scores, -jnp.inf), self.kernel)
        pooled = jnp.where(jnp.isneginf(pooled), scored.scores, pooled)
        if self.when == "first":
            pooled = jnp.where(context.is_first, pooled, scored.scores)
        return scored._replace(scores=pooled)


def max_pool(scores, kernel: int):
    """Maximum over `kernel` entries around each one, stride 1, -inf beyond the edges."""
    width = (1,) * (scores.ndim - 1) + (kernel,)
    return jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, width, (1,) * scores.ndim, "SAME")
