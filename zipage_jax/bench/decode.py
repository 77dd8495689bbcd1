"""`python -m zipage_jax.bench decode`: milliseconds of a decode step, alone, beside the floor of its bytes.

Every row holds `entries` entries and is drawn with temperature 0.6. Steps are enqueued without waiting, as the engine does; the
median of several blocks of them is reported, then, from a profiler trace, the kernels that take longest. The last line is one
JSON object.
"""

import json
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.table import Table

from zipage_jax.bench._roofline import Roofline
from zipage_jax.bench._trace import device_time
from zipage_jax.llm import LLM
from zipage_jax.plan import Plan
from zipage_jax.request import SamplingParams, Sequence
from zipage_jax.runner import Runner

BLOCKS = 5


@dataclass(frozen=True)
class Arguments:
    """Time of one decode step with random weights.

    Attributes:
        model: a named shape.
        rows: rows of the step; several are measured one after the other.
        entries: entries that every row reads.
        steps: steps of one block.
        kernels: kernels of the trace that are listed; 0 makes no trace.
    """

    model: str = "qwen3-8b"
    rows: Annotated[tuple[int, ...], tyro.conf.arg(metavar="ROWS...")] = (128, 64, 16)
    entries: int = 1150
    page_size: int = 256
    dtype: str = "auto"
    steps: int = 30
    kernels: int = 0


def main(argv: list[str]) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m zipage_jax.bench decode")
    if not args.rows or min(args.rows) < 1 or args.entries < 1 or args.steps < 1:
        raise ValueError(f"rows={args.rows}, entries={args.entries} and steps={args.steps} must be at least 1")
    records = measure(args)
    table = Table("rows", "ms", "floor ms", "share")
    for record in records:
        floor, share = record["floor_ms"], record["floor_share"]
        cells = ("", "") if floor is None else (f"{floor:.3f}", f"{share:.3f}")
        table.add_row(str(record["rows"]), f"{record['ms']:.3f}", *cells)
        for name, us in record["kernels_us"].items():
            table.add_row("", f"{us / 1e3:.3f}", "", name)
    Console(width=140).print(table)
    print(json.dumps({**vars(args), "device": jax.devices()[0].device_kind, "jax": jax.__version__, "cases": records}))


def measure(args: Arguments) -> list[dict]:
    """One record for each number of rows."""
    pages = -(-args.entries // args.page_size)
    most = max(args.rows)
    options = {
        "page_size": args.page_size,
        "dtype": args.dtype,
        "max_num_seqs": most,
        "num_pages": 1 + most * pages,
        "max_model_len": pages * args.page_size,
        "max_num_batched_tokens": args.page_size,
    }
    with LLM(args.model, random_weights=True, **options) as llm:
        runner = llm.engine.runner
        itemsize = runner.cache.k_pages.dtype.itemsize
        roofline = Roofline.of(llm.model_config, runner.params, itemsize, jax.devices()[0])
        return [measure_rows(runner, args, rows, pages, roofline) for rows in args.rows]


def measure_rows(runner: Runner, args: Arguments, rows: int, pages: int, roofline: Roofline | None) -> dict:
    """Median seconds of a step of `rows` rows, and its kernels."""
    plan = Plan(decode=tuple(resident(row, pages, args.entries) for row in range(rows)))

    def block() -> float:
        start = time.perf_counter()
        for _ in range(args.steps):
            result = runner.dispatch(plan)
        result.fetch()
        return (time.perf_counter() - start) / args.steps

    block()
    ms = 1e3 * statistics.median(block() for _ in range(BLOCKS))
    floor = None if roofline is None else 1e3 * roofline.decode_s(rows, rows * args.entries)
    kernels: dict[str, float] = {}
    if args.kernels:
        with device_time() as traced:
            block()
        longest = sorted(traced.by_kernel_s.items(), key=lambda item: -item[1])[: args.kernels]
        kernels = {name[:90]: 1e6 * seconds / args.steps for name, seconds in longest}
    share = None if floor is None else floor / ms
    return {"rows": rows, "ms": ms, "floor_ms": floor, "floor_share": share, "kernels_us": kernels}


def resident(row: int, pages: int, entries: int) -> Sequence:
    """A request in the middle of its output, with pages of its own: what the scheduler would plan."""
    seq = Sequence(str(row), [1], SamplingParams(temperature=0.6, max_tokens=entries), seed=row)
    seq.seat, seq.cache_len, seq.num_tokens = row, entries, entries
    seq.page_ids = list(range(1 + row * pages, 1 + (row + 1) * pages))
    return seq
