"""Step records and totals: what the progress bar, the benches, plots and notebooks read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zipage_jax.scheduler import Plan, Scheduler

RECENT_STEPS = 4096


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step. Times are seconds on the host; `wait_s` is the time spent waiting for the device."""

    time_s: float
    prefill_tokens: int
    prefill_rows: int
    decode_rows: int
    compress_rows: int
    running: int
    waiting: int
    pages_used: int
    entries_read: int
    plan_s: float
    dispatch_s: float
    wait_s: float
    commit_s: float

    @property
    def total_s(self) -> float:
        return self.plan_s + self.dispatch_s + self.wait_s + self.commit_s


@dataclass
class Metrics:
    """Totals since the engine was built, and the last steps.

    `sink`, if set, is called with every StepRecord (a bench writes a time series with it).
    """

    num_pages: int
    steps: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    compressed_rows: int = 0
    peak_pages: int = 0
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS), repr=False)
    sink: Callable[[StepRecord], None] | None = field(default=None, repr=False)
    start_s: float = field(default_factory=time.perf_counter, repr=False)

    def record(
        self, plan: Plan, scheduler: Scheduler, *, plan_s: float, dispatch_s: float, wait_s: float, commit_s: float
    ) -> None:
        """Add one step."""
        record = StepRecord(
            time_s=time.perf_counter() - self.start_s,
            prefill_tokens=sum(chunk.length for chunk in plan.prefill),
            prefill_rows=len(plan.prefill),
            decode_rows=len(plan.decode),
            compress_rows=len(plan.compress),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages_used=scheduler.num_used_pages,
            entries_read=sum(seq.cache_len for seq in plan.decode),
            plan_s=plan_s,
            dispatch_s=dispatch_s,
            wait_s=wait_s,
            commit_s=commit_s,
        )
        self.steps += 1
        self.decode_steps += bool(plan.decode)
        self.prefill_tokens += record.prefill_tokens
        self.decode_tokens += record.decode_rows
        self.compressed_rows += record.compress_rows
        self.peak_pages = max(self.peak_pages, record.pages_used)
        self.recent.append(record)
        if self.sink is not None:
            self.sink(record)
