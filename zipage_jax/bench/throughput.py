"""`python -m zipage_jax.bench throughput`: generated tokens per second on a workload, and how far that is from the floor.

Flags and JSON keys follow `vllm bench throughput`. Compilation and warm-up are timed apart. The last line is one JSON object.
"""

import dataclasses
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from zipage_jax.bench._requests import Workload, fixed_workload, named_workload
from zipage_jax.bench._roofline import Roofline
from zipage_jax.bench._series import SeriesWriter
from zipage_jax.bench._trace import DeviceTime, device_time
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.llm import LLM
from zipage_jax.metrics import StepRecord
from zipage_jax.request import SamplingParams


@dataclass(frozen=True)
class Arguments:
    """Throughput of one engine on one workload.

    Attributes:
        model: a model source, or a named shape with `random_weights`.
        workload: "W", "amc", "mixture", "longbench" or a JSONL file of lengths; None makes all requests alike.
        input_len: prompt length when there is no workload.
        output_len: output length when there is no workload.
        num_prompts: requests; None takes the workload's own number.
        budget_pages: pages a request keeps when it compresses; None is full KV.
        kv_bytes: bytes for pages and query slots; None takes what `gpu_memory_utilization` leaves.
        policy: which entries are kept.
        max_seconds: stop after this many seconds and report what was done until then.
        series: write one JSON line a second to this file (running, waiting, occupancy, tok/s, ms per step).
        plot: draw the series into this image file.
        profile: keep a profiler trace of some steps in this folder.
        trace_at: step before which the trace starts.
        trace_steps: steps that are traced, for the shares of the device's time; 0 traces nothing.
        output_json: write the result here too.
    """

    model: str = "qwen3-8b"
    random_weights: bool = True
    workload: str | None = None
    input_len: int = 128
    output_len: int = 1024
    num_prompts: int | None = None
    n: int = 1
    temperature: float = 0.6
    budget_pages: int | None = None
    kv_bytes: float | None = None
    policy: str = "zipage"
    window: int = 16
    layer_stride: int = 8
    max_seconds: float | None = None
    series: Path | None = None
    plot: Path | None = None
    profile: Path | None = None
    trace_at: int = 2000
    trace_steps: int = 0
    output_json: Path | None = None
    engine: tyro.conf.AvoidSubcommands[tyro.conf.OmitArgPrefixes[EngineConfig]] = field(default_factory=EngineConfig)


@dataclass
class Totals:
    """Sums over the steps of a run."""

    steps: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    floor_s: float = 0.0
    wait_s: float = 0.0
    host_s: float = 0.0

    def add(self, record: StepRecord, roofline: Roofline | None) -> None:
        self.steps += 1
        self.decode_steps += bool(record.decode_rows)
        self.decode_rows += record.decode_rows
        self.wait_s += record.wait_s
        self.host_s += record.total_s - record.wait_s
        if roofline is not None:
            self.floor_s += roofline.decode_s(record.decode_rows, record.entries_read)
            self.floor_s += roofline.prefill_s(record.prefill_tokens)


def main(argv: list[str]) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python -m zipage_jax.bench throughput")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        workload = choose_workload(args)
        config = engine_config(args, workload)
    except ValueError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        return 2
    result = run(args, workload, config)
    show(result)
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 0


def choose_workload(args: Arguments) -> Workload:
    if args.workload is not None:
        return named_workload(args.workload, args.num_prompts)
    return fixed_workload(args.num_prompts or 64, args.input_len, args.output_len)


def engine_config(args: Arguments, workload: Workload) -> EngineConfig:
    """The engine's configuration, with room for the workload's longest request."""
    longest = max(p + o for p, o in zip(workload.prompt_lens, workload.output_lens, strict=True))
    changes: dict = {"max_model_len": args.engine.max_model_len or longest}
    if args.kv_bytes is not None:
        changes["kv_cache_bytes"] = int(args.kv_bytes)
    if args.budget_pages is not None:
        changes["compression"] = CompressionConfig(
            budget_pages=args.budget_pages, window=args.window, policy=args.policy, layer_stride=args.layer_stride
        )
    return dataclasses.replace(args.engine, **changes)


