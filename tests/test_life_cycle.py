"""What a notebook does to an LLM: builds it again and again, runs it inside an event loop, prints it."""

import asyncio
import gc

import jax
import pytest

from zipage_jax import LLM, CompressionConfig, EngineConfig, SamplingParams
from zipage_jax.request import CompletionOutput, RequestOutput, RequestStats
from zipage_jax.scoring import Recency

PROMPT = {"prompt_token_ids": [3, 4, 5, 6, 7]}
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def build() -> LLM:
    sizes = {"page_size": 4, "num_pages": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "dtype": "float32"}
    compression = CompressionConfig(budget_pages=2, window=2)
    return LLM("tiny-llama", random_weights=True, compression=compression, **sizes)


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("end", ["close", "delete"])
def test_build_delete_and_build_again_hands_memory_back(end):
    before, texts = device_bytes(), []
    for _ in range(3):
        llm = build()
        texts.append(llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
        assert device_bytes() > before + 100_000
        if end == "close":
            llm.close()
        else:
            del llm
        # Constants that jax keeps for itself are a few bytes.
        assert device_bytes() < before + 10_000
    assert texts[0] == texts[1] == texts[2]


def test_deleting_while_a_stream_is_open_hands_memory_back():
    before = device_bytes()
    llm = build()
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    del llm, stream
    assert device_bytes() < before + 10_000


def test_it_works_inside_a_running_event_loop():
    async def cell(llm):
        streamed = list(llm.stream(PROMPT, PARAMS))[-1]
        return streamed, llm.generate([PROMPT], PARAMS, use_tqdm=False)[0]

    with build() as llm:
        streamed, generated = asyncio.run(cell(llm))
    assert streamed.outputs[0].token_ids == generated.outputs[0].token_ids


def test_what_a_cell_shows_is_short():
    with build() as llm:
        (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
        shown = [
            repr(thing) for thing in (llm, output, output.outputs[0], output.outputs[0].stats, llm.metrics, llm.config)
        ]
    assert all(len(text) < 300 and "\n" not in text for text in shown), shown
    assert "5 prompt tokens" in shown[1] and "16 tokens, length" in shown[2] and "peak_pages=3" in shown[3]


def test_reprs_name_what_matters():
    sample = CompletionOutput(0, "long " * 100, [1] * 120, finish_reason="stop", stats=RequestStats(length=125))
    output = RequestOutput("7", "Why?", [1, 2], [sample], finished=True)
    text = repr(output)
    assert text.startswith("RequestOutput('7', 'Why?', 2 prompt tokens, [CompletionOutput(0: 'long long")
    assert text.endswith("…', 120 tokens, stop)])")
    assert repr(CompletionOutput(1, "", [], error="oops")) == "CompletionOutput(1: '', 0 tokens, oops)"
    assert repr(sample.stats) == "RequestStats(length=125)"
    assert repr(EngineConfig()) == "EngineConfig()"
    config = EngineConfig(page_size=32, compression=CompressionConfig(budget_pages=2, policy="random"))
    text = "EngineConfig(page_size=32, compression=CompressionConfig(budget_pages=2, policy='random'))"
    assert repr(config) == text and eval(text) == config
    assert repr(CompressionConfig(budget_pages=2)) == "CompressionConfig(budget_pages=2)"
    assert repr(CompressionConfig(budget_pages=2, policy=Recency())).endswith("policy=Recency())")
