"""`python -m pallas_kernels.bench_compress [op ...]`: time of the compression ops on one GPU, beside what memory or wgmma allow.

The shapes are Qwen3-8B's: 8 requests of 9 pages in 36 layers make 288 rows. Every implementation and configuration is checked
against the XLA form in the same run; one that fails is reported and the rest go on. Output: one JSON object a line.
"""

import dataclasses
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_timing
from pallas_kernels import compact_pages as compact
from pallas_kernels import window_scores as window
from pallas_kernels.key_redundancy import FlashConfig, LightningConfig, key_redundancy
from pallas_kernels.select_entries import select_entries

READ_BYTES_PER_S, COPY_BYTES_PER_S, FLOPS_PER_S = 4.49e12, 3.35e12, 989e12
"""Measured on an H200, and its tensor cores' nominal rate for dense bfloat16."""
ROWS, PAGES, KV_HEADS, HEADS, PAGE_SIZE, HEAD_DIM, WINDOW = 288, 9, 8, 32, 256, 128, 16
ENTRIES, BUDGET = PAGES * PAGE_SIZE, (PAGES - 1) * PAGE_SIZE
NUM_PAGES = ROWS * (PAGES + 1) + 1
KEY_BYTES = ROWS * PAGES * PAGE_SIZE * KV_HEADS * HEAD_DIM * 2


@dataclass
class Case:
    """An op at one shape: `functions` by (implementation, configuration), each called as f(*inputs)."""

    op: str
    case: str
    floor_us: float
    functions: dict[tuple[str, str], Callable]
    inputs: tuple
    tolerance: float
    in_place: bool = False


