"""Small engines for tests: tiny random models, small pages, and the oracle's own greedy continuation."""

import functools

import numpy as np

import models
from tests.reference import tiny_models, transformer
from zipage_jax.build import build_engine
from zipage_jax.config import EngineConfig
from zipage_jax.outputs import Request
from zipage_jax.request import SamplingParams, Sequence


@functools.cache
def tiny(kind: str) -> tuple[models.LoadedModel, dict, dict]:
    """(model, config.json, tensors) of a tiny float32 model with random weights."""
    import tempfile
    from pathlib import Path

    config = tiny_models.config(kind)
    tensors = tiny_models.tensors(config)
    with tempfile.TemporaryDirectory() as directory:
        model = models.load(tiny_models.write(Path(directory) / kind, config, tensors), "float32")
    return model, config, tensors


def engine(kind: str = "llama", **options):
    """An engine over a tiny model; pages of 4 tokens unless told otherwise."""
    options = {
        "page_size": 4,
        "num_pages": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "dtype": "float32",
    } | options
    return build_engine(tiny(kind)[0], EngineConfig(**options))


def request(request_id: str, prompt_ids: list[int], eos_ids: tuple[int, ...] = (), **params) -> Request:
    """A request without text."""
    sampling = SamplingParams(**({"temperature": 0.0} | params))
    sequences = [
        Sequence(request_id, prompt_ids, sampling, index=i, seed=(sampling.seed or 0) + i, eos_ids=eos_ids)
        for i in range(sampling.n)
    ]
    return Request(request_id, None, sequences, None)


def run(an_engine, requests: list[Request], arrivals: list[int] | None = None, max_steps: int = 5000) -> None:
    """Add request i at step arrivals[i] (all at once by default) and step until everything has ended."""
    arrivals = arrivals or [0] * len(requests)
    waiting = sorted(zip(arrivals, range(len(requests)), strict=True))
    for step in range(max_steps):
        while waiting and waiting[0][0] <= step:
            an_engine.add(requests[waiting.pop(0)[1]])
        an_engine.step()
        if not waiting and not an_engine.has_unfinished:
            return
    raise AssertionError(f"not finished after {max_steps} steps")


@functools.cache
def greedy(kind: str, prompt_ids: tuple[int, ...], num: int) -> tuple[tuple[int, ...], float]:
    """The oracle's greedy continuation of a prompt, and the smallest margin between its two best logits."""
    _, config, tensors = tiny(kind)
    ids, margin = list(prompt_ids), np.inf
    for _ in range(num):
        logits = transformer.logits(config, tensors, ids)[-1]
        second, best = np.sort(logits)[-2:]
        margin = min(margin, best - second)
        ids.append(int(np.argmax(logits)))
    return tuple(ids[len(prompt_ids) :]), margin
