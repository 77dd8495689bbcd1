"""Every score against the NumPy oracle, and what must change or stay when a parameter does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.compression_cases import KINDS, Case, make_case
from tests.reference import scores as oracle
from zipage_jax.compression import flatten_layers, score_entries
from zipage_jax.scoring import (
    PRESETS,
    Attention,
    Blend,
    GlobalScore,
    KeepFirst,
    KeepRecent,
    MaxNorm,
    Pool,
    Redundancy,
    ScoringPolicy,
    ValueGuard,
    resolve_policy,
)

EVICTING = sorted(set(PRESETS) - {"full"})


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Each example has a shape of its own, so compiling is most of a test's time."""


@functools.cache
def program(policies: tuple[ScoringPolicy, ...]):
    """Scores of all policies, compiled once a shape; they share one context, so each kernel runs once."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(cache, batch):
        context, _ = flatten_layers(cache, batch, jnp.int32(0), cache.num_layers, GlobalScore())
        return [score_entries(context, policy, cache.num_layers) for policy in policies]

    return run


def scores_of(case: Case, *policies: ScoringPolicy) -> list:
    """[policy][layer][row] (scores, history or None) in NumPy, cut to the entries that exist."""
    num_rows = case.batch.page_ids.shape[0]
    return [
        [
            [
                tuple(None if x is None else x[layer * num_rows + r, :, : row.entries] for x in scored)
                for r, row in enumerate(rows)
            ]
            for layer, rows in enumerate(case.rows)
        ]
        for scored in jax.device_get(program(policies)(case.cache, case.batch))
    ]


def assert_close(found: np.ndarray, expected: np.ndarray, scale: float = 1.0) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5 * scale, atol=1e-6 * scale)


def logit_scale(row: oracle.Row) -> float:
    found = oracle.logits(row)
    return max(1.0, float(np.abs(found[np.isfinite(found)]).max()))


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "pages": st.lists(st.integers(2, 4), min_size=1, max_size=3).map(tuple),
        "page_size": st.sampled_from([16, 32, 64]),
        "window": st.sampled_from([1, 8, 16]),
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 3, 8]),
        "head_dim": st.sampled_from([16, 64, 128]),
        "kind": st.sampled_from(KINDS),
        "padding_rows": st.integers(0, 1),
        "padding_pages": st.integers(0, 2),
        "permutation": st.integers(0, 9),
    }
)


@settings(max_examples=8)
@given(shapes)
@example({"seed": 1, "pages": (2,), "page_size": 256, "window": 16, "group": 4, "head_dim": 64, "kind": "duplicate"})
def test_every_preset_matches_the_oracle(shape):
    case = make_case(budget_pages=1, compressed=(True, False), **shape)
    rows = [row for rows in case.rows for row in rows]
    assume(not any(oracle.is_ambiguous(row) for row in rows))
    for name, found in zip(EVICTING, scores_of(case, *(PRESETS[n] for n in EVICTING)), strict=True):
        for layer, layer_rows in enumerate(case.rows):
            for r, row in enumerate(layer_rows):
                scores, history = oracle.PRESETS[name](row)
                assert_close(found[layer][r][0], scores, logit_scale(row))
                assert (found[layer][r][1] is None) == (history is None)
                if history is not None:
                    assert_close(found[layer][r][1], history, logit_scale(row))


@settings(max_examples=4)
@given(shapes, st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_options_match_the_oracle(shape, share):
    case = make_case(budget_pages=1, compressed=(True, False), **shape)
    assume(
        not any(oracle.is_ambiguous(row, threshold) for rows in case.rows for row in rows for threshold in (0.5, 0.9))
    )
    policies = {
        "paper": Blend(Attention(), Redundancy("lightning", 0.7, threshold=0.9), 0.3, form="paper"),
        "always": Pool(Attention("max"), kernel=3, when="always"),
        "never": Pool(Attention(), when="none"),
        "sum": GlobalScore(Attention(), decay=0.5, combine="sum"),
        "outer norm": MaxNorm(GlobalScore(Attention(), decay=0.9)),
        "guard": ValueGuard(Attention(), share=share),
    }
    expected = {
        "paper": lambda row: oracle.attention(row) - 0.3 * oracle.redundancy(row, "lightning", 0.7, 0.9),
        "always": lambda row: oracle.max_pool(oracle.attention(row, "max"), 3),
        "never": oracle.attention,
        "sum": lambda row: oracle.global_score(row, oracle.attention(row), 0.5, "sum"),
        "outer norm": lambda row: oracle.max_norm(oracle.global_score(row, oracle.attention(row), 0.9)),
        "guard": lambda row: oracle.guard(row, oracle.attention(row), share),
    }
    for name, found in zip(policies, scores_of(case, *policies.values()), strict=True):
        for layer, rows in enumerate(case.rows):
            for r, row in enumerate(rows):
                assert_close(found[layer][r][0], expected[name](row), logit_scale(row))


def test_the_tolerance_tells_scores_apart():
    """A wrong oracle fails: shuffled, zero, the other reduction, the other order of max and softmax."""
    case = make_case(0)
    row = case.rows[0][0]
    (found,) = scores_of(case, Attention())
    right = found[0][0][0]
    for wrong in (
        np.zeros_like(right),
        oracle.attention(row)[:, ::-1],
        oracle.attention(row, "max"),
        oracle.attention_of_max_logits(row),
    ):
        with pytest.raises(AssertionError):
            assert_close(right, wrong)


def test_lightning_is_flash_on_one_page():
    case = make_case(3, pages=(1,), budget_pages=1, compressed=(False,), padding_pages=0, padding_rows=0)
    lightning, flash = scores_of(case, Redundancy("lightning"), Redundancy("flash"))
    np.testing.assert_allclose(lightning[0][0][0], flash[0][0][0], rtol=1e-6)


def test_redundancy_sums_to_one():
    (found,) = scores_of(make_case(4), Redundancy())
    for rows in found:
        for scores, _ in rows:
            np.testing.assert_allclose(scores.sum(axis=-1), 1.0, rtol=1e-5)


def same(case: Case, a: ScoringPolicy, b: ScoringPolicy) -> bool:
    left, right = scores_of(case, a, b)
    pairs = [(x, y) for p, q in zip(left, right, strict=True) for (x, _), (y, _) in zip(p, q, strict=True)]
    return all((x == y).all() for x, y in pairs)


def test_weights_at_their_ends():
    case = make_case(5)
    assert same(case, Blend(Attention(), Redundancy(), weight=1.0), Attention())
    assert same(case, Blend(Attention(), Redundancy(), weight=0.0, form="paper"), Attention())
    assert same(case, GlobalScore(Attention(), decay=0.0), Attention())
    assert same(case, GlobalScore(Attention(), decay=0.0, combine="sum"), Attention())
    assert not same(case, GlobalScore(Attention(), decay=1.0), Attention())
    assert same(case, Pool(Attention(), kernel=1, when="always"), Attention())


def test_pooling_first_pools_only_requests_without_history():
    case = make_case(6, pages=(3, 3), compressed=(False, True))
    first, always, never = scores_of(case, *(Pool(Attention(), when=when) for when in ("first", "always", "none")))
    np.testing.assert_array_equal(first[0][0][0], always[0][0][0])
    np.testing.assert_array_equal(first[0][1][0], never[0][1][0])
    assert not np.array_equal(first[0][0][0], never[0][0][0])


def test_random_differs_by_seed_layer_and_head():
    (found,) = scores_of(make_case(8, pages=(3, 3)), PRESETS["random"])
    streams = [found[layer][r][0][head] for layer in range(2) for r in range(2) for head in range(2)]
    assert len({stream.tobytes() for stream in streams}) == len(streams)
    assert abs(np.mean(streams) - 0.5) < 0.05
    assert min(map(np.min, streams)) >= 0.0 and max(map(np.max, streams)) < 1.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Blend(weight=1.5), ("weight=1.5", "[0.0, 1.0]", "λ")),
        (lambda: Blend(weight=-0.1, form="paper"), ("weight=-0.1", "λ")),
        (lambda: Blend(form="sum"), ("form='sum'", "convex", "paper")),
        (lambda: Redundancy(temperature=0.0), ("temperature=0.0", "τ")),
        (lambda: Redundancy(temperature=float("nan")), ("temperature=nan",)),
        (lambda: Redundancy("fast"), ("mode='fast'", "lightning", "flash")),
        (lambda: Redundancy(threshold=1.5), ("threshold=1.5", "cosine")),
        (lambda: GlobalScore(decay=1.1), ("decay=1.1", "α")),
        (lambda: GlobalScore(combine="mean"), ("combine='mean'", "sum")),
        (lambda: Pool(kernel=4), ("kernel=4", "odd")),
        (lambda: Pool(when="last"), ("when='last'", "first")),
        (lambda: Attention(reduce="sum"), ("reduce='sum'", "mean")),
        (lambda: ValueGuard(share=5), ("share=5", "[0.0, 1.0]")),
        (lambda: KeepRecent(share=-1.0), ("share=-1.0",)),
        (lambda: KeepFirst(num=-1), ("num=-1",)),
        (lambda: resolve_policy("zipag"), ("zipag", *PRESETS)),
        (lambda: resolve_policy("ada-kv"), ("ada-kv", "head", "free no page")),
        (lambda: resolve_policy("pyramid-kv"), ("pyramid-kv", "layer", "free no page")),
    ],
)
def test_bad_parameters_name_value_limit_and_fix(build, words):
    with pytest.raises(ValueError) as error:
        build()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_policy_without_scores_cannot_be_built():
    @dataclasses.dataclass(frozen=True)
    class Forgot(ScoringPolicy):
        pass

    with pytest.raises(TypeError, match=r"Forgot.*score"):
        Forgot()


def test_policies_are_values():
    for name, policy in PRESETS.items():
        assert resolve_policy(name) is policy and resolve_policy(policy) is policy
        assert policy == dataclasses.replace(policy) and hash(policy) == hash(dataclasses.replace(policy))
    assert len(set(PRESETS.values())) == len(PRESETS)
    assert {n for n, p in PRESETS.items() if p.keeps_history} == {"zipage", "zipage-flash", "g-kv", "h2o"}
    assert {n for n, p in PRESETS.items() if p.reads_entries} == {"r-kv", "key-diff"}
    assert ValueGuard(PRESETS["zipage"]).keeps_history and ValueGuard(PRESETS["zipage"]).reads_entries


@dataclasses.dataclass(frozen=True)
class Undeclared(ScoringPolicy):
    def score(self, context):
        return context.keys


def test_reading_entries_must_be_declared():
    with pytest.raises(ValueError, match="needs"):
        scores_of(make_case(9), Undeclared())
