"""Policies inside the engine: what stays alive, what the model then says, and that enough budget changes nothing."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.engines import engine, request, run
from zipage_jax.config import CompressionConfig
from zipage_jax.evictions import alive_positions, kept_share_by_page
from zipage_jax.llm import LLM
from zipage_jax.request import SamplingParams
from zipage_jax.scoring import PRESETS, Scored, ScoringPolicy


@dataclasses.dataclass(frozen=True)
class Forget(ScoringPolicy):
    """Entries start … stop − 1 go first, the latest of them first of all."""

    start: int
    stop: int

    def score(self, context):
        gone = (context.entry >= self.start) & (context.entry < self.stop)
        scores = jnp.where(gone, -context.entry.astype(jnp.float32), 1.0)[None]
        return Scored(jnp.broadcast_to(scores, (context.page_ids.shape[0], context.k_pages.shape[1], scores.shape[-1])))


def outputs_of(compression, kind: str = "llama"):
    e = engine(kind, compression=compression)
    requests = [request(str(n), [3 + n] * n, logprobs=2, max_tokens=20) for n in (3, 8, 17)]
    run(e, requests)
    assert e.scheduler.num_used_pages == 0
    return [r.output().outputs[0] for r in requests]


def test_enough_budget_is_full_kv_bit_for_bit():
    full = outputs_of(None)
    for compression in (
        CompressionConfig(budget_pages=12, window=4, policy="zipage"),
        CompressionConfig(budget_pages=2, window=4, policy="full"),
    ):
        for a, b in zip(full, outputs_of(compression), strict=True):
            assert a.token_ids == b.token_ids and a.logprobs == b.logprobs
            assert b.stats.num_compressions == 0


@pytest.mark.parametrize("async_compression", [False, True])
def test_alive_positions_are_the_ones_the_policy_kept(async_compression):
    compression = CompressionConfig(
        budget_pages=2, window=2, policy=Forget(1, 5), record_evictions=True, layer_stride=1
    )
    e = engine("qwen3", compression=compression, async_compression=async_compression)
    r = request("a", list(range(10)), max_tokens=6)
    e.add(r)
    seq, seen = r.sequences[0], {}
    while e.has_unfinished:
        e.step()
        if seq.page_ids:
            alive = alive_positions(e.runner.cache, seq.page_ids, seq.cache_len)
            seen[seq.num_written] = alive
    # 12 entries in 3 pages are full; 8 stay: 0 and 5 … 11 (1 … 4 are forgotten), then every new token joins.
    expected = [0, *range(5, 12)]
    for written in (14, 15):
        want = [*expected, *range(12, written)]
        assert (seen[written] == want).all(), (written, seen[written])
    share = kept_share_by_page(seen[15], 15, 4)
    np.testing.assert_allclose(share, np.broadcast_to([0.25, 0.75, 1.0, 1.0], share.shape))
    assert seq.stats.num_compressions == 1 and seq.stats.entries_evicted == 4


def test_positions_must_be_recorded():
    e = engine()
    with pytest.raises(ValueError, match="record_evictions"):
        alive_positions(e.runner.cache, [1], 1)


NEEDLE = "The secret code of the old lighthouse is 4715."
FILLER = (
    "The morning was grey and the harbour was quiet. A few boats lay at the pier, and nobody was in a hurry. Later the sun came "
    "out, the market opened, and people bought bread, fish and apples before they went home to have lunch with their families."
)
QUESTION = "As we said, the secret code of the old lighthouse is"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2 in float32, loaded once; an LLM built meanwhile takes it too. Engines share what they compile."""
    model = models.load("smollm2", "float32")
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", lambda *args: model)
        for name, value in options.items():
            jax.config.update(name, value)
        yield model
    for name, value in before.items():
        jax.config.update(name, value)


def dense_logprobs(model: models.LoadedModel):
    """Jitted (tokens, mask [tokens tokens]) -> log probabilities [tokens vocab] of dense attention at true positions."""

    def run(params, tokens, seen):
        def attend(layer, cache, q, k, v):
            group = q.shape[1] // k.shape[1]
            k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
            logits = jnp.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
            weights = jax.nn.softmax(jnp.where(seen[None], logits, -jnp.inf))
            return cache, jnp.einsum("hts,shd->thd", weights, v)

        hidden, _ = models.forward(params, model.config, tokens, jnp.arange(tokens.shape[0]), None, attend)
        return jax.nn.log_softmax(models.logits(params, model.config, hidden))

    return functools.partial(jax.jit(run), model.params)


@pytest.mark.slow
def test_evicting_irrelevant_tokens_is_masked_attention_and_keeps_the_needle(smollm2):
    """A code far back in the prompt, filler evicted: the model still finds it, with the logits of masked full attention."""
    encode = functools.partial(smollm2.tokenizer.encode, add_special_tokens=False)
    start, end = encode(NEEDLE + " "), encode(" " + QUESTION)
    filler = encode(FILLER)[: 80 - len(start) - len(end)]
    prompt = [*start, *filler, *end]
    assert len(prompt) == 80  # 5 pages; 3 are kept
    evicted = slice(len(start), len(start) + 32)
    assert evicted.stop <= len(start) + len(filler)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, ignore_eos=True)
    options = {"page_size": 16, "num_pages": 16, "max_num_seqs": 1, "max_num_batched_tokens": 80, "dtype": "float32"}
    compression = CompressionConfig(budget_pages=3, window=8, policy=Forget(evicted.start, evicted.stop))
    with LLM("smollm2", **options, max_model_len=128, compression=compression) as llm:
        (output,) = (r.outputs[0] for r in llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False))
    assert "4715" in output.text
    assert output.stats.entries_evicted == 32
    tokens = prompt + output.token_ids
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    masked = causal.copy()
    masked[len(prompt) :, evicted] = False
    logprobs = dense_logprobs(smollm2)
    expected, unmasked = (np.asarray(logprobs(np.asarray(tokens), seen)) for seen in (masked, causal))
    moved = 0.0
    for i, found in enumerate(output.logprobs):
        for token, entry in found.items():
            np.testing.assert_allclose(entry.logprob, expected[len(prompt) - 1 + i, token], atol=1e-4)
            moved = max(moved, abs(entry.logprob - unmasked[len(prompt) - 1 + i, token]))
    assert moved > 2e-2, "the evicted tokens made no difference, so nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"full"}))
def test_every_preset_generates_with_a_budget_of_64_entries(name, smollm2):
    compression = CompressionConfig(budget_pages=4, window=16, policy=name)
    options = {"page_size": 16, "num_pages": 32, "max_num_seqs": 1, "max_num_batched_tokens": 64, "dtype": "float32"}
    with LLM("smollm2", **options, max_model_len=1024, compression=compression) as llm:
        params = SamplingParams(max_tokens=512, temperature=0.0, ignore_eos=True)
        (output,) = (r.outputs[0] for r in llm.generate(["Once upon a time"], params, use_tqdm=False))
    assert len(output.token_ids) == 512
    # 515 entries are written; the first compression comes at 80, then every 16.
    assert output.stats.num_compressions == 28 and output.stats.entries_evicted == 16 * 28
    assert output.stats.peak_pages <= 6
