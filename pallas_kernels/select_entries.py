"""Which entries a compression keeps: the best of each (row, kv head), in time order.

An entry is kept iff fewer than budget entries are better; of two with equal scores the later one is better, so the choice depends
on nothing but the scores. Source: arXiv 2603.08743, sec. 4.2; the tie rule is ours, because a score tied at the cut must not depend
on the batch.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve


def select_entries(
    scores: Float[Array, "rows kv_heads entries"],
    budget: Int[Array, " rows"],
    *,
    max_budget: int,
    implementation: str | None = None,
) -> Int[Array, "rows kv_heads max_budget"]:
    """Ascending entry indices of the budget[r] highest scores; positions past budget[r] hold `entries`, one past the end.

    budget[r] ≤ min(max_budget, entries). −0 ties with +0, −inf comes last of all; there must be no NaN.

    Raises:
        ValueError: scores that are not float32.
    """
    if scores.dtype != jnp.float32:
        raise ValueError(f"scores must be float32, not {scores.dtype}: in fewer bits many entries tie at the cut")
    resolve("select_entries", implementation, ("xla",))
    return _reference(scores, budget, max_budget)


def _reference(scores, budget, max_budget):
    entries = scores.shape[-1]
    # top_k gives ties to the first entry it sees and tells −0 from +0.
    backwards = jnp.flip(jnp.where(scores == 0, 0.0, scores), axis=-1)
    _, order = lax.top_k(backwards, min(max_budget, entries))
    kept = entries - 1 - order
    kept = jnp.pad(kept, ((0, 0), (0, 0), (0, max_budget - kept.shape[-1])), constant_values=entries)
    within = jnp.arange(max_budget, dtype=jnp.int32)[None, None, :] < budget[:, None, None]
    return jnp.sort(jnp.where(within, kept, entries), axis=-1)
