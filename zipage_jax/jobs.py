"""Compression jobs: who is due, which pages take what is kept, which layers a step processes. Pure Python, no jax.

One job is in flight at a time: up to `max_rows` sequences whose layers are compressed together, all of them in one step or,
when asynchronous, a slice of `layer_stride` of them a step, while the other sequences decode on and those that are due wait
their turn. For every full job that waits, a step takes one slice more, so that compressions keep up with any load.
Source: arXiv 2603.08743, sec. 4.4 (targets) and 4.5; the slices are ours, because one device runs programs in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from zipage_jax.admission import Limits
from zipage_jax.pages import PagePool
from zipage_jax.plan import CompressJob, Counters
from zipage_jax.request import Sequence


class Compressor:
    """Sequences that are due, and the job in flight.

    `on_start` is called for a sequence when its job begins: from then on it is not to be preempted.
    """

    def __init__(
        self,
        pool: PagePool,
        limits: Limits,
        num_layers: int,
        counters: Counters,
        on_start: Callable[[Sequence], None],
    ):
        compression = limits.config.compression
        self._pool, self._limits, self._counters, self._on_start = pool, limits, counters, on_start
        self._num_layers = num_layers
        self._stride = num_layers
        if compression is not None and limits.config.async_compression:
            self._stride = compression.slice_layers(num_layers)
        self._max_rows = 0 if compression is None else compression.max_rows
        self.due: OrderedDict[Sequence, None] = OrderedDict()
        self.rows: list[Sequence] = []
        self._layer = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence whose pages are all full."""
        self.due[seq] = None

    def discard(self, seq: Sequence) -> None:
        """Forget a sequence that ended or was preempted."""
        self.due.pop(seq, None)
        if seq in self.rows:
            self.rows.remove(seq)

    def clear(self) -> None:
        self.due.clear()
        self.rows = []

    def plan(
        self, obtain: Callable[[Sequence, Callable[[Sequence], int]], bool]
    ) -> tuple[tuple[CompressJob, ...], list[Sequence]]:
        """Jobs of this step, and the sequences whose compression they complete.

        `obtain(seq, num_needed)` sees to `num_needed(seq)` free pages, or says that `seq` has to wait.
        """
        if not self.rows:
            if not self.due:
                return (), []
            self._start(obtain)
            if not self.rows:
                return (), []
        slices = 1 + len(self.due) // self._max_rows
        stop = min(self._layer + slices * self._stride, self._num_layers)
        jobs = tuple(self._job(seq, (self._layer, stop)) for seq in self.rows)
        self._layer = stop
        if stop < self._num_layers:
            return jobs, []
        completed, self.rows = self.rows, []
        # Only now: a page that this job's rows read must not be given to another row of it as a target.
        for seq in completed:
            self._complete(seq)
        return jobs, completed

    def _start(self, obtain: Callable[[Sequence, Callable[[Sequence], int]], bool]) -> None:
        self._layer = 0
        for seq in list(self.due):
            if len(self.rows) == self._max_rows:
                break
            # It may have been preempted for one before it.
            if seq in self.due and obtain(seq, self.num_fresh):
                del self.due[seq]
                self._assign_targets(seq)
                self.rows.append(seq)
                self._on_start(seq)

    def num_fresh(self, seq: Sequence) -> int:
        """Pages that `seq` must be given to compress: max(0, B + 1 − (N − P)) with P of its N pages shared."""
        own = len(seq.page_ids) - self._pool.num_shared(seq.page_ids)
        return max(0, seq.budget_pages + 1 - own)

    def _assign_targets(self, seq: Sequence) -> None:
        """B targets and a page for further decoding: own unshared pages, the last ones first, then fresh ones."""
        pool, wanted = self._pool, seq.budget_pages + 1
        own = [page for page in seq.page_ids if pool.counts[page] == 1]
        shared = len(seq.page_ids) - len(own)
        # The tail is rewritten, so that the head of the prefix stays revivable.
        kept = own[-wanted:]
        for page in kept:
            pool.forget(page)
        seq.pending_ids = kept + pool.allocate(wanted - len(kept))
        seq.stats.num_compressions += 1
        self._counters.compressions += 1
        self._counters.shared_compressions += len(kept) < wanted
        self._counters.all_shared_compressions += shared == len(seq.page_ids)

    def _job(self, seq: Sequence, layers: tuple[int, int]) -> CompressJob:
        budget = seq.budget_pages
        return CompressJob(
            seq=seq,
            source_page_ids=tuple(seq.page_ids),
            target_page_ids=tuple(seq.pending_ids[:budget]),
            budget_pages=budget,
            history_len=budget * self._pool.page_size if seq.num_evicted else 0,
            layers=layers,
        )

    def _complete(self, seq: Sequence) -> None:
        old, seq.page_ids, seq.pending_ids = seq.page_ids, seq.pending_ids, []
        kept = set(seq.page_ids)
        self._pool.release([page for page in old if page not in kept])
        held = seq.budget_pages * self._pool.page_size
        seq.stats.entries_evicted += seq.cache_len - held
        seq.num_evicted += seq.cache_len - held
        seq.cache_len = held
        seq.compress_len = self._limits.next_compress_len(seq)