def run(args: Arguments, workload: Workload, config: EngineConfig) -> dict:
    """Build the engine, run the workload, return the numbers."""
    start = time.perf_counter()
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    with LLM(args.model, random_weights=args.random_weights, **options) as llm:
        engine = llm.engine
        params = [
            SamplingParams(n=args.n, temperature=args.temperature, ignore_eos=True, max_tokens=length, seed=i)
            for i, length in enumerate(workload.output_lens)
        ]
        prompts = [{"prompt_token_ids": ids} for ids in workload.prompts(llm.model_config.vocab_size)]
        llm.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        startup_s = time.perf_counter() - start
        compiled = engine.runner.programs.num_compiled
        roofline = Roofline.of(
            llm.model_config, engine.runner.params, engine.runner.cache.k_pages.dtype.itemsize, jax.devices()[0]
        )
        totals, series = Totals(), SeriesWriter(args.series, engine.runner.memory.num_pages - 1)

        def sink(record: StepRecord) -> None:
            totals.add(record, roofline)
            series.add(record)

        engine.metrics.sink = sink
        begin = time.perf_counter()
        requests, traced, stopped = drive(llm, prompts, params, args)
        elapsed = time.perf_counter() - begin
        series.close()
        if args.plot is not None:
            series.plot(args.plot)
        result = summary(args, workload, llm, requests, totals, traced, elapsed)
        result |= {
            "startup_s": round(startup_s, 2),
            "executables": engine.runner.programs.num_compiled,
            "compiled_during_run": engine.runner.programs.num_compiled - compiled,
            "stopped_early": stopped,
        }
        llm.forget(requests)
        return result


def drive(llm: LLM, prompts, params, args: Arguments):
    """Run to the end, or `max_seconds`; `trace_steps` steps in the middle are traced. Returns (requests, trace, stopped)."""
    requests = llm.submit(prompts, params)
    engine = llm.engine
    begin = time.perf_counter()
    traced: DeviceTime | None = None
    steps = 0
    while engine.has_unfinished:
        if args.trace_steps and steps == args.trace_at:
            with device_time(args.profile) as traced:
                for _ in range(args.trace_steps):
                    engine.step()
        engine.step()
        steps += 1
        if args.max_seconds is not None and time.perf_counter() - begin > args.max_seconds:
            return requests, traced, True
    return requests, traced, False


def summary(args: Arguments, workload: Workload, llm: LLM, requests, totals: Totals, traced, elapsed: float) -> dict:
    sequences = [seq for request in requests for seq in request.sequences]
    output_tokens = sum(len(seq.output_ids) for seq in sequences)
    prompt_tokens = sum(workload.prompt_lens)
    finished = [seq for seq in sequences if seq.finished]
    tpot = [
        (seq.stats.finished_s - seq.stats.first_token_s) / (len(seq.output_ids) - 1)
        for seq in finished
        if len(seq.output_ids) > 1
    ]
    engine = llm.engine
    compression = engine.scheduler.config.compression
    return {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(finished) / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "output_tokens": output_tokens,
        "mean_tpot_ms": 1e3 * float(np.mean(tpot)) if tpot else None,
        "steps": totals.steps,
        "mean_rows": totals.decode_rows / max(totals.decode_steps, 1),
        "preemptions": sum(seq.stats.num_preemptions for seq in sequences),
        "compressions": sum(seq.stats.num_compressions for seq in sequences),
        "workload": workload.name,
        "model": args.model,
        "budget": None if compression is None else compression.budget_pages * llm.config.page_size,
        "policy": None if compression is None else args.policy,
        "device": jax.devices()[0].device_kind,
        "pages": engine.runner.memory.num_pages,
        "query_slots": engine.runner.memory.num_slots,
        "host_s": totals.host_s,
        "wait_s": totals.wait_s,
        "floor_s": totals.floor_s,
        "roofline_share": totals.floor_s / elapsed if totals.floor_s else None,
        **shares(traced),
    }


def shares(traced: DeviceTime | None) -> dict:
    """Shares of the device's time in the traced steps, by compiled step; None without a trace."""
    names = {"prefill_share": "prefill_step", "decode_share": "decode_step", "compress_share": "compress_step"}
    if traced is None or not traced.span_s:
        return dict.fromkeys([*names, "host_gap_share"])
    found = {key: traced.step_share(step) for key, step in names.items()}
    top = sorted(traced.by_kernel_s.items(), key=lambda item: -item[1])[:12]
    return found | {
        "host_gap_share": traced.idle_share,
        "top_kernels": {name[:80]: round(seconds / traced.span_s, 4) for name, seconds in top},
    }


def show(result: dict) -> None:
    table = Table(show_header=False, box=None)
    for key, value in result.items():
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console(width=160).print(table)
