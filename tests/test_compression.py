"""The compression pipeline: the contract that every policy keeps, selection and compaction against the oracle, memory."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compression_cases import Case, make_case, read_entries
from tests.reference import scores as oracle
from zipage_jax.compression import compress_layers, workspace_bytes
from zipage_jax.config import CompressionConfig
from zipage_jax.scoring import PRESETS, Attention, Scored, ScoringPolicy, ValueGuard
from zipage_jax.state import CacheState, CompressBatch

EVICTING = sorted(set(PRESETS) - {"full"})
POLICIES = {**{name: PRESETS[name] for name in EVICTING}, "zipage + value guard": ValueGuard(PRESETS["zipage"], 0.1)}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Constant(ScoringPolicy):
    """The same score for all: ties everywhere."""

    value: float = 0.0

    def score(self, context):
        return Scored(jnp.full_like(context.attention(), self.value))


@dataclasses.dataclass(frozen=True)
class Broken(ScoringPolicy):
    """NaN for old entries and -inf for the others: what a faulty policy returns."""

    needs: ClassVar = frozenset({"history"})

    def score(self, context):
        scores = jnp.where(context.entry[None] < 20, jnp.nan, -jnp.inf) + jnp.zeros_like(context.attention())
        return Scored(scores, history=jnp.zeros_like(scores))


@functools.cache
def program(policy: ScoringPolicy, window: int = 8, sink_len: int = 2, num_layers: int = 2):
    config = CompressionConfig(budget_pages=2, window=window, policy=policy, sink_len=sink_len)
    run = functools.partial(compress_layers, config=config, num_layers=num_layers)
    return jax.jit(run, compiler_options=QUICK)


def compress(case: Case, policy: ScoringPolicy, layer_start: int = 0, **options):
    return program(policy, **options)(case.cache, case.batch, layer_start=np.int32(layer_start))


def kept_entries(case: Case, after, layer: int, r: int) -> np.ndarray:
    """kv_heads budget: which of the request's entries its targets hold, told by their values; checks that K agrees."""
    row, at = case.rows[layer][r], case.targets(r, layer)
    values, keys = read_entries(after.v_pages, at), read_entries(after.k_pages, at)
    kept = np.empty(values.shape[:2], np.int64)
    for head in range(values.shape[0]):
        same = (values[head, :, None] == row.values[head][None]).all(axis=-1)
        assert (same.sum(axis=1) == 1).all(), "a target holds something else than one of the request's entries"
        kept[head] = same.argmax(axis=1)
        np.testing.assert_array_equal(keys[head], row.keys[head][kept[head]])
    return kept


def all_kept(case: Case, after) -> list[np.ndarray]:
    return [kept_entries(case, after, layer, r) for layer, rows in enumerate(case.rows) for r in range(len(rows))]


@pytest.mark.parametrize("name", POLICIES)
def test_contract(name):
    """What every policy must keep to: run on each preset, and on any that joins them."""
    policy = POLICIES[name]
    case = make_case(1, positions=True, layers=3)
    after = compress(case, policy, layer_start=1)
    touched = set()
    for layer, r in [(layer, r) for layer in (1, 2) for r in range(2)]:
        row, kept = case.rows[layer][r], kept_entries(case, after, layer, r)
        # Exactly the budget, in time order, the window and the sinks among them, nothing from padding.
        assert kept.shape[1] == row.budget and (np.diff(kept, axis=1) > 0).all()
        assert (kept[:, -row.window :] == np.arange(row.entries - row.window, row.entries)).all()
        assert (kept[:, :2] == [0, 1]).all()
        at = case.targets(r, layer)
        touched |= set(at)
        # Nothing that was dropped is better than what was kept.
        scores, history = oracle.PRESETS.get(name, oracle.PRESETS["zipage"])(row)
        if name.endswith("value guard"):
            scores = oracle.guard(row, scores, 0.1)
        scores = oracle.protect(row, scores, sink_len=2)
        best = oracle.select(scores, row.budget)
        for head in range(scores.shape[0]):
            worst = np.take(scores[head], best[head]).min()
            assert np.take(scores[head], kept[head]).min() >= worst - 1e-6 - 1e-5 * abs(worst)
        # History and positions move with their entries.
        np.testing.assert_array_equal(read_entries(after.positions, at), kept * 3 + layer)
        if history is not None:
            expected = np.take_along_axis(history, kept, axis=1)
            np.testing.assert_allclose(read_entries(after.scores, at), expected, rtol=1e-5, atol=1e-6)
    # Everything else is as it was, the layers outside the slice included; null pages may take padding.
    null = [layer * case.cache.num_pages for layer in range(3)]
    untouched = sorted(set(range(case.cache.k_pages.shape[0])) - touched - set(null))
    for pool in ("k_pages", "v_pages", "scores", "positions"):
        before, now = np.asarray(getattr(case.cache, pool)), np.asarray(getattr(after, pool))
        np.testing.assert_array_equal(now[untouched], before[untouched])
        if now.dtype != np.int32:
            assert np.isfinite(now[null]).all()


