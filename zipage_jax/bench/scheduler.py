"""Time of the host side of a step, without a model: `plan` and `commit` with many running and many waiting requests.

Random tokens stand in for the device, one step late as in the engine. A request that ends is replaced at the back of the
queue, so the load stays the same however long it runs; the replacement is not timed.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import time
from array import array
from dataclasses import dataclass

import tyro

from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.request import SamplingParams, Sequence
from zipage_jax.scheduler import Scheduler

STOP_ID = 1


@dataclass(frozen=True)
class Options:
    """Load and length of the benchmark. Lengths are drawn uniformly; every fourth request begins with a shared page."""

    running: int = 512
    waiting: int = 10_000
    steps: int = 20_000
    warmup: int = 5_000
    budget_pages: int = 8
    prompt_len: tuple[int, int] = (50, 600)
    output_len: tuple[int, int] = (200, 8_000)
    num_pages: int | None = None
    """None: N_max pages for each running request."""
    max_rows: int = 16
    prefix_caching: bool = True
    async_compression: bool = True
    seed: int = 0


class Load:
    """A scheduler under `options`, and the requests that keep it busy."""

    def __init__(self, options: Options):
        self.options, self.random = options, random.Random(options.seed)
        num_pages = options.num_pages or options.running * (options.budget_pages + 1) + 1
        config = EngineConfig(
            max_num_seqs=options.running,
            enable_prefix_caching=options.prefix_caching,
            async_compression=options.async_compression,
            compression=CompressionConfig(budget_pages=options.budget_pages, max_rows=options.max_rows),
        )
        self.scheduler = Scheduler(
            config, num_pages=num_pages, num_slots=options.running, num_layers=36, max_model_len=32_768
        )
        self.shared = [self.random.randrange(2, 150_000) for _ in range(256)]
        self.num_added = 0
        for _ in range(options.running + options.waiting):
            self.add()

    def add(self) -> None:
        draw = self.random.randint
        prompt = [self.num_added, *(draw(2, 150_000) for _ in range(draw(*self.options.prompt_len)))]
        if self.num_added % 4 == 0:
            prompt = self.shared + prompt
        params = SamplingParams(max_tokens=draw(*self.options.output_len))
        self.scheduler.add(Sequence(str(self.num_added), prompt, params, eos_ids=(STOP_ID,)))
        self.num_added += 1

    def tokens(self, num: int) -> list[int]:
        return [self.random.randrange(1, 20_000) for _ in range(num)]


def run(options: Options) -> dict[str, float]:
    """Times of plan + commit in milliseconds, and what happened meanwhile. CPU times do not count waiting for a busy core."""
    load = Load(options)
    scheduler, pending, running, memory = load.scheduler, None, 0, 0
    # Made beforehand, so that growth is the scheduler's.
    times = array("d", bytes(8 * (options.warmup + options.steps)))
    cpu_times = array("d", times)
    gc.collect()
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            running = 0
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ended = sum(scheduler.counters.finished.values())
        start, cpu_start = time.perf_counter(), time.thread_time()
        plan = scheduler.plan()
        times[step], cpu_times[step] = time.perf_counter() - start, time.thread_time() - cpu_start
        tokens = load.tokens(len(plan.decode) + sum(chunk.samples for chunk in plan.prefill))
        start, cpu_start = time.perf_counter(), time.thread_time()
        if pending is not None:
            scheduler.commit(*pending)
        times[step] += time.perf_counter() - start
        cpu_times[step] += time.thread_time() - cpu_start
        pending = (plan, tokens)
        running += scheduler.num_running
        for _ in range(sum(scheduler.counters.finished.values()) - ended):
            load.add()
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    times, cpu_times = sorted(times[options.warmup :]), sorted(cpu_times[options.warmup :])
    counters = scheduler.counters
    return {
        "p50_ms": round(1e3 * times[len(times) // 2], 4),
        "p99_ms": round(1e3 * times[len(times) * 99 // 100], 4),
        "max_ms": round(1e3 * times[-1], 4),
        "cpu_p50_ms": round(1e3 * cpu_times[len(times) // 2], 4),
        "cpu_p99_ms": round(1e3 * cpu_times[len(times) * 99 // 100], 4),
        "steps": options.steps,
        "mean_running": round(running / options.steps, 1),
        "waiting": scheduler.num_waiting,
        "compressions": counters.compressions,
        "preemptions": counters.preemptions,
        "finished": sum(counters.finished.values()),
        "growth_mib": round(growth, 1),
    }


def main(argv: list[str]) -> None:
    print(json.dumps(run(tyro.cli(Options, args=argv, prog="python -m zipage_jax.bench scheduler"))))
