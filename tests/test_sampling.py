"""Sampling against a float64 oracle: distributions by χ² with fixed seeds, exact sets of kept tokens, and what must not matter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.aot import compile_for_gpu
from tests.reference import sampling as oracle
from zipage_jax.sampling import SamplingBatch, apply_penalties, sample

VOCAB = 1000
DRAWS = 4096
DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "position": 0,
}
INTEGERS = ("top_k", "seed", "position")

draw = jax.jit(sample, static_argnames="filters")


def batch_of(rows, **values):
    def column(name, value):
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32 if name in INTEGERS else jnp.float32), (rows,))

    return SamplingBatch(**{name: column(name, value) for name, value in (DEFAULTS | values).items()})


def draws(logits, num=DRAWS, vocab=VOCAB, **params):
    """`num` tokens of one row of logits, at positions 0, 1, …; the logits are padded with −inf, so that few shapes compile."""
    row = np.full(vocab, -np.inf, np.float32)
    row[: len(logits)] = logits
    rows = jnp.broadcast_to(jnp.asarray(row), (DRAWS, vocab))
    return np.asarray(draw(rows, batch_of(DRAWS, position=np.arange(DRAWS), **params), filters=True))[:num]


def one_each(logits, filters=True, **params):
    """A token of each of at most 8 rows of at most 512 logits."""
    padded = np.full((8, 512), -np.inf, np.float32)
    padded[: logits.shape[0], : logits.shape[1]] = logits
    return np.asarray(draw(jnp.asarray(padded), batch_of(8, **params), filters=filters))[: logits.shape[0]]


def assert_distributed(tokens, probabilities, level=1e-4):
    """χ² test at `level`; tokens of small expectation are counted together, tokens of probability 0 never occur."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    rare = expected < 8
    groups = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() >= 8:
        groups.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    observed, expected = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = max(len(observed) - 1, 1)
    assert statistic < stats.chi2.isf(level, freedom), f"χ² = {statistic:.1f} with {freedom} degrees of freedom"


@pytest.fixture(scope="module")
def peaked():
    return (np.random.default_rng(0).exponential(1.5, VOCAB)).astype(np.float32)


