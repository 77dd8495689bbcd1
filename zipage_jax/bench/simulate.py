"""The real scheduler on the paper's workloads against a cost model: curves and ablations without a model or a device.

Replays the workloads for Zipage, for Zipage without asynchronous compression, prefix cache or hybrid scheduling, and for full
KV, and reports throughput, time per token and how many requests ran. Absolute times are the cost model's; what is compared is
scheduling. Source of the comparisons: arXiv 2603.08743, Fig. 5, 6 and 19–25.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from zipage_jax.bench._workloads import DEVICES, WORKLOADS, Costs, Item, draw_workload
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.memory_plan import plan_memory
from zipage_jax.plan import Plan
from zipage_jax.request import SamplingParams, Sequence
from zipage_jax.scheduler import Scheduler

STOP_ID = 1
NUM_LAYERS = 36

VARIANTS: dict[str, dict] = {
    "zipage": {},
    "no_async": {"async_compression": False},
    "no_prefix": {"enable_prefix_caching": False},
    "no_hybrid": {"scheduling": "constrained"},
    "full_kv": {"compression": None},
}


@dataclass(frozen=True)
class Options:
    """What to replay. `fraction` < 1 draws fewer problems; `plot` is a file for the curves (needs matplotlib)."""

    workload: Literal["all", "amc", "mixture", "longbench"] = "all"
    variants: tuple[str, ...] = tuple(VARIANTS)
    device: Literal["a100", "h200"] = "a100"
    budget_pages: int = 8
    max_num_seqs: int = 1_280
    max_rows: int = 16
    fraction: float = 1.0
    seed: int = 0
    plot: Path | None = None


@dataclass
class Curves:
    """One value a step: seconds since the start, requests, share of the pages, tokens."""

    time_s: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    occupancy: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Simulation:
    """One variant on one workload. Time advances by what the cost model says of each plan."""

    def __init__(self, items: Iterable[Item], variant: str, options: Options):
        self.costs: Costs = DEVICES[options.device]
        config = EngineConfig(
            max_num_seqs=options.max_num_seqs,
            compression=CompressionConfig(budget_pages=options.budget_pages, max_rows=options.max_rows),
        )
        config = dataclasses.replace(config, **VARIANTS[variant])
        compression = config.compression
        memory = plan_memory(
            self.costs.avail_bytes,
            page_bytes=self.costs.page_bytes,
            slot_bytes=self.costs.slot_bytes if compression else 0,
            max_pages=compression.max_pages if compression else None,
            max_num_seqs=config.max_num_seqs,
        )
        self.scheduler = Scheduler(
            config,
            num_pages=memory.num_pages,
            num_slots=memory.num_slots,
            num_layers=NUM_LAYERS,
            max_model_len=40_960,
        )
        self.num_slots = memory.num_slots
        self.output_len: dict[Sequence, int] = {}
        self.first_s: dict[Sequence, float] = {}
        self.end_s: dict[Sequence, float] = {}
        self.curves = Curves()
        for number, item in enumerate(items):
            params = SamplingParams(max_tokens=item.max_tokens, stop_token_ids=(STOP_ID,))
            seq = Sequence(str(number), item.prompt, params)
            self.output_len[seq] = item.output_len
            self.scheduler.add(seq)

    def step_ms(self, plan: Plan) -> float:
        """What a step takes: its parts run one after the other, or compression beside the rest."""
        c, compress, total = self.costs, 0.0, 0.0
        if plan.compress:
            start, stop = plan.compress[0].layers
            compress = (stop - start) * (c.slice_ms + (len(plan.compress) - 1) * c.slice_row_ms)
        if plan.prefill:
            total += c.prefill_ms + c.prefill_token_ms * sum(chunk.length for chunk in plan.prefill)
        if plan.decode:
            entries = sum(seq.cache_len for seq in plan.decode)
            total += c.decode_ms + c.decode_row_ms * len(plan.decode) + c.entry_us * entries / 1e3
        if c.overlaps and self.scheduler.config.async_compression:
            return max(compress, total)
        return compress + total

    def run(self) -> dict[str, float]:
        """Replay to the end; returns what the paper's figures compare."""
        scheduler, curves = self.scheduler, self.curves
        now_s, pending = 0.0, None
        while scheduler.has_unfinished() or pending:
            plan = scheduler.plan()
            tokens = self._tokens(plan)
            if pending is not None:
                for seq in scheduler.commit(*pending):
                    self.first_s.setdefault(seq, now_s)
                    if seq.finished:
                        self.end_s[seq] = now_s
            now_s += self.step_ms(plan) / 1e3
            curves.time_s.append(now_s)
            curves.running.append(scheduler.num_running)
            curves.waiting.append(scheduler.num_waiting)
            curves.occupancy.append(scheduler.num_used_pages / scheduler.pool.num_usable)
            curves.tokens.append(len(tokens))
            pending = None if plan.empty else (plan, tokens)
        return self._result(now_s)

    def _tokens(self, plan: Plan) -> list[int]:
        rows = [chunk.seq for chunk in plan.prefill if chunk.samples]
        rows += plan.decode
        return [
            STOP_ID if seq.num_tokens - seq.num_prompt >= self.output_len[seq] else 3 + seq.num_tokens for seq in rows
        ]

    def _result(self, seconds: float) -> dict[str, float]:
        counters, curves = self.scheduler.counters, self.curves
        num_tokens = sum(len(seq.output_ids) for seq in self.end_s)
        weights = [b - a for a, b in zip([0.0, *curves.time_s], curves.time_s, strict=False)]
        per_token = [(self.end_s[seq] - self.first_s[seq]) / len(seq.output_ids) for seq in self.end_s]

        def mean(values: list[float]) -> float:
            return sum(value * weight for value, weight in zip(values, weights, strict=True)) / seconds

        return {
            "tokens_per_s": round(num_tokens / seconds, 1),
            "tpot_ms": round(1e3 * sum(per_token) / len(per_token), 2),
            "seconds": round(seconds, 1),
            "steps": len(curves.time_s),
            "mean_running": round(mean(curves.running), 1),
            "peak_running": max(curves.running),
            "mean_occupancy": round(mean(curves.occupancy), 4),
            "hit_rate": round(counters.hit_rate, 4),
            "compressions": counters.compressions,
            "preemptions": counters.preemptions,
            "query_slots": self.num_slots,
        }


def run(options: Options) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, dict[str, Curves]]]:
    """Results and curves, by workload and variant."""
    results, curves = {}, {}
    for workload in WORKLOADS if options.workload == "all" else (options.workload,):
        items = draw_workload(workload, options.seed, options.fraction)
        results[workload], curves[workload] = {}, {}
        for variant in options.variants:
            simulation = Simulation(items, variant, options)
            results[workload][variant] = simulation.run()
            curves[workload][variant] = simulation.curves
            print(workload, variant, json.dumps(results[workload][variant]), flush=True)
    return results, curves


def main(argv: list[str]) -> None:
    options = tyro.cli(Options, args=argv, prog="python -m zipage_jax.bench simulate")
    unknown = sorted(set(options.variants) - set(VARIANTS))
    if unknown:
        raise ValueError(f"unknown variant(s) {unknown}; known: {list(VARIANTS)}")
    results, curves = run(options)
    if options.plot is not None:
        from zipage_jax.plots import draw_curves

        draw_curves(curves).savefig(options.plot, dpi=120)
    print(json.dumps(results))
