"""LLM under attack: bad input is named and refused, whatever happens the others finish, nothing leaks, the engine lives on."""

import contextlib
import json
import pickle
import re
import signal
import threading
import time

import numpy as np
import pytest

from tests.reference import tiny_models
from tests.test_text import byte_level
from zipage_jax import LLM, CompressionConfig, RequestsFailed, SamplingParams
from zipage_jax.outputs import SampleOutput
from zipage_jax.plan import Plan
from zipage_jax.runner import Runner, StepResult
from zipage_jax.scheduler import Scheduler

VOCAB = 330


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = tiny_models.config("llama", vocab_size=VOCAB)
    path = tiny_models.write(tmp_path_factory.mktemp("models") / "tiny", config, tiny_models.tensors(config))
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def build(directory) -> LLM:
    sizes = {"page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128}
    return LLM(str(directory), dtype="float32", **sizes)


@pytest.fixture(scope="module")
def llm(directory):
    with build(directory) as an_llm:
        an_llm.expected = token_ids(an_llm, PROMPTS)
        yield an_llm


PROMPTS = [[5, 6, 7], [1, 3], [9] * 9, [4], [4, 5], [6]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def token_ids(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def check_usable(llm: LLM) -> None:
    """Nothing is left of earlier requests, and what the engine generates is what it always did."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished and scheduler.num_used_pages == 0
    assert not scheduler._late and not scheduler._requests
    assert not llm.engine.outputs._requests
    assert token_ids(llm, PROMPTS) == llm.expected


@pytest.mark.parametrize(
    ("prompts", "error", "named"),
    [
        ("", ValueError, "prompt 0.*empty"),
        ([[]], ValueError, "prompt 0.*empty"),
        ({}, ValueError, "prompt 0.*empty"),
        ([[1], [1] * 200], ValueError, "prompt 1.*200 tokens.*max_model_len=128"),
        ([VOCAB], ValueError, f"token id {VOCAB}.*vocabulary of {VOCAB}"),
        ([-1], ValueError, "token id -1"),
        ([[1, 2.5]], TypeError, "token id 2.5"),
        ([[1], ["1", "2"]], TypeError, "prompt 1.*token id '1'"),
        ([[[1]]], TypeError, r"token id \[1\]"),
        ([1.5], TypeError, "prompt 0: 1.5"),
        ([[True]], TypeError, "token id True"),
        (None, TypeError, "None is no prompt"),
        ([None], TypeError, "prompt 0: None"),
        (5, TypeError, "5 is no prompt"),
        (b"abc", TypeError, "b'abc'"),
        ({"prompt": 5}, TypeError, "5 is no text"),
        ({"prompt": None}, TypeError, "None is no text"),
        ({"prompt_token_ids": "abc"}, TypeError, "'abc' is no list"),
        ({"promt": "a"}, ValueError, "promt"),
        ("\ud800", ValueError, "surrogates"),
    ],
)
def test_bad_prompts_are_named(llm, prompts, error, named):
    with pytest.raises(error, match=named):
        llm.generate(prompts, use_tqdm=False)
    with pytest.raises(error, match=named):
        next(llm.stream(prompts))
    check_usable(llm)


def test_prompts_in_any_container(llm):
    for prompts in (np.array(PROMPTS[0]), [np.array(PROMPTS[0])], tuple(PROMPTS[0]), iter(PROMPTS[:1])):
        assert token_ids(llm, prompts) == llm.expected[:1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**40),
        ("top_k", -5),
        ("n", 0),
        ("n", 10**9),
        ("temperature", float("nan")),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("logit_bias", [3]),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {3: float("inf")}),
        ("logit_bias", {3: "x"}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"-3": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {3: 1e39}),
        ("logit_bias", {3: 1.0, "3": 2.0}),
        ("max_tokens", 0),
        ("max_tokens", float("inf")),
        ("min_tokens", 17),
        ("ignore_eos", "no"),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", 1),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("stop_token_ids", [-3]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", "ab"),
        ("allowed_token_ids", [1.5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "ab"),
        ("stop", ""),
        ("stop", 5),
        ("stop", ["a", 5]),
    ],
)
def test_bad_sampling_params_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias has token id 330"),
        ({"logit_bias": {str(VOCAB): 1.0}}, "logit_bias has token id 330"),
        ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids has token id 330"),
        ({"stop_token_ids": [5, 10**9], "min_tokens": 2}, "stop_token_ids has token id 1000000000"),
        ({"stop_token_ids": [7], "allowed_token_ids": [2, 7], "min_tokens": 2}, "min_tokens=2 bans all"),
    ],
)
def test_ids_outside_the_vocabulary_are_named(llm, params, named):
    """And the good request beside the bad one is not queued, nor are those that run already disturbed."""
    running = llm.stream(PROMPTS[0], GREEDY)
    next(running)
    with pytest.raises(ValueError, match=f"prompt 1: {named}"):
        llm.generate([[1], [1]], [GREEDY, SamplingParams(**params)], use_tqdm=False)
    assert list(running)[-1].outputs[0].token_ids == llm.expected[0]
    check_usable(llm)


def test_keys_of_a_bias_may_be_texts():
    """As they are in JSON; vLLM takes them too."""
    assert SamplingParams(logit_bias={"3": 1, 4: 2.0}).logit_bias == {3: 1, 4: 2.0}


@pytest.mark.parametrize("params", [{"n": 1}, [{"n": 1}], 5, [None], "abc"])
def test_sampling_params_of_another_kind(llm, params):
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate([[1]], params, use_tqdm=False)


def test_as_many_sampling_params_as_prompts(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)


@pytest.mark.parametrize("messages", ["Say hi", {"role": "user", "content": "hi"}, ["hi"], [[], "hi"], None, 5])
def test_messages_of_another_kind(llm, messages):
    with pytest.raises(TypeError, match=r"messages=.* must be a list of {'role'"):
        llm.chat(messages, use_tqdm=False)


@pytest.mark.parametrize("compression", [4, True, "zipage", {"budget_pages": 4}])
def test_compression_of_another_kind(compression):
    with pytest.raises(TypeError, match=r"compression=.* None or a CompressionConfig"):
        LLM("smollm2", compression=compression)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", None),
        ("seed", "1"),
        ("gpu_memory_utilization", "half"),
        ("gpu_memory_utilization", 2),
        ("gpu_memory_utilization", True),
        ("num_pages", 0),
        ("enable_prefix_caching", "no"),
        ("async_compression", None),
        ("batch_invariant", 1),
        ("dtype", ["bfloat16"]),
    ],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}')} must be"):
        LLM("smollm2", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("budget_pages", True), ("window", 0), ("policy", []), ("policy", None), ("record_evictions", "no")],
)
def test_bad_compression_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}')} must be"):
        CompressionConfig(**{"budget_pages": 4, name: value})


def test_stop_strings_need_a_tokenizer(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(ValueError, match="stop='a' needs text"):
        llm.generate([[1]], SamplingParams(stop="a"), use_tqdm=False)


def test_stop_strings_before_min_tokens_are_text(llm):
    """A stop string that is completed too early neither stops nor hides what follows; a later one stops."""
    (free,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    for stop in {character for character in free.outputs[0].text if character != "\ufffd"}:
        for min_tokens in range(12):
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop, min_tokens=min_tokens)
            (sample,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs
            assert len(sample.token_ids) >= min_tokens
            assert llm.get_tokenizer().decode(sample.token_ids).startswith(sample.text)
            assert (sample.text == free.outputs[0].text) == (sample.finish_reason == "length")


def test_streams_yield_their_own_requests(llm):
    """Whoever steps the engine, each stream shows all of its requests, each to its end, and no other's."""
    seen: dict[str, list] = {"a": [], "b": []}
    streams = {"a": llm.stream(PROMPTS[:2], GREEDY), "b": llm.stream(PROMPTS[2:4], GREEDY)}
    while streams:
        for name in list(streams):
            output = next(streams[name], None)
            if output is None:
                del streams[name]
                continue
            seen[name].append(output)
            assert token_ids(llm, PROMPTS[4:]) == llm.expected[4:]
    for name, prompts, expected in (("a", PROMPTS[:2], llm.expected[:2]), ("b", PROMPTS[2:4], llm.expected[2:4])):
        finished = [output for output in seen[name] if output.finished]
        assert {output.request_id for output in seen[name]} == {output.request_id for output in finished}
        assert sorted(o.prompt_token_ids for o in finished) == sorted(prompts)
        assert sorted(o.outputs[0].token_ids for o in finished) == sorted(expected)
    check_usable(llm)


def test_outputs_are_snapshots(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outputs = list(llm.stream(PROMPTS[0], params))
    for output in outputs:
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
        assert pickle.loads(pickle.dumps(output)) == output
    assert outputs[0].outputs[0].stats != outputs[-1].outputs[0].stats


def test_a_dropped_stream_leaves_nothing(llm):
    for steps in range(4):
        dropped = llm.stream(PROMPTS, GREEDY)
        for _ in range(steps):
            next(dropped)
        dropped.close()
        assert list(llm.stream(PROMPTS[0], GREEDY))[-1].outputs[0].token_ids == llm.expected[0]
        check_usable(llm)


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT: a shell's background jobs start with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Scheduler, "add"),
        (Scheduler, "plan"),
        (Scheduler, "_release"),
        (Runner, "dispatch"),
        (StepResult, "fetch"),
        (Scheduler, "commit"),
        (SampleOutput, "push"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_interrupt_anywhere_leaves_the_engine_usable(llm, monkeypatch, where, name, call):
    """Ctrl-C after the call-th call of a function: the call's requests are dropped, one that runs beside it goes on."""
    beside = llm.stream(PROMPTS[0], GREEDY)
    next(beside)
    original, calls = getattr(where, name), []

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append(name)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert list(beside)[-1].outputs[0].token_ids == llm.expected[0]
    check_usable(llm)


def test_threads_share_the_engine(llm):
    results: dict[int, list] = {}

    def work(i: int) -> None:
        if i % 2:
            results[i] = token_ids(llm, PROMPTS)
        else:
            ended = [output for output in llm.stream(PROMPTS, GREEDY) if output.finished]
            assert all(output.outputs[0].finish_reason == "length" for output in ended)
            results[i] = [o.outputs[0].token_ids for o in sorted(ended, key=lambda o: int(o.request_id))]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == {i: llm.expected for i in range(6)}
    check_usable(llm)


def test_times_count_from_when_a_request_was_queued(llm):
    start = time.perf_counter()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    elapsed = time.perf_counter() - start
    for stats in (output.outputs[0].stats for output in outputs):
        assert 0 < stats.first_token_s < stats.finished_s <= elapsed


@contextlib.contextmanager
def failing_steps(monkeypatch, times: int):
    """The next steps' results cannot be fetched."""
    fetch, calls = StepResult.fetch, []

    def fail(self):
        calls.append(self)
        if len(calls) <= times:
            raise MemoryError("injected")
        return fetch(self)

    with monkeypatch.context() as patch:
        patch.setattr(StepResult, "fetch", fail)
        yield


def test_failed_steps_are_run_again(llm, monkeypatch):
    with failing_steps(monkeypatch, times=2):
        assert token_ids(llm, PROMPTS) == llm.expected
    check_usable(llm)


def test_requests_that_failed_are_an_exception_not_an_empty_text(llm, monkeypatch):
    """Four of six requests have a seat when steps fail again and again; the two that had none are run all the same."""
    with (
        failing_steps(monkeypatch, times=3),
        pytest.raises(RequestsFailed, match=r"4 of 6 samples failed: MemoryError: injected") as failed,
    ):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert isinstance(failed.value.__cause__, MemoryError)
    samples = [output.outputs[0] for output in failed.value.outputs]
    assert [sample.finish_reason for sample in samples] == ["error"] * 4 + ["length"] * 2
    assert [sample.token_ids for sample in samples[4:]] == llm.expected[4:]
    check_usable(llm)


def test_a_text_that_cannot_be_made_fails_its_requests_alone(llm, monkeypatch):
    """Whatever goes wrong on the host between two steps counts as a failed step: nothing hangs, nothing leaks."""
    monkeypatch.setattr(SampleOutput, "push", lambda *_: 1 / 0)
    with pytest.raises(RequestsFailed) as failed:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    check_usable(llm)


def test_a_stuck_scheduler_is_an_error_not_a_loop(llm, monkeypatch):
    monkeypatch.setattr(Scheduler, "plan", lambda self: Plan())
    with pytest.raises(RuntimeError, match=r"stuck with .* and 6 waiting"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    check_usable(llm)


def test_idle_steps_are_no_steps(llm):
    steps = llm.metrics.steps
    assert llm.engine.step() == [] and llm.metrics.steps == steps


def test_two_models_side_by_side(llm, directory):
    with build(directory) as other:
        streams = [llm.stream(PROMPTS[0], GREEDY), other.stream(PROMPTS[0], GREEDY)]
        for outputs in zip(*streams, strict=True):
            assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    check_usable(llm)


def test_a_closed_llm_says_so(directory):
    llm = build(directory)
    stream = llm.stream("a", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with contextlib.closing(stream), pytest.raises(RuntimeError, match="closed"):
        next(stream)
    for use in (lambda: llm.generate("a"), lambda: next(llm.stream("a")), lambda: llm.metrics):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert "closed" in repr(llm)