@pytest.fixture(scope="module")
def flat():
    return np.random.default_rng(1).normal(0, 0.5, VOCAB).astype(np.float32)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 128},
        {"top_k": 129},
        {"top_k": 600},
        {"top_k": 5000},
        {"top_k": -1},
        {"top_p": 0.95},
        {"top_p": 0.5},
        {"top_p": 0.1},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.7, "min_p": 0.02, "temperature": 0.7},
        {"top_k": 300, "top_p": 0.3, "temperature": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_distribution(kind, params, request):
    logits = request.getfixturevalue(kind)
    assert_distributed(draws(logits, **params), oracle.probabilities(logits, **params))


def test_chi_squared_would_notice(peaked):
    """The test's own check: draws at another temperature, or of a permuted vocabulary, fail it."""
    tokens = draws(peaked)
    with pytest.raises(AssertionError, match="χ²"):
        assert_distributed(tokens, oracle.probabilities(peaked, temperature=1.1))
    with pytest.raises(AssertionError, match="χ²"):
        assert_distributed(tokens, oracle.probabilities(np.roll(peaked, 1)))


def test_rare_tokens_keep_their_share():
    """Half of the mass is spread over 999 tokens, each far below the other one."""
    logits = np.full(VOCAB, -np.log(VOCAB - 1), np.float32)
    logits[123] = 0.0
    tokens = draws(logits)
    assert_distributed((tokens == 123).astype(int), np.array([0.5, 0.5]))
    others = tokens[tokens != 123]
    uniform = np.full(VOCAB // 50, 50 / (VOCAB - 1))
    uniform[123 // 50] -= 1 / (VOCAB - 1)
    assert_distributed(others // 50, uniform)


def test_neighbouring_positions_and_seeds_are_independent(peaked):
    probabilities = oracle.probabilities(peaked, top_k=4)
    kept = np.flatnonzero(probabilities)
    pairs = np.outer(probabilities[kept], probabilities[kept]).ravel()
    for streams in (
        draws(peaked, top_k=4).reshape(-1, 2).T,
        (draws(peaked, top_k=4, seed=7), draws(peaked, top_k=4, seed=8)),
    ):
        first, second = (np.searchsorted(kept, stream) for stream in streams)
        assert_distributed(first * len(kept) + second, pairs)


def test_draws_do_not_depend_on_rows_buckets_or_filters():
    rng = np.random.default_rng(2)
    rows, vocab = 24, 512
    logits = rng.exponential(1.5, (rows, vocab)).astype(np.float32)
    params = {
        "temperature": rng.choice([0.0, 0.5, 1.0], rows).astype(np.float32),
        "top_k": rng.choice([0, 20, 200], rows),
        "top_p": rng.choice([1.0, 0.9, 0.2], rows).astype(np.float32),
        "seed": rng.integers(0, 2**31, rows),
        "position": rng.integers(0, 100_000, rows),
    }
    params["top_k"][::4], params["top_p"][::4] = 0, 1.0

    def run(order, bucket, filters=True):
        order = np.concatenate([order, np.zeros(bucket - len(order), int)])
        batch = batch_of(bucket, **{name: value[order] for name, value in params.items()})
        return np.asarray(draw(jnp.asarray(logits[order]), batch, filters=filters))

    tokens = run(np.arange(rows), 24)
    shuffled = rng.permutation(rows)
    np.testing.assert_array_equal(run(shuffled, 24), tokens[shuffled])
    for start in (0, 8, 16):
        np.testing.assert_array_equal(run(np.arange(start, start + 8), 8), tokens[start : start + 8])
    np.testing.assert_array_equal(run(np.arange(3, 8), 8)[:5], tokens[3:8])
    plain = np.flatnonzero((params["top_k"] == 0) & (params["top_p"] == 1.0))
    np.testing.assert_array_equal(run(plain[:8], 8, filters=False)[:6], tokens[plain[:6]])


@pytest.mark.parametrize("vocab", [1, 65, 8255])
def test_any_vocabulary_size(vocab):
    """65 and 8255 leave a chunk of one token and of 63; 8255 has more chunks than a search of top_k looks at."""
    logits = np.random.default_rng(vocab).normal(0, 1, vocab).astype(np.float32)
    rows = jnp.broadcast_to(jnp.asarray(logits), (512, vocab))

    def tokens(**params):
        return np.asarray(draw(rows, batch_of(512, position=np.arange(512), **params), filters=True))

    for params in ({}, {"top_k": 2, "top_p": 0.9}, {"top_k": 200}):
        assert_distributed(tokens(**params), oracle.probabilities(logits, **params))
    assert (tokens(temperature=0.0) == logits.argmax()).all()
    every = np.where(np.arange(vocab) % 50 == 0, 1.0, 0.0).astype(np.float32)
    rows = jnp.broadcast_to(jnp.asarray(every), (512, vocab))
    for k in (1, 150):
        assert set(tokens(top_k=k, temperature=0.1) % 50) == {0}


def test_greedy_is_the_lowest_id_of_the_largest_logit():
    logits = np.zeros((6, 300), np.float32)
    logits[1, [70, 250]] = 5.0
    logits[2, [3, 4]] = 1e-30
    logits[3] = -7.0
    logits[4, 299] = np.finfo(np.float32).max
    logits[5] = -np.inf
    logits[5, 200] = -1e38
    for filters in (False, True):
        for temperature in (0.0, 1e-6):
            tokens = one_each(logits, filters, temperature=temperature, top_p=0.5, top_k=3, min_p=0.5)
            np.testing.assert_array_equal(tokens, [0, 70, 3, 0, 299, 200])


def test_ties_stay_together():
    logits = np.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -1.0], np.float32)
    assert set(draws(logits, 256, top_k=1, temperature=9.0)) == {1, 3}
    assert set(draws(logits, 512, top_k=3, temperature=9.0)) == {1, 2, 3, 4, 5}
    assert set(draws(logits, 512, top_p=0.01, temperature=9.0)) == {1, 3}


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log(np.array([1.0, 0.5, 0.25, 0.25])).astype(np.float32)  # exact in float32: 1/2, 1/4, 1/8, 1/8
    for top_p, kept in (
        (0.49, {0}),
        (0.5, {0}),
        (0.51, {0, 1}),
        (0.75, {0, 1}),
        (0.76, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        assert set(draws(logits, 512, top_p=top_p)) == kept, top_p


def test_top_p_is_of_the_mass_that_top_k_leaves():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert set(draws(logits, 512, top_p=0.5)) == {0, 1}
    assert set(draws(logits, 512, top_p=0.5, top_k=2)) == {0}


@pytest.mark.parametrize("top_k", [1, 2, 60, 128, 129, 500, 999, 1000, 1001])
def test_top_k_is_exact(top_k):
    """At a huge temperature every kept token is drawn: the set of draws is the kept set."""
    logits = np.random.default_rng(3).normal(0, 3, VOCAB).astype(np.float32)
    logits[:100] *= -1e-3  # values around 0, of both signs
    tokens = draws(logits, top_k=top_k, temperature=1e6)
    kept = np.flatnonzero(logits >= np.sort(logits)[-min(top_k, VOCAB)])
    assert set(tokens) <= set(kept)
    if top_k <= 500:
        assert set(tokens) == set(kept)
    groups = np.arange(len(kept)) * 8 // len(kept)
    assert_distributed(groups[np.searchsorted(kept, tokens)], np.bincount(groups) / len(kept))


def test_masks():
    rng = np.random.default_rng(4)
    logits = np.full((4, 500), -np.inf, np.float32)
    logits[0, 333] = -3.0
    logits[1, [10, 499]] = 0.0
    logits[2] = rng.normal(0, 1, 500)
    logits[2, :490] = -np.inf
    for params in (
        {},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 200, "top_p": 0.5},
        {"temperature": 0.0},
    ):
        for position in range(20):
            tokens = one_each(logits, position=position, **params)
            assert tokens[0] == 333
            assert tokens[1] in (10, 499)
            assert tokens[2] >= 490
            assert tokens[3] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.1e-5, 1.0, 1e30])
def test_extreme_logits(temperature):
    huge = np.finfo(np.float32).max
    logits = np.zeros((5, 200), np.float32)
    logits[0, 7] = huge
    logits[1] = -huge
    logits[1, 8] = -1e37
    logits[2, 9] = np.inf
    logits[3, :] = np.where(np.arange(200) == 10, 1e38, -1e38)
    logits[4, 11] = 1e-42
    for params in ({}, {"top_k": 5, "top_p": 0.99, "min_p": 1e-6}):
        tokens = one_each(logits, temperature=temperature, **params)
        assert ((tokens >= 0) & (tokens < 200)).all()
        if temperature <= 1.0:
            np.testing.assert_array_equal(tokens[:4], [7, 8, 9, 10])


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    st.integers(-1, 400),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_drawn_tokens_are_kept_tokens(seed, temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.1, 1.0, 10.0]), (8, 300)).astype(np.float32)
    logits[rng.random(logits.shape) < rng.choice([0.0, 0.5, 0.99])] = -np.inf
    logits[:, rng.integers(300)] = 0.0
    tokens = one_each(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=np.arange(8))
    for row, token in zip(logits, tokens, strict=True):
        # Rounding may move a border by some 1e-6 of the mass.
        loose = oracle.probabilities(
            row, temperature=temperature, top_k=top_k, top_p=min(top_p + 1e-5, 1.0), min_p=min_p * (1 - 1e-5)
        )
        assert loose[token] > 0


