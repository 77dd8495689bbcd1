"""Where the device's time went, from a profiler trace: seconds per compiled step, and idle time between them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.profiler import ProfileData


@dataclass
class DeviceTime:
    """Seconds on the first GPU within one trace.

    Attributes:
        span_s: from the first kernel's start to the last one's end.
        busy_s: some kernel ran.
        by_step_s: busy seconds by the name of the compiled step they belong to.
        by_kernel_s: busy seconds by kernel name.
    """

    span_s: float = 0.0
    busy_s: float = 0.0
    by_step_s: dict[str, float] = field(default_factory=dict)
    by_kernel_s: dict[str, float] = field(default_factory=dict)

    @property
    def idle_share(self) -> float:
        """Share of the span in which no kernel ran: what the host, or launches, cost."""
        return 1.0 - self.busy_s / self.span_s if self.span_s else 0.0

    def step_share(self, step: str) -> float:
        """Share of the span that kernels of `step` took."""
        return self.by_step_s.get(step, 0.0) / self.span_s if self.span_s else 0.0


@contextmanager
def device_time(directory: Path | None = None) -> Iterator[DeviceTime]:
    """Trace the block; the yielded object is filled when it ends. `directory` keeps the trace (Perfetto reads it)."""
    result = DeviceTime()
    with tempfile.TemporaryDirectory() as temporary:
        target = directory or Path(temporary)
        with jax.profiler.trace(str(target)):
            yield result
        files = sorted(target.rglob("*.xplane.pb"))
        if files:
            _read(ProfileData.from_file(str(files[-1])), result)


def _read(profile: ProfileData, result: DeviceTime) -> None:
    plane = next((p for p in profile.planes if p.name.startswith("/device:GPU:0")), None)
    if plane is None:
        return
    kernels = []
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            stats = dict(event.stats)
            kernels.append((event.start_ns, event.start_ns + event.duration_ns, event.name, stats.get("hlo_module")))
    kernels.sort(key=lambda kernel: kernel[:2])
    end = 0.0
    for start, stop, name, module in kernels:
        seconds = max(stop - max(start, end), 0.0) / 1e9
        end = max(end, stop)
        step = str(module).removeprefix("jit_") if module else "copies"
        result.busy_s += seconds
        result.by_step_s[step] = result.by_step_s.get(step, 0.0) + seconds
        result.by_kernel_s[name] = result.by_kernel_s.get(name, 0.0) + seconds
    if kernels:
        result.span_s = (end - kernels[0][0]) / 1e9
