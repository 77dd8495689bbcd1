"""Scheduler: who runs, who waits, who compresses, who gives way. `plan` decides a step, `commit` takes its tokens. No jax.

Everything is decided by counts, never by token values, so step t + 1 is planned before the tokens of step t are known; at most
one plan may be uncommitted when the next is made. Two things not to be confused: a *seat* is a running sequence's place on the
device, a *query slot* its permission to store window queries. Running sequences are ordered by admission:

* the first of them hold the slots; one without a slot decodes up to the entry whose query it would have to store, then waits;
* one that needs a page when none is free preempts the last uncompressed one (without prefix sharing: the last one without a
  slot), possibly itself; a preempted one goes to the front of the queue and is prefilled again. Nobody is preempted for a
  sequence whose last token is not yet known: it may have ended.
* a waiting one is admitted if its pages leave enough for what the running ones are about to need.

With `enable_prefix_caching=False` nothing is shared, the samples of one request included.
Source: arXiv 2603.08743, sec. 4.3 to 4.5; chunked prefill, look-ahead and budgets per request are ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from zipage_jax.admission import Limits
from zipage_jax.jobs import Compressor
from zipage_jax.pages import PagePool
from zipage_jax.plan import CompressJob, Counters, Plan, PrefillChunk
from zipage_jax.prefixes import Prefixes
from zipage_jax.request import Sequence, Status
from zipage_jax.slots import QuerySlots

if TYPE_CHECKING:
    from zipage_jax.config import EngineConfig

__all__ = ["CompressJob", "Plan", "PrefillChunk", "Scheduler"]

RUNNING = (Status.PREFILL, Status.DECODE, Status.SUSPENDED, Status.BLOCKED, Status.DUE, Status.COMPRESSING)

TokenHook = Callable[[Sequence, int, int], str | None]
"""(sequence, index into the committed tokens, token) -> the stop string that the token completes, if any."""


class Scheduler:
    """Queues, pages, seats and query slots of one engine.

    `num_pages` counts the null page, `num_slots` (M) does not count the null slot: slots are 1 … num_slots. Seats are
    0 … max_num_seqs − 1 and stay the same while a sequence runs.
    """

    def __init__(self, config: EngineConfig, *, num_pages: int, num_slots: int, num_layers: int, max_model_len: int):
        self.config = config
        self.pool = PagePool(num_pages, config.page_size)
        self.limits = Limits(config, self.pool.num_usable, num_slots, max_model_len)
        self.counters = Counters()
        self.compressor = Compressor(self.pool, self.limits, num_layers, self.counters, self._on_compress)
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.draining: dict[Sequence, None] = {}
        self.prefixes = Prefixes(self.pool, config.enable_prefix_caching)
        self._requests: dict[str, dict[Sequence, None]] = {}
        self._ended: list[Sequence] = []
        # Ended sequences, and how many tokens of theirs are still to come.
        self._late: dict[Sequence, int] = {}
        self._order = 0
        self._clear()

    def _clear(self) -> None:
        """Nothing runs; every seat and slot is free."""
        self._members: dict[Status, dict[Sequence, None]] = {status: {} for status in RUNNING}
        self._decoding = self._members[Status.DECODE]
        self.num_running = 0
        # Who may be preempted, in admission order.
        self._victims: OrderedDict[Sequence, None] = OrderedDict()
        self._seats = list(range(self.config.max_num_seqs - 1, -1, -1))
        self.slots = QuerySlots(self.limits.num_slots, self.pool.num_usable)
        # Pages that running sequences are about to need.
        self._reserved = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_used_pages(self) -> int:
        return self.pool.num_used

    def running(self) -> list[Sequence]:
        """Running sequences in admission order (sorts: for tests and plots)."""
        return sorted((seq for members in self._members.values() for seq in members), key=lambda seq: seq.order)

    def has_unfinished(self) -> bool:
        return bool(self.num_running or self.waiting or self.draining)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; ValueError with the numbers if it can never run."""
        assert seq.status is Status.WAITING and seq not in self.waiting
        self.limits.accept(seq)
        self._requests.setdefault(seq.request_id, {})[seq] = None
        self.waiting[seq] = None

    def abort(self, request_id: str) -> list[Sequence]:
        """End all samples of a request, whatever they are doing; returns those that had not ended."""
        ended = list(self._requests.get(request_id, ()))
        for seq in ended:
            self.finish(seq, "abort")
        return ended

    def finish(
        self, seq: Sequence, reason: str, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        """End a sequence and free what it holds. Tokens that are still in flight for it will be dropped."""
        self._end(seq, reason, stop_reason, error)
        self._ended.append(seq)

    def take_ended(self) -> list[Sequence]:
        """Sequences that ended outside `commit` since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def plan(self) -> Plan:
        """Decide the next step. An empty plan means: commit what is in flight, or there is nothing to do."""
        for seq in [seq for seq in self._decoding if seq.cache_len == seq.next_event]:
            self._at_event(seq)
        self._grant_slots()
        compress, completed = self.compressor.plan(self._obtain)
        for seq in completed:
            self._reserve(seq)
            if self.config.compression.compress_during_prefill:
                self.slots.set_aside(seq, max(seq.budget_pages + 1, seq.compress_len // self.pool.page_size))
            self._resume(seq)
        if self._members[Status.BLOCKED]:
            self._acquire_pages()
        for seq in self._decoding:
            seq.cache_len += 1
            seq.num_tokens += 1
        decode = tuple(self._decoding)
        return Plan(compress=compress, prefill=tuple(self._plan_prefill()), decode=decode)

    def commit(self, plan: Plan, tokens: list[int], on_token: TokenHook | None = None) -> list[Sequence]:
        """Take the tokens of a plan: its sampling chunks in order, then its decode rows. Returns who got a token.

        Tokens of sequences that have ended in the meantime are dropped. Stops, in this order: a stop token or string (from
        `min_tokens` on), the longest length.
        """
        rows = [chunk.seq for chunk in plan.prefill if chunk.samples]
        rows += plan.decode
        assert len(rows) == len(tokens), f"{len(tokens)} tokens for {len(rows)} rows"
        live = self._drop_late(rows) if self._late else rows
        for index, seq in enumerate(rows):
            if live is not rows and seq.status is Status.FINISHED:
                continue
            token, ids = tokens[index], seq.all_ids
            ids.append(token)
            matched = None if on_token is None else on_token(seq, index, token)
            if token in seq.stop_ids or matched is not None or len(ids) >= seq.max_len:
                self._check_stop(seq, token, matched)
        return live

    def _drop_late(self, rows: list[Sequence]) -> list[Sequence]:
        """`rows` without those that have ended; each of them has one token less to come."""
        live = []
        for seq in rows:
            if seq.status is not Status.FINISHED:
                live.append(seq)
            elif self._late[seq] == 1:
                del self._late[seq]
            else:
                self._late[seq] -= 1
        return live

    def _check_stop(self, seq: Sequence, token: int, matched: str | None) -> None:
        if (token in seq.stop_ids or matched is not None) and len(seq.all_ids) >= seq.min_len:
            is_stop_id = token in (seq.params.stop_token_ids or ())
            self._end(seq, "stop", token if is_stop_id else matched)
        elif len(seq.all_ids) >= seq.max_len:
            self._end(seq, "length")

    def reset_after_failure(self, message: str, end_all: bool = False) -> list[Sequence]:
        """After a step that lost the cache: prefill again, or end with an error who cannot be. Returns who ended.

        Uncommitted plans must not be committed any more. Compressed sequences cannot be prefilled again; `end_all` gives up
        the others that ran, too. Those that only waited have no part in the failure.
        """
        lost = sorted([*self.running(), *self.draining], key=lambda seq: seq.order)
        ended = lost if end_all else [seq for seq in lost if seq.compressed]
        self.pool.reset()
        self.compressor.clear()
        self.draining.clear()
        self._clear()
        self._late.clear()
        for seq in [*lost, *self.waiting]:
            seq.num_tokens = len(seq.all_ids)
        for seq in reversed(lost):
            self._requeue(seq)
        for seq in ended:
            self._end(seq, "error", error=message)
        return ended

    # Events of running sequences

    def _at_event(self, seq: Sequence) -> None:
        """Settle how a decoding sequence goes on whose next token is its last, needs a page, a slot or a compression."""
        self.prefixes.register(seq)
        if seq.num_tokens >= seq.max_len:
            self._release(seq)
            seq.status = Status.DRAINING
            self.draining[seq] = None
        elif self.limits.is_due(seq):
            self._move(seq, Status.DUE)
            self.compressor.add(seq)
        elif self._lacks_slot(seq):
            self.counters.suspensions += 1
            self._move(seq, Status.SUSPENDED)
        else:
            self._move(seq, Status.BLOCKED)

    def _resume(self, seq: Sequence) -> None:
        """Let a running sequence go on: prefill what is left, decode, or first get pages."""
        if seq.num_written < seq.prefill_len:
            lacks = self.limits.prefill_pages(seq) > len(seq.page_ids)
            self._move(seq, Status.BLOCKED if lacks else Status.PREFILL)
        elif seq.cache_len == len(seq.page_ids) * self.pool.page_size:
            self._move(seq, Status.BLOCKED)
        else:
            self._set_event(seq)
            self._move(seq, Status.DECODE)

    def _set_event(self, seq: Sequence) -> None:
        """Set the number of entries at which decoding `seq` needs a decision."""
        event = min(len(seq.page_ids) * self.pool.page_size, seq.max_len - 1 - seq.num_evicted)
        if seq.wants_slot and not seq.query_slot and self.limits.compresses(seq):
            event = min(event, self.limits.slot_len(seq))
        seq.next_event = event

    def _lacks_slot(self, seq: Sequence) -> bool:
        return (
            seq.wants_slot
            and not seq.query_slot
            and self.limits.compresses(seq)
            and seq.cache_len >= self.limits.slot_len(seq)
        )

    def _grant_slots(self) -> None:
        """Give free slots to the foremost running sequences without one."""
        while (seq := self.slots.foremost()) is not None:
            self._hold_slot(seq)
            self._reserve(seq)
            if seq.status is Status.SUSPENDED:
                self._resume(seq)
            elif seq.status is Status.DECODE:
                self._set_event(seq)

    def _hold_slot(self, seq: Sequence) -> None:
        if not self.prefixes.enabled:
            self._victims.pop(seq, None)

    def _on_compress(self, seq: Sequence) -> None:
        self._victims.pop(seq, None)
        self._move(seq, Status.COMPRESSING)

    # Pages

    def _acquire_pages(self) -> None:
        """Give pages to those that wait for them, foremost first."""
        for seq in sorted(self._members[Status.BLOCKED], key=lambda seq: seq.order):
            if seq.status is not Status.BLOCKED:
                continue
            if self._obtain(seq, self._num_lacking):
                seq.page_ids += self.pool.allocate(self._num_lacking(seq))
                self._note_pages(seq)
                self._resume(seq)

    def _num_lacking(self, seq: Sequence) -> int:
        """Pages that `seq` needs to go on: those of its next prefill segment, or one for its next token."""
        if seq.num_written < seq.prefill_len:
            return self.limits.prefill_pages(seq) - len(seq.page_ids)
        return 1

    def _obtain(self, seq: Sequence, num_needed: Callable[[Sequence], int]) -> bool:
        """See to enough free pages for `seq`, by preemption if need be; False if it has to wait (or was preempted itself)."""
        # Asked again after every preemption: the pages that `seq` shared with a victim may be its own now.
        while self.pool.num_free < num_needed(seq):
            if seq.in_flight or not self._victims:
                return False
            victim = next(reversed(self._victims))
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _note_pages(self, seq: Sequence) -> None:
        seq.stats.peak_pages = max(seq.stats.peak_pages, len(seq.page_ids))
        self._reserve(seq)

    def _reserve(self, seq: Sequence) -> None:
        """Count the pages that `seq` will need within the next page of tokens, which admission must leave free."""
        reserve = 0
        if not seq.compressed:
            shared = self.pool.num_shared(seq.page_ids) if seq.query_slot else 0
            reserve = self._next_pages(seq, len(seq.page_ids), shared)
        self._reserved += reserve - seq.reserve
        seq.reserve = reserve

    def _next_pages(self, seq: Sequence, num_pages: int, num_shared: int) -> int:
        """Pages that uncompressed `seq` needs next: one to grow, or those that its first compression has to be given."""
        compresses = self.limits.compresses(seq)
        last = seq.compress_len if compresses else seq.max_len - 1
        if num_pages * self.pool.page_size < last:
            return 1
        return max(0, seq.budget_pages + 1 - (num_pages - num_shared)) if compresses else 0

    # Prefill and admission

    def _plan_prefill(self) -> list[PrefillChunk]:
        """Chunks of at most max_num_batched_tokens tokens in all: those who have begun, then newly admitted ones."""
        budget = self.config.max_num_batched_tokens
        most = 1 if self.config.batch_invariant else self.config.max_num_seqs
        chunks: list[PrefillChunk] = []
        for seq in list(self._members[Status.PREFILL]):
            if budget == 0 or len(chunks) == most:
                return chunks
            budget -= self._add_chunk(seq, budget, chunks)
        while budget > 0 and self.waiting and self._seats and len(chunks) < most:
            seq = next(iter(self.waiting))
            if not self._admit(seq):
                break
            budget -= self._add_chunk(seq, budget, chunks)
        return chunks

    def _add_chunk(self, seq: Sequence, budget: int, chunks: list[PrefillChunk]) -> int:
        start = seq.num_written
        length = min(budget, seq.prefill_len - start)
        if self.limits.compresses(seq):
            length = min(length, seq.compress_len - seq.cache_len)
        if self.config.batch_invariant:
            size = self.config.max_num_batched_tokens
            length = min(length, size - start % size)
        seq.cache_len += length
        samples = seq.num_written == seq.prefill_len
        chunks.append(PrefillChunk(seq=seq, start=start, length=length, samples=samples))
        self.prefixes.register(seq)
        if samples:
            seq.num_tokens += 1
            self._set_event(seq)
            self._move(seq, Status.DECODE)
        elif self.limits.is_due(seq):
            self._move(seq, Status.DUE)
            self.compressor.add(seq)
        return length

    def _admit(self, seq: Sequence) -> bool:
        """Seat the foremost waiting sequence with the pages for its prefill, if it may run now."""
        if seq.in_flight:
            return False  # Preempted with a token on its way, which may be its last.
        constrained = self.config.scheduling == "constrained"
        if constrained and self.config.compression is not None and self.num_running >= self.limits.num_slots:
            return False
        slot = seq.wants_slot and not self.slots.queue and self.slots.fits(seq)
        if seq.wants_slot and not slot:
            needs_slot = self.limits.compresses(seq) and len(seq.all_ids) > self.limits.slot_len(seq)
            if needs_slot or constrained:
                return False
        seq.prefill_len = len(seq.all_ids)
        hits = self.prefixes.match(seq, self.limits.max_hits(seq))
        num = self.limits.prefill_pages(seq)
        revived = sum(self.pool.counts[page] == 0 for page in hits)
        spare = self.pool.num_free - (num - len(hits)) - revived
        if self.num_running:
            spare -= self._reserved + self._next_pages(seq, num, len(hits) if slot else 0)
        if spare < 0:
            return False
        del self.waiting[seq]
        self.pool.retain(hits)
        seq.page_ids = hits + self.pool.allocate(num - len(hits))
        seq.cache_len = len(hits) * self.pool.page_size
        seq.seat = self._seats.pop()
        seq.order, self._order = self._order, self._order + 1
        seq.status = Status.PREFILL
        self._members[Status.PREFILL][seq] = None
        self.num_running += 1
        self._victims[seq] = None
        if slot:
            self.slots.take(seq)
            self._hold_slot(seq)
        elif seq.wants_slot:
            self.slots.queue[seq] = None
        self._note_pages(seq)
        seq.stats.num_cached_tokens += seq.cache_len
        self.counters.admissions += 1
        self.counters.prompt_tokens += len(seq.all_ids)
        self.counters.cached_tokens += seq.cache_len
        return True

    # Leaving

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from an uncompressed running sequence and put it at the front of the queue."""
        assert not seq.compressed
        self.prefixes.register(seq)
        self._release(seq)
        self.counters.preemptions += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        seq.forget_cache()
        seq.stats.num_preemptions += 1
        seq.status = Status.WAITING
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)

    def _end(self, seq: Sequence, reason: str, stop_reason: int | str | None = None, error: str | None = None) -> None:
        assert seq.status is not Status.FINISHED
        seq.stats.entries_held, seq.stats.length = seq.cache_len, len(seq.all_ids)
        if seq.status is Status.WAITING:
            del self.waiting[seq]
        elif seq.status is Status.DRAINING:
            del self.draining[seq]
        else:
            self.prefixes.register(seq)
            self._release(seq)
        seq.status = Status.FINISHED
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
        seq.keys = []
        if seq.in_flight:
            self._late[seq] = seq.in_flight
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        samples = self._requests[seq.request_id]
        del samples[seq]
        if not samples:
            del self._requests[seq.request_id]

    def _release(self, seq: Sequence) -> None:
        """Free the pages, the seat and the slot of a running sequence."""
        del self._members[seq.status][seq]
        self.num_running -= 1
        self.compressor.discard(seq)
        self._victims.pop(seq, None)
        self.slots.leave(seq)
        held = set(seq.page_ids)
        self.pool.release(seq.page_ids + [page for page in seq.pending_ids if page not in held])
        seq.page_ids, seq.pending_ids = [], []
        self._seats.append(seq.seat)
        seq.seat = -1
        self._reserved -= seq.reserve
        seq.reserve = 0

    def _move(self, seq: Sequence, status: Status) -> None:
        del self._members[seq.status][seq]
        self._members[status][seq] = None
        seq.status = status
