"""A time series of a run: one JSON line a second, and the paper's figures drawn from it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from zipage_jax.metrics import StepRecord


@dataclass
class SeriesWriter:
    """Sums step records over one second each; writes them to `path` as JSONL (None keeps them in memory only).

    Attributes:
        num_pages: pages of the pool, for the occupancy.
    """

    path: Path | None
    num_pages: int
    points: list[dict] = field(default_factory=list)
    _second: list[StepRecord] = field(default_factory=list)
    _start: float | None = None

    def add(self, record: StepRecord) -> None:
        """Add a step; closes the second it does not belong to."""
        if self._start is None:
            self._start = record.time_s
        if record.time_s - self._start >= 1.0 and self._second:
            self._flush()
            self._start = record.time_s
        self._second.append(record)

    def close(self) -> None:
        """Write the last, incomplete second and the file."""
        if self._second:
            self._flush()
        if self.path is not None:
            self.path.write_text("".join(json.dumps(point) + "\n" for point in self.points))

    def plot(self, path: Path) -> None:
        """Draw running and waiting requests, tokens per second, occupancy and ms per step (the paper's Figures 7, 19-25)."""
        from zipage_jax.plots import draw_series

        draw_series(self.points).savefig(path, dpi=120)

    def _flush(self) -> None:
        steps, last = self._second, self._second[-1]
        span = max(last.time_s - self._start, 1e-9) if len(steps) > 1 else max(steps[0].total_s, 1e-9)
        self.points.append(
            {
                "time_s": round(last.time_s, 3),
                "running": last.running,
                "waiting": last.waiting,
                "occupancy": last.pages_used / self.num_pages,
                "tokens_per_s": sum(step.decode_rows for step in steps) / span,
                "ms_per_step": 1e3 * sum(step.total_s for step in steps) / len(steps),
                "decode_rows": sum(step.decode_rows for step in steps) / len(steps),
                "compress_rows": sum(step.compress_rows for step in steps),
                "prefill_tokens": sum(step.prefill_tokens for step in steps),
            }
        )
        self._second = []
