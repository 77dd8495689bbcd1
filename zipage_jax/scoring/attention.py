"""Scores from the attention that the window's queries pay."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from zipage_jax.scoring.context import ScoreContext, masked_softmax
from zipage_jax.scoring.policy import Scored, ScoringPolicy, check_choice


@dataclass(frozen=True)
class Attention(ScoringPolicy):
    """A: mean (or max) over the window of the group maximum of softmax(q kᵀ/√d) over all entries, the window included.

    Source: arXiv 2603.08743, app. C.2.
    """

    reduce: str = "mean"

    def __post_init__(self):
        check_choice(self, "reduce", ("mean", "max"))

    def score(self, context: ScoreContext) -> Scored:
        return Scored(context.attention(self.reduce))


@dataclass(frozen=True)
class AttentionOfMaxLogits(ScoringPolicy):
    """R-KV's order: maximum of the logits over the group first, then softmax over the entries *before* the window, then the
    mean over the window rows. The window's own entries score 0.

    Source: arXiv 2505.24133 (R-KV), sec. 3, and its published code.
    """

    needs: ClassVar = frozenset({"entries"})

    def score(self, context: ScoreContext) -> Scored:
        before = context.valid & ~context.in_window
        attention = masked_softmax(
            context.group_logits, jnp.broadcast_to(before[:, :, None], context.group_logits.shape)
        )
        return Scored(attention.mean(axis=2))
