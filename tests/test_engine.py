"""The engine against a dense oracle: whatever the arrivals, lengths and pool, greedy tokens are the oracle's."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines import engine, greedy, request, run
from zipage_jax.config import CompressionConfig

KINDS = ("llama", "qwen2", "qwen3")
SAFE_MARGIN = 1e-3


def check_greedy(kind: str, requests) -> None:
    for r in requests:
        seq = r.sequences[0]
        expected, margin = greedy(kind, tuple(seq.prompt_ids), seq.params.max_tokens)
        if margin > SAFE_MARGIN:
            assert tuple(seq.output_ids) == expected
        assert len(seq.output_ids) == seq.params.max_tokens
        assert seq.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_oracles(kind):
    e = engine(kind)
    rng = np.random.default_rng(0)
    requests = [request(str(i), rng.integers(0, 96, n).tolist(), max_tokens=12) for i, n in enumerate((1, 3, 4, 5, 17))]
    run(e, requests)
    check_greedy(kind, requests)
    assert e.scheduler.num_used_pages == 0


@settings(max_examples=25)
@given(data=st.data())
def test_any_mix_of_requests_gives_the_oracles_tokens(data):
    """Arrivals, lengths, pools so small that requests are preempted, chunked prefill, prefix sharing on and off."""
    pages = data.draw(st.sampled_from([10, 14, 64]))
    chunk = data.draw(st.sampled_from([4, 8, 32]))
    sharing = data.draw(st.booleans())
    e = shared_engine("qwen3", pages, chunk, sharing)
    base = np.random.default_rng(data.draw(st.integers(0, 3))).integers(0, 96, 24).tolist()
    num = data.draw(st.integers(1, 6))
    lens = data.draw(st.lists(st.integers(1, 20), min_size=num, max_size=num))
    outs = data.draw(st.lists(st.integers(1, 14), min_size=num, max_size=num))
    arrivals = data.draw(st.lists(st.integers(0, 20), min_size=num, max_size=num))
    requests = [request(str(i), base[:n], max_tokens=m) for i, (n, m) in enumerate(zip(lens, outs, strict=True))]
    run(e, requests, arrivals)
    check_greedy("qwen3", requests)
    assert e.scheduler.num_used_pages == 0
    for r in requests:
        e.outputs.remove(r.request_id)


_ENGINES: dict = {}


def shared_engine(kind: str, pages: int, chunk: int, sharing: bool):
    """One engine a configuration, so that the examples share executables."""
    key = (kind, pages, chunk, sharing)
    if key not in _ENGINES:
        _ENGINES[key] = engine(kind, num_pages=pages, max_num_batched_tokens=chunk, enable_prefix_caching=sharing)
    return _ENGINES[key]


def test_executables_are_one_a_bucket():
    e = engine()
    run(e, [request(str(i), [5] * (i + 1), max_tokens=6) for i in range(4)])
    compiled = e.runner.programs.num_compiled
    run(e, [request(f"again {i}", [7] * (i + 1), max_tokens=6) for i in range(4)])
    assert e.runner.programs.num_compiled == compiled


def test_cache_is_donated():
    """A step's cache is the one it was given: no second pool ever exists."""
    e = engine()
    before = e.runner.cache.k_pages
    run(e, [request("a", [1, 2, 3], max_tokens=2)])
    assert before.is_deleted()


def test_samples_share_the_prompt_and_differ():
    e = engine(num_pages=40)
    r = request("n", list(range(9)), n=3, temperature=1.0, seed=3, max_tokens=8)
    run(e, [r])
    outputs = r.output().outputs
    assert [o.index for o in outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outputs}) == 3
    assert sum(o.stats.num_cached_tokens for o in outputs) == 2 * 8


def test_a_seed_fixes_what_is_drawn_whatever_the_neighbours():
    e = engine()
    alone = request("alone", [5, 6, 7], temperature=1.0, seed=11, max_tokens=10)
    run(e, [alone])
    crowd = [request(str(i), [i + 1] * (i + 2), temperature=1.0, seed=i, max_tokens=9) for i in range(3)]
    again = request("again", [5, 6, 7], temperature=1.0, seed=11, max_tokens=10)
    run(e, [*crowd, again], [0, 1, 2, 3])
    assert again.sequences[0].output_ids == alone.sequences[0].output_ids


def test_stop_ids_end_a_sample_and_min_tokens_hold_them_off():
    tokens, _ = greedy("llama", (3, 4, 5), 8)
    e = engine()
    stopped = request("a", [3, 4, 5], stop_token_ids=[tokens[2]], max_tokens=8)
    eos = request("b", [3, 4, 5], eos_ids=(tokens[1],), max_tokens=8)
    ignored = request("c", [3, 4, 5], eos_ids=(tokens[1],), ignore_eos=True, max_tokens=8)
    held = request("d", [3, 4, 5], eos_ids=(tokens[1],), min_tokens=5, max_tokens=8)
    run(e, [stopped, eos, ignored, held])
    first = tokens.index(tokens[2])
    assert stopped.sequences[0].output_ids == list(tokens[: first + 1])
    assert (stopped.sequences[0].finish_reason, stopped.sequences[0].stop_reason) == ("stop", tokens[2])
    assert eos.sequences[0].output_ids == list(tokens[: tokens.index(tokens[1]) + 1])
    assert eos.sequences[0].stop_reason is None
    assert ignored.sequences[0].output_ids == list(tokens)
    assert tokens[1] not in held.sequences[0].output_ids[:5]


