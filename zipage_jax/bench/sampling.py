"""`python -m zipage_jax.bench sampling`: microseconds of drawing one token a row, and whether the host waits for the device.

A call's time is that of many calls in a queue, over two batches of logits in turn (each several times the L2 cache).
`busy us` sums the kernels of a profiler trace, in which XLA records no CUDA graphs. `host us` is how long a dispatch takes
behind a device that is busy for `BLOCKER_MS`: anything near that means that the host waits.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from zipage_jax.bench._roofline import READ_BYTES_PER_S
from zipage_jax.bench._trace import device_time
from zipage_jax.sampling import SamplingBatch, apply_penalties, sample, token_logprobs

DEFAULTS = {
    "temperature": 0.6,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.02}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
CASES = {
    # name: (logits, parameters, log probabilities), "zipf" is like a language model's, "flat" white noise
    "greedy": ("zipf", {"temperature": 0.0}, 0),
    "temperature": ("zipf", {}, 0),
    "min_p": ("zipf", {"min_p": 0.05}, 0),
    "top_k 20": ("zipf", {"top_k": 20}, 0),
    "top_k 1000": ("zipf", {"top_k": 1000}, 0),
    "top_p 0.95": ("zipf", {"top_p": 0.95}, 0),
    "top_p 0.5": ("zipf", {"top_p": 0.5}, 0),
    "top_p 0.9 flat": ("flat", {"top_p": 0.9, "temperature": 1.0}, 0),
    "top_p 0.1 flat": ("flat", {"top_p": 0.1, "temperature": 1.0}, 0),
    "filters": ("zipf", FILTERS, 0),
    "penalties": ("zipf", PENALTIES, 0),
    "everything": ("zipf", FILTERS | PENALTIES, 0),
    "20 logprobs": ("zipf", {}, 20),
}
BLOCKER_MS = 20


def main(argv: list[str]) -> None:
    """Measure the cases; a table, then one JSON list in the last line."""
    parser = argparse.ArgumentParser(prog="python -m zipage_jax.bench sampling", description=__doc__.splitlines()[0])
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--rows", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--vocab", type=int, default=151_936 if on_gpu else 32_768)
    parser.add_argument("--repeats", type=int, default=200 if on_gpu else 5)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--kernels", type=int, default=0, help="show a case's N longest kernels (GPU only)")
    arguments = parser.parse_args(argv)
    device = jax.devices()[0]
    bandwidth = READ_BYTES_PER_S.get(device.device_kind)
    floor_us = 4e6 * arguments.rows * arguments.vocab / bandwidth if bandwidth else None
    logits = {kind: _logits(kind, arguments.rows, arguments.vocab) for kind in ("zipf", "flat")}
    records = []
    for name in arguments.cases:
        kind, params, _ = CASES[name]
        record = {"op": "sampling", "case": name, "rows": arguments.rows, "vocab": arguments.vocab}
        record |= {"implementation": "xla", "device": device.device_kind}
        record |= _measure(name, logits[kind], params, arguments.repeats, on_gpu)
        record |= {"floor_us": floor_us, "floor_share": floor_us / record["us"] if floor_us else None}
        records.append(record)
        if arguments.kernels:
            _show_kernels(name, record, arguments.kernels)
        record.pop("kernels_us")
    _show(records)
    print(json.dumps(records))


def _logits(kind: str, rows: int, vocab: int) -> list[jax.Array]:
    """Two batches. "zipf": the logit of rank r is about −s · log r, with s from 1.2 to 3 over the rows."""
    slopes = jnp.linspace(1.2, 3.0, rows)[:, None]

    @functools.partial(jax.jit, static_argnums=0)
    def draw(seed):
        key = jax.random.key(seed)
        if kind == "flat":
            return jax.random.normal(key, (rows, vocab))
        return slopes * jax.random.exponential(key, (rows, vocab))

    return [draw(seed) for seed in (0, 1)]


def _measure(name: str, logits: list[jax.Array], params: dict, repeats: int, on_gpu: bool) -> dict:
    rows, vocab = logits[0].shape
    num_logprobs = CASES[name][2]
    penalised = bool(params.keys() & PENALTIES.keys())
    filters = bool(params.keys() & FILTERS.keys())
    integers = ("top_k",)
    values = {
        key: jnp.full(rows, value, jnp.int32 if key in integers else jnp.float32)
        for key, value in (DEFAULTS | params).items()
    }
    seats = None
    if penalised:
        used = jax.random.bernoulli(jax.random.key(2), 0.01, (rows + 1, vocab))
        seats = (used.astype(jnp.int32), used, jnp.zeros((rows + 1, vocab)))

    @jax.jit
    def step(logits, seats, values, position):
        batch = SamplingBatch(seed=jnp.arange(rows, dtype=jnp.int32), position=position, **values)
        seat = batch.seed
        shaped = logits if seats is None else apply_penalties(logits, *(array[seat] for array in seats), batch)
        tokens = sample(shaped, batch, filters=filters)
        return (tokens, token_logprobs(logits, tokens, num_logprobs)) if num_logprobs else tokens

    positions = [jnp.full(rows, i, jnp.int32) for i in range(repeats)]

    def queue():
        for i in range(repeats):
            out = step(logits[i % 2], seats, values, positions[i])
        jax.block_until_ready(out)

    start = time.perf_counter()
    jax.block_until_ready(step(logits[0], seats, values, positions[0]))
    compile_s = time.perf_counter() - start
    times = []
    for _ in range(5 if on_gpu else 1):
        start = time.perf_counter()
        queue()
        times.append((time.perf_counter() - start) / repeats)
    record = {"us": 1e6 * statistics.median(times), "compile_s": compile_s, "busy_us": None, "host_us": None}
    record["kernels_us"] = {}
    if on_gpu:
        with device_time() as traced:
            queue()
        record["busy_us"] = 1e6 * traced.busy_s / repeats
        record["kernels_us"] = {k: 1e6 * v / repeats for k, v in traced.by_kernel_s.items()}
        record["host_us"] = _host_us(lambda: step(logits[0], seats, values, positions[0]))
    return record


def _host_us(dispatch) -> float:
    """Median time of `dispatch` while the device works on something else."""
    matrix = jnp.ones((8192, 8192), jnp.bfloat16)

    @jax.jit
    def block(x):
        return jax.lax.fori_loop(0, 12 * BLOCKER_MS // 20, lambda _, y: (x @ y) * jnp.bfloat16(1e-4), x)

    jax.block_until_ready(block(matrix))
    times = []
    for _ in range(9):
        busy = block(matrix)
        start = time.perf_counter()
        out = dispatch()
        times.append(time.perf_counter() - start)
        jax.block_until_ready((busy, out))
    return 1e6 * statistics.median(times)


def _show_kernels(name: str, record: dict, num: int) -> None:
    longest = sorted(record["kernels_us"].items(), key=lambda item: -item[1])[:num]
    print(name, *(f"{us:8.1f} us  {kernel}" for kernel, us in longest), sep="\n  ")


def _show(records: list[dict]) -> None:
    first = records[0]
    table = Table(title=f"sampling, {first['rows']} rows of {first['vocab']:,} on {first['device']}")
    columns = {
        "us": "us",
        "busy_us": "busy us",
        "host_us": "host us",
        "floor_us": "one read us",
        "compile_s": "compile s",
    }
    for heading in ("case", *columns.values()):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for record in records:
        table.add_row(record["case"], *("" if record[k] is None else f"{record[k]:.1f}" for k in columns))
    Console().print(table)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
