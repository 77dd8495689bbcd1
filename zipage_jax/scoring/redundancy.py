"""Redundancy of keys: entries that say what newer entries say again."""

from dataclasses import dataclass

import jax.numpy as jnp

from zipage_jax.scoring.context import ScoreContext, masked_softmax
from zipage_jax.scoring.policy import Scored, ScoringPolicy, check_choice, check_range


@dataclass(frozen=True)
class Redundancy(ScoringPolicy):
    """R: softmax over the row's entries of r / (τ·n), r the summed cosine similarities of a key to the others.

    `mode="lightning"` compares keys within a page (n = page_size), "flash" within the row (n = its entries). In each column
    the last similarity above `threshold` counts as 0: the newest of a group of near-duplicates is not held against the
    older ones' account. `temperature` is τ. R is high for entries to *drop*: use it as the redundancy of a `Blend`.
    Source: arXiv 2603.08743, app. C.5 and C.7 (after R-KV, arXiv 2505.24133).
    """

    mode: str = "lightning"
    temperature: float = 0.4
    threshold: float = 0.5

    def __post_init__(self):
        check_choice(self, "mode", ("lightning", "flash"))
        check_range(self, "temperature", 0.0, 1e3, "τ = 0.4 is the published temperature", open_least=True)
        check_range(self, "threshold", -1.0, 1.0, "it bounds a cosine; 0.5 is the published one")

    def score(self, context: ScoreContext) -> Scored:
        sums = context.redundancy(self.mode, self.threshold)
        if self.mode == "lightning":
            logits = sums / (self.temperature * context.page_size)
        else:
            count = jnp.maximum(context.num_entries, 1).astype(jnp.float32)
            logits = sums / (self.temperature * count)[:, None, None]
        return Scored(masked_softmax(logits, jnp.broadcast_to(context.valid, logits.shape)))