def test_logit_bias_and_allowed_tokens():
    e = engine()
    forced = request("a", [3], logit_bias={42: 1e4}, max_tokens=3)
    allowed = request("b", [3], allowed_token_ids=[7, 8], max_tokens=5, temperature=1.0)
    plain = request("c", [3], max_tokens=4)
    run(e, [forced, allowed, plain])
    assert forced.sequences[0].output_ids == [42] * 3
    assert set(allowed.sequences[0].output_ids) <= {7, 8}
    assert tuple(plain.sequences[0].output_ids) == greedy("llama", (3,), 4)[0]


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {42: 1e4}}, {"allowed_token_ids": [7]}, {"min_tokens": 9}, {"presence_penalty": 2.0}],
    ids=lambda params: next(iter(params)),
)
def test_what_a_request_asked_for_ends_with_it(params):
    """A request without biases or penalties sits in the seat of one that had them, which ended or was aborted."""
    tokens, _ = greedy("llama", (3, 4, 5), 6)
    e = engine(max_num_seqs=1)
    run(e, [request("ended", [3], max_tokens=9, eos_ids=(tokens[0],), **params)])
    e.add(request("aborted", [3], max_tokens=9, eos_ids=(tokens[0],), **params))
    for _ in range(3):
        e.step()
    e.abort("aborted")
    plain = request("plain", [3, 4, 5], max_tokens=6)
    run(e, [plain])
    assert tuple(plain.sequences[0].output_ids) == tokens


def test_logprobs_are_the_oracles():
    from tests.engines import tiny
    from tests.reference import transformer

    e = engine()
    prompt = [9, 8, 7, 6, 5, 4]
    r = request("a", prompt, logprobs=3, prompt_logprobs=2, max_tokens=4)
    run(e, [r])
    output = r.output()
    _, config, tensors = tiny("llama")
    ids = prompt + output.outputs[0].token_ids
    logits = transformer.logits(config, tensors, ids)
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    assert output.prompt_logprobs[0] is None
    for position, found in enumerate([*output.prompt_logprobs[1:], *output.outputs[0].logprobs], start=1):
        expected = logprobs[position - 1]
        assert found[ids[position]].logprob == pytest.approx(expected[ids[position]], abs=1e-4)
        assert found[ids[position]].rank == 1 + int((expected > expected[ids[position]]).sum())
        best = int(np.argmax(expected))
        assert found[best].logprob == pytest.approx(expected[best], abs=1e-4) and found[best].rank == 1


def test_a_budget_that_is_never_reached_changes_nothing():
    """Bit for bit: the same executables run on the same pool."""
    prompts = [[i + 1] * (3 + i) for i in range(3)]
    outputs = []
    for compression in (None, CompressionConfig(budget_pages=8, window=2)):
        e = engine(compression=compression)
        requests = [request(str(i), p, max_tokens=10, logprobs=1) for i, p in enumerate(prompts)]
        run(e, requests)
        outputs.append([(s.token_ids, s.cumulative_logprob) for r in requests for s in r.output().outputs])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["zipage", "attention"])
def test_compressed_requests_end_and_stay_within_their_budget(policy, asynchronous):
    compression = CompressionConfig(budget_pages=3, window=2, policy=policy, layer_stride=1)
    e = engine(compression=compression, async_compression=asynchronous)
    requests = [request(str(i), list(range(2 + 5 * i)), max_tokens=60) for i in range(4)]
    run(e, requests)
    for r in requests:
        seq = r.sequences[0]
        assert len(seq.output_ids) == 60
        assert seq.stats.peak_pages <= max(4, -(-seq.num_prompt // 4) + 1)
        assert seq.stats.num_compressions >= 10
        assert seq.stats.entries_evicted == seq.stats.num_compressions * 4 + 4 * max(0, -(-seq.num_prompt // 4) - 4)
    assert e.scheduler.num_used_pages == 0


def test_a_failed_step_loses_no_request_that_can_be_recomputed(monkeypatch):
    e = engine()
    requests = [request(str(i), [i + 3] * 5, max_tokens=12) for i in range(3)]
    for r in requests:
        e.add(r)
    for _ in range(4):
        e.step()
    fetch = type(e._pending.result).fetch

    def fail(self):
        monkeypatch.setattr(type(self), "fetch", fetch)
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    monkeypatch.setattr(type(e._pending.result), "fetch", fail)
    while e.has_unfinished:
        e.step()
    check_greedy("llama", requests)
    assert e.scheduler.num_used_pages == 0


def test_abort_in_any_state_frees_everything():
    e = engine(num_pages=16)
    requests = [request(str(i), [i + 3] * 9, max_tokens=20) for i in range(5)]
    for r in requests:
        e.add(r)
    for i in range(5):
        e.step()
        e.abort(str(i))
    while e.has_unfinished:
        e.step()
    assert all(r.sequences[0].finish_reason == "abort" for r in requests)
    assert e.scheduler.num_used_pages == 0


def test_ids_in_use_are_refused():
    e = engine()
    e.add(request("a", [1], max_tokens=2))
    with pytest.raises(ValueError, match="'a' is in use"):
        e.add(request("a", [1], max_tokens=2))
    with pytest.raises(ValueError, match=r"max_model_len|pages"):
        e.add(request("b", [1] * 600, max_tokens=2))
    while e.has_unfinished:
        e.step()
    assert "b" not in e.outputs