def test_penalties():
    rng = np.random.default_rng(5)
    rows, vocab = 6, 200
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    counts = rng.integers(0, 4, (rows, vocab)) * (rng.random((rows, vocab)) < 0.3)
    prompt = rng.random((rows, vocab)) < 0.2
    bias = np.where(rng.random((rows, vocab)) < 0.1, rng.normal(0, 5, (rows, vocab)), 0.0).astype(np.float32)
    bias[rng.random((rows, vocab)) < 0.1] = -np.inf
    params = {
        "presence_penalty": rng.uniform(-2, 2, rows),
        "frequency_penalty": rng.uniform(-2, 2, rows),
        "repetition_penalty": rng.uniform(0.5, 2, rows),
    }
    for values in params.values():
        values[0] = 0.0
    params["repetition_penalty"][0] = 1.0
    shaped = jax.jit(apply_penalties)(
        jnp.asarray(logits),
        jnp.asarray(counts, jnp.int32),
        jnp.asarray(prompt),
        jnp.asarray(bias),
        batch_of(rows, **params),
    )
    for row in range(rows):
        want = oracle.penalised(
            logits[row], counts[row], prompt[row], bias[row],
            **{name.removesuffix("_penalty"): values[row] for name, values in params.items()},
        )  # fmt: skip
        np.testing.assert_allclose(shaped[row], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(shaped[0], logits[0] + bias[0])


def test_penalised_draws(peaked):
    rng = np.random.default_rng(6)
    counts, prompt = rng.integers(0, 3, VOCAB), rng.random(VOCAB) < 0.3
    bias = np.zeros(VOCAB, np.float32)
    bias[::7] = -np.inf
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    batch = batch_of(1, **penalties)
    shaped = apply_penalties(
        jnp.asarray(peaked)[None],
        jnp.asarray(counts, jnp.int32)[None],
        jnp.asarray(prompt)[None],
        jnp.asarray(bias)[None],
        batch,
    )
    want = oracle.penalised(peaked, counts, prompt, bias, presence=0.7, frequency=0.4, repetition=1.3)
    assert_distributed(draws(shaped[0], top_p=0.9), oracle.probabilities(want, top_p=0.9))


@pytest.mark.aot
def test_passes_over_the_logits(tmp_path):
    """Compiled for the H200, the logits are read twice and never copied; top_p's own pass is inside a conditional."""
    logits = jax.ShapeDtypeStruct((256, 151_936), jnp.float32)
    rows = jax.eval_shape(lambda: batch_of(256))
    for filters in (False, True):
        options = {"xla_dump_to": str(tmp_path / str(filters)), "xla_dump_hlo_as_text": True}
        compiled = compile_for_gpu(
            lambda x, b, f=filters: sample(x, b, filters=f), (logits, rows), compiler_options=options
        )
        assert compiled.memory_analysis().temp_size_in_bytes < 64e6
        (path,) = (tmp_path / str(filters)).glob("*gpu_after_optimizations.txt")
        entry = path.read_text().split("\nENTRY ")[1]
        (name,) = re.findall(r"%(\S+) = f32\[256,151936\]\S* parameter", entry)
        reads = [
            line for line in entry.splitlines() if re.search(rf"%{re.escape(name)}[,)]", line) and "kInput" in line
        ]
        whole = [line for line in reads if re.search(r"= \(?[fs]32\[256,2374\]", line)]
        assert len(whole) == 2, whole


@pytest.mark.gpu
def test_large_vocabulary_on_the_gpu():
    """Real sizes: greedy is exact, and what the filters keep is what the oracle keeps."""
    rows, vocab = 256, 151_936
    logits = np.random.default_rng(9).exponential(2.0, (rows, vocab)).astype(np.float32)
    logits[::2] = np.random.default_rng(10).normal(0, 1, (rows // 2, vocab))
    device = jnp.asarray(logits)
    np.testing.assert_array_equal(draw(device, batch_of(rows, temperature=0.0), filters=False), logits.argmax(1))
    for params in (
        {"top_k": 50},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_p": 0.2},
        {"top_k": 100, "top_p": 0.8, "min_p": 0.01},
    ):
        tokens = np.asarray(draw(device, batch_of(rows, seed=np.arange(rows), **params), filters=True))
        order = np.sort(logits, axis=1)[:, ::-1]
        mass = np.exp(order.astype(np.float64) - order[:, :1])
        chosen = np.take_along_axis(logits, tokens[:, None], 1)
        kept = mass >= params.get("min_p", 0.0)
        kept &= np.arange(vocab)[None] < params.get("top_k", vocab)
        before = np.where(order > chosen, mass * kept, 0.0).sum(1)
        assert (before < (params.get("top_p", 1.0) + 1e-5) * (mass * kept).sum(1)).all()
        assert (chosen[:, 0] >= np.where(kept, order, np.inf).min(1)).all()
    seeds = np.arange(rows)
    plain = draw(device, batch_of(rows, seed=seeds), filters=False)
    np.testing.assert_array_equal(draw(device, batch_of(rows, seed=seeds), filters=True), plain)
    np.testing.assert_array_equal(draw(device[32:40], batch_of(8, seed=seeds[32:40]), filters=False), plain[32:40])


def test_sampling_sorts_no_vocabulary():
    """The largest array that is ranked is top_k's: the 64 tokens of each of 128 chunks. Without filters nothing is."""
    arguments = jnp.zeros((4, 64 * 1000)), batch_of(4)
    plain = draw.lower(*arguments, filters=False).as_text()
    filtered = draw.lower(*arguments, filters=True).as_text()
    assert not re.findall(r"(?:stablehlo\.sort|chlo\.top_k)", plain + filtered.replace("chlo.top_k", ""))
    ranked = re.findall(r"chlo\.top_k.*?tensor<4x(\d+)xf32>", filtered)
    assert sorted(map(int, ranked)) == [1000, 64 * 128]
