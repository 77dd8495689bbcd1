"""The paper's three throughput workloads as distributions of prompt and output lengths, and a cost model of a step's parts.

Lengths are drawn, not taken from the data sets: what matters to a scheduler is how long they are and what they share. Sizes and
limits are the paper's (arXiv 2603.08743, sec. 5.1 and appendix B); means are fitted to its reported output lengths. Not a
benchmark of its own: `simulate` uses it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SYSTEM_LEN = 24
"""Tokens of the chat template and the system prompt that all prompts of a workload share."""


@dataclass(frozen=True)
class Item:
    """One sample to generate: its problem's prompt, and how many tokens it generates."""

    prompt: tuple[int, ...]
    output_len: int
    max_tokens: int


@dataclass(frozen=True)
class Problems:
    """`num` problems of `samples` samples. Lengths are lognormal: medians in tokens, spread as sigma of the logarithm.

    `problem_sigma` spreads the median output length over problems, `sample_sigma` the samples around their problem's.
    """

    num: int
    samples: int
    prompt_median: float
    prompt_sigma: float
    prompt_limits: tuple[int, int]
    output_median: float
    problem_sigma: float
    sample_sigma: float
    max_tokens: int

    def draw(self, rng: random.Random, fraction: float) -> list[Item]:
        items = []
        system = tuple(range(2, 2 + SYSTEM_LEN))
        for _ in range(max(1, round(self.num * fraction))):
            shortest, longest = self.prompt_limits
            length = int(self.prompt_median * math.exp(rng.gauss(0, self.prompt_sigma)))
            own = rng.choices(range(100, 150_000), k=min(max(length, shortest), longest))
            median = self.output_median * math.exp(rng.gauss(0, self.problem_sigma))
            for _ in range(self.samples):
                output = int(median * math.exp(rng.gauss(0, self.sample_sigma)))
                items.append(Item((*system, *own), min(max(output, 1), self.max_tokens), self.max_tokens))
        return items


def amc(samples: int) -> Problems:
    """AMC 23 in reasoning mode: short prompts, outputs of 9,100 tokens on average, many at the limit."""
    return Problems(40, samples, 110, 0.4, (40, 400), 7_600, 0.55, 0.35, 16_384)


WORKLOADS = {
    "amc": (amc(32),),
    # GSM8K in non-reasoning mode: short answers.
    "mixture": (amc(4), Problems(1_319, 4, 75, 0.35, (30, 250), 230, 0.35, 0.25, 16_384)),
    # LongBench MultiFieldQA-en: long prompts, 400 tokens on average, a few run away.
    "longbench": (Problems(150, 4, 6_600, 0.5, (1_500, 16_000), 220, 0.7, 0.8, 4_096),),
}


def draw_workload(name: str, seed: int, fraction: float = 1.0) -> list[Item]:
    """The samples of a workload in the order in which they are queued; the mixture is shuffled."""
    rng = random.Random(seed)
    items = [item for problems in WORKLOADS[name] for item in problems.draw(rng, fraction)]
    if len(WORKLOADS[name]) > 1:
        rng.shuffle(items)
    return items


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step's parts on one device; bandwidth-bound decode, compute-bound prefill, latency-bound compression.

    Attributes:
        decode_ms: a decode step without cache (weights, launches).
        decode_row_ms: more for each row.
        entry_us: reading one entry of all layers.
        prefill_ms, prefill_token_ms: a prefill step, and each of its tokens.
        slice_ms, slice_row_ms: compressing one layer of one request alone, and each further one (per layer).
        overlaps: asynchronous slices run beside the rest of the step (a second stream, as in the paper's engine).
        page_bytes, slot_bytes, avail_bytes: what the memory plan takes.
    """

    decode_ms: float
    decode_row_ms: float
    entry_us: float
    prefill_ms: float
    prefill_token_ms: float
    slice_ms: float
    slice_row_ms: float
    overlaps: bool
    page_bytes: int
    slot_bytes: int
    avail_bytes: int


_QWEN3_8B = {"page_bytes": 36 * 256 * 8 * (2 * 128 * 2 + 4), "slot_bytes": 36 * 16 * 32 * 128 * 2}

DEVICES = {
    # Qwen3-8B, eager, on an A100 80 GB: the paper's Fig. 4, 7 and 16.
    "a100": Costs(46.0, 0.03, 0.09, 48.0, 0.105, 0.6, 0.03, True, avail_bytes=52 * 2**30, **_QWEN3_8B),
    # The same on an H200 141 GB: 16.4 GB of weights and 144 KiB an entry at 3.6–4.2 TB/s, 500 TFLOP/s.
    "h200": Costs(4.4, 0.002, 0.041, 5.0, 0.033, 0.03, 0.008, False, avail_bytes=105 * 2**30, **_QWEN3_8B),
}
