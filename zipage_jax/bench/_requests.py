"""Workloads: what to run, as prompt and output lengths. Seeded, so that every engine gets the same.

The shapes of the paper's workloads (arXiv 2603.08743, sec. 5.1) are drawn from distributions; a JSONL file gives exact ones.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens, one entry a request."""

    name: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]

    @property
    def num_requests(self) -> int:
        return len(self.prompt_lens)

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids, one list a request."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab_size, n).tolist() for n in self.prompt_lens]


def _lognormal(rng: np.random.Generator, mean: float, sigma: float, size: int, least: int, most: int) -> np.ndarray:
    """Integers of lognormal law with the given mean, clipped to [least, most]."""
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, size), least, most).astype(int)


def _w(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Workload W: 128-token prompts, outputs lognormal with mean 4,035 and maximum 8,192."""
    return np.full(num, 128), _lognormal(np.random.default_rng(0), 4096, 0.5, num, 256, 8192)


def _amc(num: int) -> tuple[np.ndarray, np.ndarray]:
    """AMC 23: short questions, outputs of 8k tokens on average, 16,384 at most."""
    rng = np.random.default_rng(1)
    return _lognormal(rng, 130, 0.4, num, 40, 512), _lognormal(rng, 7971, 0.6, num, 512, 16384)


def _mixture(num: int) -> tuple[np.ndarray, np.ndarray]:
    """AMC 23 and GSM8K, 40 to 1,319: GSM8K answers without reasoning, in about 200 tokens."""
    rng = np.random.default_rng(2)
    long = rng.random(num) < 40 / 1359
    prompts = np.where(long, _lognormal(rng, 130, 0.4, num, 40, 512), _lognormal(rng, 110, 0.3, num, 40, 400))
    outputs = np.where(long, _lognormal(rng, 7971, 0.6, num, 512, 16384), _lognormal(rng, 200, 0.5, num, 32, 1024))
    return prompts, outputs


def _longbench(num: int) -> tuple[np.ndarray, np.ndarray]:
    """LongBench MultiFieldQA-en: contexts of 7k tokens, outputs of about 900 tokens."""
    rng = np.random.default_rng(3)
    return _lognormal(rng, 7000, 0.5, num, 1024, 15000), _lognormal(rng, 900, 0.7, num, 64, 4096)


SHAPES = {"W": (_w, 192), "amc": (_amc, 1280), "mixture": (_mixture, 5436), "longbench": (_longbench, 600)}
"""Name -> (lengths for a number of requests, the workload's own number)."""


def named_workload(name: str, num_requests: int | None = None) -> Workload:
    """A built-in workload, or that of a JSONL file: {"prompt_len": …, "output_len": …} a line.

    Raises:
        ValueError: an unknown name, or a line of the file that lacks a length, naming the line.
    """
    if name in SHAPES:
        lengths, default = SHAPES[name]
        prompts, outputs = lengths(num_requests or default)
        return Workload(name, tuple(int(n) for n in prompts), tuple(int(n) for n in outputs))
    path = Path(name)
    if not path.exists():
        raise ValueError(f"workload {name!r} is neither one of {sorted(SHAPES)} nor a file")
    pairs = [_parse(line, f"{path}:{i}") for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    pairs = pairs[:num_requests]
    if not pairs:
        raise ValueError(f"{path} holds no request; write one JSON object a line")
    return Workload(path.stem, tuple(p for p, _ in pairs), tuple(o for _, o in pairs))


def fixed_workload(num_requests: int, input_len: int, output_len: int) -> Workload:
    """Every request alike."""
    return Workload(f"{input_len}x{output_len}", (input_len,) * num_requests, (output_len,) * num_requests)


def _parse(line: str, where: str) -> tuple[int, int]:
    try:
        record = json.loads(line)
        prompt, output = record["prompt_len"], record["output_len"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: needs prompt_len and output_len ({type(error).__name__}: {error})") from None
    for name, value in (("prompt_len", prompt), ("output_len", output)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: {name}={value!r} must be an integer of at least 1")
    return prompt, output