@pytest.mark.parametrize("name", POLICIES)
def test_neighbours_names_and_buckets_change_nothing(name):
    """Page ids renamed, own or fresh targets, more padding, another layer start: the same entries, and one trace a bucket."""
    policy = POLICIES[name]
    base = make_case(1)
    reference = all_kept(base, compress(base, policy))
    traces = program(policy)._cache_size()
    for change in ({"permutation": 3}, {"fresh_targets": True}):
        case = make_case(1, **change)
        for a, b in zip(reference, all_kept(case, compress(case, policy)), strict=True):
            np.testing.assert_array_equal(a, b)
    compress(make_case(2), policy, layer_start=0)
    assert program(policy)._cache_size() == traces
    wide = make_case(1, padding_rows=2, padding_pages=3)
    for a, b in zip(reference, all_kept(wide, compress(wide, policy)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_slice_is_a_part_of_the_whole():
    """Layer by layer, two at once, or all: the same cache."""
    case = make_case(3, layers=4)
    whole = compress(case, PRESETS["zipage"], num_layers=4)
    sliced = dataclasses.replace(case)
    for start in range(0, 4, 2):
        sliced = dataclasses.replace(sliced, cache=compress(sliced, PRESETS["zipage"], layer_start=start, num_layers=2))
    own = np.arange(case.cache.k_pages.shape[0]) % case.cache.num_pages > 0  # padding writes to the null pages
    for pool in ("k_pages", "v_pages", "scores"):
        np.testing.assert_array_equal(
            np.asarray(getattr(whole, pool))[own], np.asarray(getattr(sliced.cache, pool))[own]
        )


def test_shared_source_pages_stay_as_they_are():
    """Two requests with the same first pages, compressed into fresh ones: both as if alone, the shared pages untouched."""
    alone = make_case(4, pages=(3, 4), compressed=(False, False), fresh_targets=True)
    shared = make_case(4, pages=(3, 4), compressed=(False, False), fresh_targets=True)
    ids = np.array(shared.batch.page_ids)
    ids[1, :2] = ids[0, :2]
    shared.batch = dataclasses.replace(shared.batch, page_ids=ids)
    n = 2 * shared.page_size
    for rows in shared.rows:
        rows[1].keys = np.concatenate([rows[0].keys[:, :n], rows[1].keys[:, n:]], axis=1)
        rows[1].values = np.concatenate([rows[0].values[:, :n], rows[1].values[:, n:]], axis=1)
    before = np.asarray(shared.cache.scores)
    after = compress(shared, PRESETS["zipage"])
    np.testing.assert_array_equal(np.asarray(after.scores)[ids[0, :2]], before[ids[0, :2]])
    for layer in range(2):
        np.testing.assert_array_equal(
            kept_entries(shared, after, layer, 0),
            kept_entries(alone, compress(alone, PRESETS["zipage"]), layer, 0),
        )
        row = shared.rows[layer][1]
        expected = oracle.select(oracle.protect(row, oracle.PRESETS["zipage"](row)[0], 2), row.budget)
        np.testing.assert_array_equal(kept_entries(shared, after, layer, 1), expected)


def test_ties_go_to_the_later_entry():
    case = make_case(5)
    after = compress(case, Constant())
    for kept, row in zip(all_kept(case, after), [row for rows in case.rows for row in rows], strict=True):
        expected = np.r_[0, 1, row.entries - row.budget + 2 : row.entries]
        np.testing.assert_array_equal(kept, np.broadcast_to(expected, kept.shape))


@pytest.mark.parametrize("policy", [Broken(), Constant(float("nan")), Constant(float("-inf"))])
def test_a_faulty_policy_still_keeps_real_entries_and_the_window(policy):
    case = make_case(6)
    for kept, row in zip(all_kept(case, compress(case, policy)), [r for rs in case.rows for r in rs], strict=True):
        assert kept.max() < row.entries and (kept[:, -row.window :] >= row.entries - row.window).all()
        assert kept.shape[1] == row.budget


def test_budgets_are_data():
    """Requests of different budgets in one program: each keeps its own number of entries."""
    case = make_case(7, pages=(2, 4, 4), budget_pages=(1, 3, 2), compressed=(True, False, True))
    after = compress(case, PRESETS["zipage"])
    for kept, row in zip(all_kept(case, after), [r for rs in case.rows for r in rs], strict=True):
        assert kept.shape[1] == row.budget


@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.parametrize("page_size", [16, 64])
def test_selection_matches_the_oracle_over_several_compressions(window, page_size):
    """Three rounds on one cache: F of the round before is the history of the next."""
    case = make_case(8, pages=(3,), compressed=(False,), page_size=page_size, window=window, padding_pages=0, layers=1)
    row, cache = case.rows[0][0], case.cache
    rng = np.random.default_rng(0)
    past = None
    for turn in range(3):
        row.history = past
        scores, history = oracle.PRESETS["zipage"](row)
        expected = oracle.select(oracle.protect(row, scores, 2), row.budget)
        case.batch = dataclasses.replace(case.batch, history_len=np.array([row.budget if turn else 0, 0], np.int32))
        cache = compress(dataclasses.replace(case, cache=cache), PRESETS["zipage"], window=window, num_layers=1)
        np.testing.assert_array_equal(kept_entries(case, cache, 0, 0), expected)
        past = np.take_along_axis(history, expected, axis=1)
        # A page of new entries, and their window's queries.
        targets = case.targets(0)
        fresh = next(p for p in case.batch.page_ids[0] if p not in targets)
        case.batch = dataclasses.replace(case.batch, page_ids=np.array([[*targets, fresh], [0, 0, 0]], np.int32))
        keys, values = (rng.normal(size=(2, page_size, 16)).astype(np.float32) for _ in range(2))
        queries = rng.normal(size=row.queries.shape).astype(np.float32)
        row.keys = np.concatenate([np.take_along_axis(row.keys, expected[..., None], axis=1), keys], axis=1)
        row.values = np.concatenate([np.take_along_axis(row.values, expected[..., None], axis=1), values], axis=1)
        row.queries = queries
        cache = dataclasses.replace(
            cache,
            k_pages=cache.k_pages.at[fresh].set(keys),
            v_pages=cache.v_pages.at[fresh].set(values),
            window_queries=cache.window_queries.at[case.batch.slots[0]].set(queries),
        )


def test_full_and_missing_scores_are_refused():
    case = make_case(9, history=False)
    with pytest.raises(ValueError, match="evicts nothing"):
        compress(case, PRESETS["full"])
    with pytest.raises(ValueError, match="keeps a history"):
        compress(case, PRESETS["zipage"])
    compress(case, Attention())


@pytest.mark.gpu
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("page_size", [64, 256])
def test_kernels_keep_what_the_oracle_keeps(name, page_size):
    """The device's own kernels, bfloat16 pools: nothing clearly better was dropped, and the rest of the pool is untouched."""
    shape = {"page_size": page_size, "window": 16, "kv_heads": 4, "group": 4, "head_dim": 128, "dtype": jnp.bfloat16}
    case = make_case(1, pages=(3, 5), **shape)
    run = functools.partial(
        compress_layers, config=CompressionConfig(budget_pages=2, policy=POLICIES[name]), num_layers=2
    )
    after = jax.jit(run)(case.cache, case.batch, layer_start=np.int32(0))
    touched = set()
    for layer, rows in enumerate(case.rows):
        for r, row in enumerate(rows):
            kept = kept_entries(case, after, layer, r)
            touched |= set(case.targets(r, layer))
            scores, _ = oracle.PRESETS.get(name, oracle.PRESETS["zipage"])(row)
            if name.endswith("value guard"):
                scores = oracle.guard(row, scores, 0.1)
            scores = oracle.protect(row, scores)
            assert (np.diff(kept, axis=1) > 0).all()
            assert (kept[:, -16:] == np.arange(row.entries - 16, row.entries)).all()
            scale = np.abs(scores[np.isfinite(scores) & (np.abs(scores) < oracle.PROTECTED)]).max()
            for head, best in enumerate(oracle.select(scores, row.budget)):
                assert scores[head][kept[head]].min() >= scores[head][best].min() - 1e-3 * scale
    null = {layer * case.cache.num_pages for layer in range(2)}
    same = sorted(set(range(case.cache.k_pages.shape[0])) - touched - null)
    # Bits, because pages that nobody holds are NaN.
    bits = [np.asarray(cache.k_pages)[same].view(np.uint16) for cache in (after, case.cache)]
    np.testing.assert_array_equal(*bits)


SHAPES = {
    "Qwen3-8B, a slice of 8 requests": dict(
        rows=8, pages=9, budget_pages=8, num_layers=8, heads=(32, 8, 128), page_size=256
    ),
    "a long prompt": dict(rows=1, pages=33, budget_pages=8, num_layers=8, heads=(32, 8, 128), page_size=256),
    "small pages": dict(rows=8, pages=33, budget_pages=32, num_layers=8, heads=(9, 3, 64), page_size=16),
}


@pytest.mark.parametrize("policy", ["zipage", "zipage-flash", "r-kv"])
@pytest.mark.parametrize("name", SHAPES)
def test_workspace_is_planned_and_pools_are_updated_in_place(name, policy):
    """What the compiled program takes beside its arguments stays below the plan, and every pool is aliased."""
    shape = dict(SHAPES[name])
    (heads, kv_heads, head_dim), page_size = shape.pop("heads"), shape["page_size"]
    rows, pages, targets, layers = (shape[k] for k in ("rows", "pages", "budget_pages", "num_layers"))
    config = CompressionConfig(budget_pages=targets, policy=policy)
    pool = (layers * (rows * pages + 1), kv_heads, page_size)
    array, ints = jax.ShapeDtypeStruct, jnp.int32
    cache = CacheState(
        k_pages=array((*pool, head_dim), jnp.bfloat16),
        v_pages=array((*pool, head_dim), jnp.bfloat16),
        scores=array(pool, jnp.float32) if config.policy.keeps_history else None,
        window_queries=array((layers * (rows + 1), config.window, heads, head_dim), jnp.bfloat16),
        num_layers=layers,
    )
    batch = CompressBatch(
        page_ids=array((rows, pages), ints),
        target_ids=array((rows, targets), ints),
        **{k: array((rows,), ints) for k in ("num_pages", "budget", "history_len", "slots", "seeds")},
    )
    run = jax.jit(functools.partial(compress_layers, config=config, num_layers=layers), donate_argnames="cache")
    memory = run.lower(cache=cache, batch=batch, layer_start=array((), ints)).compile().memory_analysis()
    planned = workspace_bytes(
        config,
        rows=rows,
        pages=pages,
        target_pages=targets,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        itemsize=2,
    )
    assert memory.temp_size_in_bytes <= planned
    if name.startswith("Qwen3-8B"):
        assert planned < 1.5 * memory.temp_size_in_bytes, "the plan reserves much more than is used"
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
