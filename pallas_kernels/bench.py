"""`python -m pallas_kernels.bench [op ...] [--tune] [--cases TEXT] [--json PATH]`: speed beside what the device allows.

The ceilings (reading, copying, multiplying) are measured in the same run. Inputs are random and larger than the L2; every
result is compared with a float32 reference before it is timed; a failure is reported and the rest go on. JSON objects, one a
line, go to standard output or PATH; a table follows on standard error.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys

import jax

from pallas_kernels.bench_timing import measure_ceilings, run_case

OPS = {
    "paged_attention": "bench_attention",
    "prefill_attention": "bench_attention",
    "write_pages": "bench_attention",
    "window_scores": "bench_compress",
    "key_redundancy": "bench_compress",
    "select_entries": "bench_compress",
    "compact_pages": "bench_compress",
}
"""Op -> the module of this package that makes its cases. To add an op: its line here and a `cases(op, ceilings, tune)` there."""


def table(records: list[dict]) -> str:
    lines = [f"{'op':18} {'case':24} {'implementation':14} {'us':>9} {'floor':>8} {'share':>6} {'goal':>5} ok  config"]
    for r in records:
        numbers = f"{r['us']:9.1f} {r['floor_us']:8.1f} {r['floor_share']:6.3f}" if "us" in r else f"{'failed':>25}"
        goal = f"{r['must_reach']:.2f}" if "must_reach" in r else ""
        ok = "yes" if r["ok"] else "NO"
        lines.append(f"{r['op']:18} {r['case']:24} {r['implementation']:14} {numbers} {goal:>5} {ok:3} {r['config']}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(OPS)}; all of them if none is named")
    parser.add_argument("--tune", action="store_true", help="time every configuration that an op lists")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--json", help="write the JSON lines here instead of to standard output")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.ops) - set(OPS)):
        parser.error(f"unknown op(s) {unknown}; known: {sorted(OPS)}")
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU; the default backend is {jax.default_backend()!r}")

    ceilings = measure_ceilings()
    records: list[dict] = []
    with open(args.json, "w") if args.json else contextlib.nullcontext(sys.stdout) as out:

        def emit(record: dict) -> None:
            if "op" in record:
                records.append(record)
            print(json.dumps(record), file=out, flush=True)

        emit({"ceilings": dataclasses.asdict(ceilings), "device": jax.devices()[0].device_kind, "jax": jax.__version__})
        for op in args.ops or OPS:
            module = importlib.import_module(f"pallas_kernels.{OPS[op]}")
            for name, make in module.cases(op, ceilings, args.tune):
                if args.cases in name:
                    run_case(make(), emit)
    print(f"{ceilings}\n{table(records)}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
