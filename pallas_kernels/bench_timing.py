"""Timing of one op at one shape on a GPU, beside what the device allows; `pallas_kernels.bench` is the command."""

import dataclasses
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROUNDS = 5
MAX_CALLS = 2048
ROUND_S = 0.04
"""A round of calls lasts at least this long, so that starting it does not count."""


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best: bytes read, bytes read and written, bfloat16 products."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Peer:
    """Somebody else's implementation, on inputs of its own that are made when it runs: f(first input, *make())."""

    function: Callable
    make: Callable[[], tuple]
    comparable: bool = True


@dataclass
class Case:
    """An op at one shape.

    Attributes:
        floor_us: the time that the device cannot beat.
        functions: by (implementation, configuration), each called as f(*inputs), or a Peer.
        tolerance: largest error of a result over the reference's largest value.
        reference: gives (indices along the first axis, expected values there); None: the first function's result.
        in_place: inputs[0] is donated and comes back.
        chained: the result has the shape of inputs[0], so that calls can be timed in a chain inside one program.
        must_reach: share of the floor that the op is held to.
    """

    op: str
    case: str
    floor_us: float
    functions: dict[tuple[str, str], Callable | Peer]
    inputs: tuple
    tolerance: float
    reference: Callable | None = None
    in_place: bool = False
    chained: bool = True
    must_reach: float | None = None
    expected: Any = field(default=None, repr=False)


def config_name(config) -> str:
    """`field=value` of what differs from the configuration's defaults."""
    default = type(config)()
    changed = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return " ".join(f"{k}={v}" for k, v in changed.items() if v != getattr(default, k)) or "default"


def chain(function: Callable, calls: int) -> Callable:
    """`calls` calls one after the other in one program, each on the result of the one before as its first input."""

    def run(first, *rest):
        return lax.fori_loop(0, calls, lambda _, x: function(x, *rest), first)

    return run


def separate(jitted: Callable, calls: int, in_place: bool) -> Callable:
    """`calls` calls one after the other, each a program of its own."""

    def run(first, *rest):
        out = None
        for _ in range(calls):
            out = jitted(first, *rest)
            first = out if in_place else first
        return out

    return run


def microseconds(function: Callable, inputs: tuple, *, in_place: bool = False, chained: bool = True) -> float:
    """Median over rounds of the time a call takes among as many calls as fill a round."""
    donated = 0 if in_place else ()
    once = jax.jit(function, donate_argnums=donated)

    def seconds(run, rounds):
        first, times = jax.tree.map(jnp.copy, inputs[0]) if in_place else inputs[0], []
        for _ in range(rounds + 1):
            jax.block_until_ready(first)
            start = time.perf_counter()
            out = jax.block_until_ready(run(first, *inputs[1:]))
            times.append(time.perf_counter() - start)
            first = out if in_place else first
        return float(np.median(times[1:]))

    calls = min(int(ROUND_S / seconds(once, 2)) + 4, MAX_CALLS)
    many = jax.jit(chain(function, calls), donate_argnums=donated) if chained else separate(once, calls, in_place)
    return seconds(many, ROUNDS) / calls * 1e6


def measure_ceilings() -> Ceilings:
    """Of the default device."""
    x = jax.random.bits(jax.random.key(0), (1 << 14, 1 << 16), jnp.uint32)

    def read(carry, x):
        return jnp.max(x ^ carry[:, None], axis=1)

    read_us = microseconds(read, (jnp.zeros(x.shape[0], jnp.uint32), x))
    copy_us = microseconds(lambda x: x + jnp.uint32(1), (x,), in_place=True)
    del x
    a = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(2), (8192, 8192), jnp.bfloat16) * jnp.bfloat16(1 / 90)
    gemm_us = microseconds(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.bfloat16), (a, b))
    size = 4 * (1 << 30)
    return Ceilings(size / read_us * 1e6, 2 * size / copy_us * 1e6, 2 * 8192**3 / gemm_us * 1e6)


def error_of(case: Case, got) -> float:
    """Largest error over the reference's largest value; NaN counts as infinite."""
    if case.expected is None:
        case.expected = (slice(None), got) if case.reference is None else case.reference(*case.inputs)
    index, expected = case.expected
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = a[index].astype(jnp.float32), b.astype(jnp.float32)
        worst = max(worst, float(jnp.nan_to_num(jnp.max(jnp.abs(a - b)), nan=jnp.inf) / jnp.max(jnp.abs(b))))
    return worst


def run_case(case: Case, emit: Callable[[dict], None]) -> None:
    """Check and time every implementation of `case`; `emit` gets one record for each, failures included."""
    for (implementation, config), function in case.functions.items():
        record = {"op": case.op, "case": case.case, "implementation": implementation, "config": config}
        record |= {"device": jax.devices()[0].device_kind, "floor_us": round(case.floor_us, 2)}
        try:
            record |= _measure(case, function)
        except Exception as error:
            record |= {"failed": f"{type(error).__name__}: {str(error)[:300]}", "ok": False}
            traceback.print_exc(limit=-3)
        if case.must_reach is not None and implementation == "pallas":
            record["must_reach"] = case.must_reach
        emit(record)


def _measure(case: Case, function: Callable | Peer) -> dict:
    inputs, comparable, donated = case.inputs, True, 0 if case.in_place else ()
    if isinstance(function, Peer):
        inputs, comparable, function = (inputs[0], *function.make()), function.comparable, function.function
    first = jax.tree.map(jnp.copy, inputs[0]) if case.in_place else inputs[0]
    got = jax.jit(function, donate_argnums=donated)(first, *inputs[1:])
    error = error_of(case, got) if comparable else None
    del got, first
    us = microseconds(function, inputs, in_place=case.in_place, chained=case.chained)
    record = {"us": round(us, 2), "floor_share": round(case.floor_us / us, 3), "ok": True}
    if error is not None:
        record |= {"error": float(f"{error:.2g}"), "ok": error <= case.tolerance}
    return record
