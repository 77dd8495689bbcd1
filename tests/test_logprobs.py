"""Log probabilities of drawn and of prompt tokens against a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import sampling as oracle
from zipage_jax.sampling import prompt_logprobs, token_logprobs


@pytest.mark.parametrize("num", [0, 1, 5, 20])
def test_logprobs(num):
    rng = np.random.default_rng(7)
    logits = np.concatenate([rng.normal(0, 4, (4, 333)), rng.integers(0, 3, (4, 333))]).astype(np.float32)
    tokens = rng.integers(0, 333, 8)
    got = jax.jit(token_logprobs, static_argnums=2)(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), num)
    for row in range(8):
        chosen, rank, ids, best = oracle.logprobs(logits[row], tokens[row], num)
        np.testing.assert_allclose(got[0][row], chosen, atol=1e-5)
        assert got[1][row] == rank
        np.testing.assert_array_equal(got[2][row], ids)
        np.testing.assert_allclose(got[3][row], best, atol=1e-5)


def test_logprobs_of_masked_logits():
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, 50] = 3.0
    chosen, rank, ids, best = token_logprobs(jnp.asarray(logits), jnp.asarray([50], jnp.int32), 3)
    assert (chosen[0], rank[0], ids[0, 0], best[0, 0]) == (0.0, 1, 50, 0.0)
    assert np.isneginf(best[0, 1:]).all()


@pytest.mark.parametrize("tokens", [7, 16, 21])
def test_prompt_logprobs_are_those_of_all_logits_at_once(tokens):
    rng = np.random.default_rng(8)
    hidden = jnp.asarray(rng.normal(0, 1, (tokens, 16)), jnp.float32)
    head = jnp.asarray(rng.normal(0, 1, (16, 200)), jnp.float32)
    following = jnp.asarray(rng.integers(0, 200, tokens), jnp.int32)
    got = jax.jit(lambda h, n: prompt_logprobs(h, n, lambda x: x @ head, 4, block=8))(hidden, following)
    want = token_logprobs(hidden @ head, following, 4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_prompt_logprobs_hold_one_block_of_logits():
    tokens, vocab, block = 4096, 8192, 128
    head = jnp.zeros((8, vocab), jnp.float32)

    def scores(hidden, following):
        return prompt_logprobs(hidden, following, lambda x: x @ head, 5, block=block)

    compiled = jax.jit(scores).lower(jnp.zeros((tokens, 8)), jnp.zeros(tokens, jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * block * vocab * 4 < tokens * vocab * 4 / 4
