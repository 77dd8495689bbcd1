"""Compile for an NVIDIA GPU on a machine without one, down to machine code. Needs the `aot` dependency group.

Catches what cannot be seen on a CPU: kernels that do not lower, shared memory that overflows, spills, hidden copies of a
donated pool. Not caught: wrong numbers, races, autotuning.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from pallas_kernels import dispatch

TARGETS = {"h200": ("NVIDIA H200", 132), "a100": ("NVIDIA A100-SXM4-80GB", 108)}
"""Target -> (device kind, streaming multiprocessors). tests/targets holds what XLA needs to know of each."""


@contextlib.contextmanager
def as_on_hopper() -> Iterator[None]:
    """Let `implementation=None` choose what it would on a Hopper GPU."""
    dispatch.default_implementation.cache_clear()
    with mock.patch.object(dispatch, "_gpu_capability", lambda: dispatch.KERNEL_CAPABILITY):
        yield
    dispatch.default_implementation.cache_clear()


def compile_for_gpu(function, args, *, target="h200", donate_argnums=(), compiler_options=None) -> jax.stages.Compiled:
    """`function` compiled for `target`; `args` are arrays or shapes."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    description = (pathlib.Path(__file__).parent / "targets" / f"{target}.txt").read_text()
    topology = topologies.get_topology_desc(target, platform="cuda", target_config=description, topology="1x1x1")
    kind, cores = TARGETS[target]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    sharding = SingleDeviceSharding(topology.devices[0])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donate_argnums).trace(*shapes).lower(lowering_platforms=("cuda",))
    return lowered.compile({"xla_gpu_autotune_level": "0", **(compiler_options or {})})
