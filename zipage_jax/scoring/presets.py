"""Policies by name, each with its method's published defaults.

What our setting changes for all of them: a request is compressed once a page (not once a token or once a prompt), all layers
and heads keep the same number of entries, `window` and `sink_len` come from `CompressionConfig`, the window is always kept,
and query heads that share a kv head are merged by their maximum.
"""

from zipage_jax.scoring.attention import Attention, AttentionOfMaxLogits
from zipage_jax.scoring.blend import Blend, MaxNorm
from zipage_jax.scoring.history import GlobalScore
from zipage_jax.scoring.policy import ScoringPolicy
from zipage_jax.scoring.pooling import Pool
from zipage_jax.scoring.protect import KeepFirst, KeepRecent
from zipage_jax.scoring.redundancy import Redundancy
from zipage_jax.scoring.simple import Full, KeyDiff, Random, Recency

PRESETS: dict[str, ScoringPolicy] = {
    # λ 0.2, τ 0.4, α 0.8, pooling at the first compression only. arXiv 2603.08743, app. C.
    "zipage": Blend(
        Pool(GlobalScore(Attention(), decay=0.8), kernel=5, when="first"), Redundancy("lightning", 0.4), 0.2
    ),
    # The same with the redundancy of all pairs of keys.
    "zipage-flash": Blend(
        Pool(GlobalScore(Attention(), decay=0.8), kernel=5, when="first"), Redundancy("flash", 0.4), 0.2
    ),
    # The window's attention and nothing else: SnapKV's score at decode time, un-pooled.
    "attention": Attention(),
    # arXiv 2404.14469: max-pooled, kernel 7. Difference: applied at every compression, not to the prompt alone.
    "snapkv": Pool(Attention(), kernel=7, when="always", over_window=False),
    # arXiv 2503.00979, max fusion (its long-generation setting). Difference: evicts a page at a time, not a token.
    "morphkv": Attention(reduce="max"),
    # arXiv 2505.24133: λ 0.1, kernel 7, softmax of the group's maximal logit. Its τ is 1. Difference: of a group of
    # near-duplicates the last one is spared per column (SPEC of arXiv 2603.08743), where its code spares per row.
    "r-kv": Blend(
        Pool(AttentionOfMaxLogits(), kernel=7, when="always", over_window=False), Redundancy("flash", 1.0), weight=0.1
    ),
    # arXiv 2512.00504: α 0.8, attention and redundancy divided by their maxima, λ 0.1, no pooling. Difference: the maxima
    # are taken over all entries, the window's included.
    "g-kv": Blend(GlobalScore(MaxNorm(Attention()), decay=0.8), MaxNorm(Redundancy("flash", 1.0)), weight=0.1),
    # arXiv 2306.14048: half of the budget recent, half heavy hitters by accumulated attention. Difference: only the queries
    # of the windows are accumulated, since no others are stored.
    "h2o": KeepRecent(GlobalScore(Attention(), decay=1.0, combine="sum"), share=0.5),
    # arXiv 2309.17453: 4 sinks and the newest. Difference: positions are kept, not renumbered inside the cache.
    "streaming-llm": KeepFirst(Recency(), num=4),
    # arXiv 2504.15364.
    "key-diff": KeyDiff(),
    # Seeded uniform scores: the floor.
    "random": Random(),
    # No compression: the baseline.
    "full": Full(),
}

REFUSED = {
    "pyramid-kv": "by layer",
    "ada-kv": "by head within a layer",
}
"""Methods that are known but not offered -> how they spread the budget."""


def resolve_policy(policy: str | ScoringPolicy) -> ScoringPolicy:
    """The preset of that name, or `policy` itself if it is one. ValueError lists the known names."""
    if isinstance(policy, ScoringPolicy):
        return policy
    if not isinstance(policy, str):
        raise ValueError(f"policy={policy!r} must be a preset's name, one of {sorted(PRESETS)}, or a ScoringPolicy")
    if policy in PRESETS:
        return PRESETS[policy]
    if policy in REFUSED:
        raise ValueError(
            f"policy={policy!r} spreads the budget {REFUSED[policy]}. A page is shared by all layers and heads of its "
            "request, so a smaller budget in some of them would mask entries but free no page. Budgets may differ by "
            "request (SamplingParams); for equal budgets use one of " + str(sorted(PRESETS))
        )
    raise ValueError(f"unknown policy {policy!r}; known: {sorted(PRESETS)}, or a ScoringPolicy")