def pool(seed: int) -> jax.Array:
    """Random pages with a direction in common, so that some keys pass the redundancy threshold."""

    def make(key):
        noise, common = jax.random.split(key)
        x = jax.random.normal(noise, (NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.bfloat16)
        return x + jax.random.normal(common, (NUM_PAGES, KV_HEADS, 1, HEAD_DIM), jnp.bfloat16)

    return jax.jit(make)(jax.random.key(seed))


def page_table(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(source pages, fresh pages) of every row, random and distinct."""
    ids = np.random.default_rng(seed).permutation(NUM_PAGES - 1)[: ROWS * (PAGES + 1)] + 1
    ids = ids.reshape(ROWS, PAGES + 1).astype(np.int32)
    return ids[:, :PAGES], ids[:, PAGES:]


def variants(function, configs, **options) -> dict[tuple[str, str], Callable]:
    out = {("xla", ""): functools.partial(function, implementation="xla", **options)}
    for config in configs:
        name = " ".join(str(v) for v in dataclasses.astuple(config))
        out["pallas", name] = functools.partial(function, implementation="pallas", config=config, **options)
    return out


def window_scores_case() -> Case:
    ids, _ = page_table()
    queries = jax.random.normal(jax.random.key(1), (ROWS, WINDOW, HEADS, HEAD_DIM), jnp.bfloat16)
    inputs = queries, pool(0), jnp.asarray(ids), jnp.full((ROWS,), ENTRIES, jnp.int32)
    configs = [
        window.Config(),
        window.Config(consumers=3, slots=2),
        window.Config(consumers=2, slots=5, block_k=64),
        window.Config(consumers=1, slots=3, num_programs=264),
    ]
    floor = KEY_BYTES / READ_BYTES_PER_S * 1e6
    return Case("window_scores", "288 x 2304", floor, variants(window.window_scores, configs), inputs, 1e-6)


def redundancy_case(mode: str) -> Case:
    ids, _ = page_table()
    inputs = pool(0), jnp.asarray(ids), jnp.full((ROWS,), ENTRIES, jnp.int32)
    if mode == "lightning":
        configs = [
            LightningConfig(),
            LightningConfig(block_n=64),
            LightningConfig(consumers=2),
            LightningConfig(consumers=2, block_n=256),
            LightningConfig(consumers=1, num_programs=264),
        ]
    else:
        configs = [FlashConfig(), FlashConfig(consumers=2, slots=4), FlashConfig(slots=2)]
    seen = PAGE_SIZE if mode == "lightning" else ENTRIES
    floor = ROWS * ENTRIES * KV_HEADS * seen * HEAD_DIM * 2 / FLOPS_PER_S * 1e6
    return Case("key_redundancy", mode, floor, variants(key_redundancy, configs, mode=mode), inputs, 1e-3)


def select_case(kind: str) -> Case:
    scores = jax.random.normal(jax.random.key(2), (4, ROWS, KV_HEADS, ENTRIES))
    if kind == "ties":
        scores = jnp.round(scores * 4)
    inputs = scores, jnp.full((ROWS,), BUDGET, jnp.int32)

    def four_times(implementation, scores, budget):
        # Four inputs one after the other: one alone would stay in L2.
        one = functools.partial(select_entries, max_budget=BUDGET, implementation=implementation)
        return [one(x, budget) for x in scores]

    floor = 4 * ROWS * KV_HEADS * (ENTRIES + BUDGET) * 4 / READ_BYTES_PER_S * 1e6
    functions = {(name, ""): functools.partial(four_times, name) for name in ("xla", "pallas")}
    return Case("select_entries", f"4 calls, {kind}", floor, functions, inputs, 0)


def compact_case(order: str) -> Case:
    ids, fresh = page_table()
    targets = {"own": ids[:, :-1], "fresh first": np.concatenate([fresh, ids[:, 1:-1]], axis=1), "shifted": ids[:, 1:]}
    scores = jax.random.normal(jax.random.key(3), (ROWS, KV_HEADS, ENTRIES))
    kept = select_entries(scores, jnp.full((ROWS,), BUDGET, jnp.int32), max_budget=BUDGET, implementation="xla")
    inputs = (pool(0), pool(1)), jnp.asarray(ids), kept, jnp.asarray(targets[order])
    configs = [compact.Config(tile=tile) for tile in (64, 32, 16, 128)]
    if order == "shifted":
        configs = [compact.Config(), compact.Config(staging_programs=528, tile=32)]
    floor = 4 * ROWS * KV_HEADS * BUDGET * HEAD_DIM * 2 / COPY_BYTES_PER_S * 1e6
    return Case("compact_pages", order, floor, variants(compact.compact_pages, configs), inputs, 0, in_place=True)


CASES = {
    "window_scores": [window_scores_case],
    "key_redundancy": [functools.partial(redundancy_case, mode) for mode in ("lightning", "flash")],
    "select_entries": [functools.partial(select_case, "noise"), functools.partial(select_case, "ties")],
    "compact_pages": [functools.partial(compact_case, order) for order in ("own", "fresh first", "shifted")],
}


def cases(op: str, ceilings: bench_timing.Ceilings, tune: bool) -> list[tuple[str, Callable]]:
    """(name, what builds it) of the op's cases, for `pallas_kernels.bench`."""

    def build(make: Callable) -> bench_timing.Case:
        case = make()
        first = {("pallas", name) for name in list(n for i, n in case.functions if i == "pallas")[:1]}
        chosen = {k: f for k, f in case.functions.items() if tune or k[0] == "xla" or k in first}
        return bench_timing.Case(
            op, case.case, case.floor_us, chosen, case.inputs, case.tolerance, in_place=case.in_place, chained=False
        )

    return [(str(*getattr(make, "args", ())), functools.partial(build, make)) for make in CASES[op]]


def microseconds(step: Callable, state, repeats: int) -> float:
    """Median over five rounds of the time a call takes in a row of calls; the state goes round."""
    times = []
    state = jax.block_until_ready(step(state))
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            state = step(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return float(np.median(times))


def largest_difference(got, want) -> float:
    def one(a, b):
        return jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))

    return max(float(jax.jit(one)(a, b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def measure(case: Case, function: Callable, repeats: int) -> tuple[float, object]:
    """(microseconds a call, result of the first call)."""
    first, *rest = case.inputs
    if not case.in_place:
        jitted = jax.jit(function)
        return microseconds(lambda _: jitted(first, *rest), None, repeats), jitted(first, *rest)
    jitted = jax.jit(function, donate_argnums=0)
    got = jitted(jax.tree.map(jnp.copy, first), *rest)
    return microseconds(lambda pools: jitted(pools, *rest), jax.tree.map(jnp.copy, first), repeats), got


def run(case: Case) -> None:
    want = None
    for (implementation, config), function in case.functions.items():
        record = {"op": case.op, "case": case.case, "implementation": implementation, "config": config}
        try:
            us, got = measure(case, function, repeats=3 if implementation == "xla" else 20)
            want = got if want is None else want
            difference = largest_difference(got, want)
            record |= {"device": jax.devices()[0].device_kind, "us": round(us, 1), "floor_us": round(case.floor_us, 1)}
            record |= {"floor_share": round(case.floor_us / us, 3), "difference": difference}
            record |= {"ok": bool(difference <= case.tolerance)}
        except Exception as error:
            record |= {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            traceback.print_exc(limit=-3)
        print(json.dumps(record), flush=True)


def main(ops: list[str]) -> None:
    unknown = sorted(set(ops) - set(CASES))
    if unknown:
        raise SystemExit(f"unknown op(s) {unknown}; known: {sorted(CASES)}")
    for op in ops or CASES:
        for make in CASES[op]:
            run(make())


if __name__ == "__main__":
    main(sys.argv[1:])
