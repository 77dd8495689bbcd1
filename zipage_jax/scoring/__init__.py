"""Scoring policies: which entries a compression keeps. To add one, see docs/scoring-policies.md."""

from zipage_jax.scoring.attention import Attention, AttentionOfMaxLogits
from zipage_jax.scoring.blend import Blend, MaxNorm
from zipage_jax.scoring.context import ScoreContext, masked_softmax
from zipage_jax.scoring.history import GlobalScore
from zipage_jax.scoring.policy import Scored, ScoringPolicy
from zipage_jax.scoring.pooling import Pool
from zipage_jax.scoring.presets import PRESETS, resolve_policy
from zipage_jax.scoring.protect import KeepFirst, KeepRecent, ValueGuard
from zipage_jax.scoring.redundancy import Redundancy
from zipage_jax.scoring.simple import Full, KeyDiff, Random, Recency

__all__ = [
    "PRESETS",
    "Attention",
    "AttentionOfMaxLogits",
    "Blend",
    "Full",
    "GlobalScore",
    "KeepFirst",
    "KeepRecent",
    "KeyDiff",
    "MaxNorm",
    "Pool",
    "Random",
    "Recency",
    "Redundancy",
    "ScoreContext",
    "Scored",
    "ScoringPolicy",
    "ValueGuard",
    "masked_softmax",
    "resolve_policy",
]
