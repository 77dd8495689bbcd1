"""What a throughput run asks for: prompts and output lengths. Seeded, so that every engine gets the same.

Workload W has lengths of its own; the paper's workloads (arXiv 2603.08743, sec. 5.1) are drawn from their distributions, with the
prompts that their samples share; a JSONL file gives exact lengths.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zipage_jax.bench._workloads import WORKLOADS, draw_workload

W_REQUESTS = 192
NAMES = ("W", *WORKLOADS)


@dataclass(frozen=True)
class Workload:
    """One entry a request. `shared` holds prompts that requests have in common; None draws random ones of `prompt_lens`."""

    name: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.prompt_lens)

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Token ids below `vocab_size`, one list a request."""
        if self.shared is not None:
            return [[token % vocab_size for token in prompt] for prompt in self.shared]
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab_size, n).tolist() for n in self.prompt_lens]


def _w(num: int) -> Workload:
    """Workload W: 128-token prompts, outputs lognormal with mean 4,035 and maximum 8,192."""
    lens = np.random.default_rng(0).lognormal(np.log(4096) - 0.125, 0.5, num)
    return Workload("W", (128,) * num, tuple(np.clip(lens, 256, 8192).astype(int).tolist()))


def named_workload(name: str, num_requests: int | None = None) -> Workload:
    """A built-in workload, or that of a JSONL file: {"prompt_len": …, "output_len": …} a line.

    Raises:
        ValueError: an unknown name, or a line of the file that lacks a length, naming the line.
    """
    if name == "W":
        return _w(num_requests or W_REQUESTS)
    if name in WORKLOADS:
        items = draw_workload(name, seed=0)[:num_requests]
        prompts = tuple(item.prompt for item in items)
        return Workload(name, tuple(map(len, prompts)), tuple(item.output_len for item in items), prompts)
    path = Path(name)
    if not path.exists():
        raise ValueError(f"workload {name!r} is neither one of {list(NAMES)} nor a file")
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
