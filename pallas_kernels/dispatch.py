"""Which implementation of an op runs: named by the caller, or chosen by the device.

`None` takes the Pallas kernel on an NVIDIA GPU of compute capability 9 (Hopper: the kernels use its wgmma and TMA), and XLA
elsewhere; where that is a GPU, one warning says why the kernel is not used. A name runs exactly that implementation or raises:
nothing falls back silently.
"""

import functools
import logging

import jax

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("xla", "pallas")
KERNEL_CAPABILITY = 9
"""Major compute capability that the Pallas kernels are written for."""


def resolve(
    op: str, implementation: str | None, available: tuple[str, ...] = IMPLEMENTATIONS, *, problem: str | None = None
) -> str:
    """The implementation of `op` to run.

    `problem` is why the kernel cannot take the caller's shapes or dtypes, if so.

    Raises:
        ValueError: a name that the op does not have, or "pallas" where the kernel cannot run.
    """
    if implementation is None:
        chosen = default_implementation(op, available)
        if chosen == "pallas" and problem:
            _warn_once(op, problem)
            return "xla"
        return chosen
    if implementation not in available:
        raise ValueError(f"{op} has no implementation {implementation!r}; it has {list(available)}")
    if implementation == "pallas":
        # A CPU may compile for a GPU that it does not have, or interpret.
        capability = _gpu_capability()
        if capability is not None and capability != KERNEL_CAPABILITY:
            raise ValueError(
                f"{op}: 'pallas' is written for compute capability {KERNEL_CAPABILITY}, not {capability}; use 'xla'"
            )
        if problem:
            raise ValueError(f"{op}: {problem}")
    return implementation


@functools.cache
def default_implementation(op: str, available: tuple[str, ...] = IMPLEMENTATIONS) -> str:
    """What `None` means for `op` on the default device, for shapes that the kernel takes."""
    capability = _gpu_capability()
    chosen = "pallas" if "pallas" in available and capability == KERNEL_CAPABILITY else "xla"
    if capability is None:
        return chosen
    if chosen == "xla" and "pallas" in available:
        log.warning("%s: xla, since 'pallas' is written for compute capability %d", op, KERNEL_CAPABILITY)
    else:
        log.info("%s: %s", op, chosen)
    return chosen


@functools.cache
def _warn_once(op: str, problem: str) -> None:
    log.warning("%s: xla on a GPU, since %s", op, problem)


def _gpu_capability() -> int | None:
    """Major compute capability of the default device, None if that is no GPU."""
    if jax.default_backend() != "gpu":
        return None
    return int(str(getattr(jax.devices()[0], "compute_capability", "0")).split(".")[0])
