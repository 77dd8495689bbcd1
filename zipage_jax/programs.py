"""Compiled steps, one executable per bucket: traced once, compiled once, kept by their key."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import jax

log = logging.getLogger(__name__)

GPU_COMPILER_OPTIONS = {
    # cuBLAS beats XLA's Triton GEMMs at 64-512 rows (an 8B decode step: 10.5 ms instead of 11.0 on an H200).
    "xla_gpu_enable_triton_gemm": False,
}
COMPILE_THREADS = 12


@dataclass(frozen=True)
class Program:
    """A pure function, the arguments it donates, and its static arguments: what executables are made from.

    `fixed` names the arguments whose shapes never change in a runner; the others' shapes tell the executables apart.
    """

    function: Callable
    donated: tuple[str, ...]
    fixed: tuple[str, ...]
    statics: tuple[tuple[str, Hashable], ...] = ()

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the function's positional arguments."""
        code = self.function.__code__
        return code.co_varnames[: code.co_argcount]

    def key(self, args: tuple) -> Hashable:
        """What the executable for `args` is kept under."""
        varying = [arg for name, arg in zip(self.parameters, args, strict=True) if name not in self.fixed]
        leaves, structure = jax.tree.flatten(varying)
        return self, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


class Programs:
    """Executables by (program, shapes of its arguments).

    `num_compiled` counts them: a test holds it to the number of buckets used. Executables donate what their program says,
    so an argument that was donated is gone after the call.
    """

    def __init__(self, platform: str):
        self._options = GPU_COMPILER_OPTIONS if platform == "gpu" else {}
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def run(self, program: Program, *args):
        """program.function(*args), compiled if these shapes are new."""
        key = program.key(args)
        compiled = self._compiled.get(key)
        if compiled is None:
            log.info("compiling %s at its first use with these shapes and options", program.function.__name__)
            compiled = self._compile(key, program, args)
        return compiled(*args)

    def warm_up(self, work: list[tuple[Program, tuple]]) -> float:
        """Compile (program, arguments or their abstract shapes) pairs in threads, each once; returns the seconds it took."""
        start = time.perf_counter()
        distinct = {program.key(args): (program, args) for program, args in work}
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            list(pool.map(lambda key: self._compile(key, *distinct[key]), distinct))
        return time.perf_counter() - start

    def _compile(self, key, program: Program, args) -> jax.stages.Compiled:
        start = time.perf_counter()
        lowered = lower(program, args)
        compiled = lowered.compile(self._options)
        with self._lock:
            self._compiled.setdefault(key, compiled)
        log.info("compiled %s in %.1f s", program.function.__name__, time.perf_counter() - start)
        return self._compiled[key]


def lower(program: Program, args) -> jax.stages.Lowered:
    """The program's lowered form for these arguments (or their abstract shapes)."""
    statics = dict(program.statics)

    def step(*values):
        return program.function(*values, **statics)

    step.__name__ = program.function.__name__
    donated = tuple(i for i, name in enumerate(program.parameters) if name in program.donated)
    return jax.jit(step, donate_argnums=donated).lower(*args)
