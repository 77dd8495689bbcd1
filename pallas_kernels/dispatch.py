"""Which implementation of an op runs: named by the caller, or chosen by the device.

`None` takes the Pallas kernel where one exists and the default device is an NVIDIA GPU of compute capability 9 or newer, and
XLA elsewhere. A name runs exactly that implementation or raises; nothing falls back silently.
"""

import functools
import logging

import jax

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("xla", "pallas")


def resolve(op: str, implementation: str | None, available: tuple[str, ...] = IMPLEMENTATIONS) -> str:
    """The implementation of `op` to run; ValueError for a name that it does not have."""
    if implementation is None:
        return default_implementation(op, available)
    if implementation not in available:
        raise ValueError(f"{op} has no implementation {implementation!r}; it has {list(available)}")
    return implementation


@functools.cache
def default_implementation(op: str, available: tuple[str, ...] = IMPLEMENTATIONS) -> str:
    """What `None` means for `op` on the default device."""
    chosen = "pallas" if "pallas" in available and _is_hopper_or_newer() else "xla"
    if jax.default_backend() == "gpu":
        log.info("%s: %s", op, chosen)
    return chosen


def _is_hopper_or_newer() -> bool:
    if jax.default_backend() != "gpu":
        return False
    capability = getattr(jax.devices()[0], "compute_capability", "0.0")
    return int(str(capability).split(".")[0]) >= 9
