"""Kill tests: each rule of the scheduler is broken on purpose, and the checks must notice within a few hundred random lives."""

import inspect
import random
import sys
import textwrap

import pytest

from tests import test_scheduler_limits, test_scheduler_queue
from tests.scheduler_world import random_world
from zipage_jax import admission, jobs, pages, prefixes, scheduler, slots

MAX_LIVES = 500


def replace(cls, name, function):
    return lambda patch: patch.setattr(cls, name, function)


def edit(cls, name, old, new):
    """Replace `old` by `new` in the source of a method."""

    def apply(patch):
        method = cls.__dict__[name]
        function = method.fget if isinstance(method, property) else method
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) >= 1, f"{name} does not contain {old!r}"
        source = "from __future__ import annotations\n" + source.replace(old, new)
        scope = dict(vars(sys.modules[cls.__module__]))
        exec(compile(source, f"<mutant of {name}>", "exec"), scope)
        mutant = scope[name]
        patch.setattr(cls, name, mutant)

    return apply


Pool, Limits, Compressor = pages.PagePool, admission.Limits, jobs.Compressor
Scheduler, Prefixes, QuerySlots = scheduler.Scheduler, prefixes.Prefixes, slots.QuerySlots

MUTANTS = {
    # Pages
    "the null page is handed out": edit(
        Pool, "reset", "range(self.num_pages - 1, NULL_PAGE, -1)", "range(self.num_pages - 1, -1, -1)"
    ),
    "a released page is lost": edit(Pool, "release", "self._blank.append(page)", "pass"),
    "a release frees shared pages": edit(Pool, "release", "if count == 0:", "if True:"),
    "a hit is not counted": edit(Pool, "retain", "self.counts[page] += 1", "self.counts[page] = 1"),
    "a revived page stays free": edit(Pool, "retain", "del self._revivable[page]", "pass"),
    "a reused page stays in the map": edit(
        Pool, "allocate", "del self._node_of[self._key_of.pop(page)]", "self._key_of.pop(page)"
    ),
    "a rewritten page stays in the map": replace(Pool, "forget", lambda self, page: None),
    "a match ignores the parent": edit(
        Pool, "match", "(parent, tokens)", "(next((k[0] for k in self._node_of if k[1] == tokens), 0), tokens)"
    ),
    "a match ignores the tokens": edit(
        Pool,
        "match",
        "self._node_of.get((parent, tokens))",
        "next((n for k, n in self._node_of.items() if k[0] == parent), None)",
    ),
    # Prefixes of requests
    "a page is registered before it is full": edit(
        Prefixes,
        "register",
        "// self._pool.page_size",
        "// self._pool.page_size + (seq.cache_len % self._pool.page_size > 1)",
    ),
    "a hit covers the last token": edit(Limits, "max_hits", "(seq.prefill_len - 1)", "seq.prefill_len"),
    "a hit covers the page of the window's queries": edit(Limits, "max_hits", "if self.compresses(seq):", "if False:"),
    "the chain is not continued after a hit": edit(
        Prefixes, "match", "seq.chain = found[-1][1] if found else 0", "seq.chain = 0"
    ),
    # Compression
    "shared pages are targets": edit(Compressor, "_assign_targets", "if pool.counts[page] == 1", ""),
    "old pages are not released": edit(Compressor, "_complete", "self._pool.release(", "list("),
    "old pages are released before the other rows have targets": edit(
        Compressor,
        "_start",
        "self._on_start(seq)",
        "self._on_start(seq); self._pool.release([p for p in seq.page_ids if p not in seq.pending_ids])",
    ),
    "no page for further decoding": edit(Compressor, "_assign_targets", "seq.budget_pages + 1", "seq.budget_pages"),
    "the history is forgotten": edit(Compressor, "_job", "if seq.num_evicted else 0", "if False else 0"),
    "targets out of order": edit(
        Compressor,
        "_complete",
        "seq.page_ids, seq.pending_ids = seq.page_ids, seq.pending_ids, []",
        "seq.page_ids, seq.pending_ids = seq.page_ids, seq.pending_ids[::-1], []",
    ),
    "positions restart": edit(
        Compressor,
        "_complete",
        "seq.num_evicted += seq.cache_len - held",
        "seq.num_evicted += seq.cache_len - held - 1",
    ),
    "slices overlap": edit(
        Compressor, "plan", "self._layer = stop\n", "self._layer = stop - (stop < self._num_layers)\n"
    ),
    "decodes while it compresses": edit(
        Scheduler, "_on_compress", "self._move(seq, Status.COMPRESSING)", "self._move(seq, Status.DECODE)"
    ),
    "compresses one page too late": edit(
        Limits, "next_compress_len", "pages = max(budget + 1,", "pages = max(budget + 2,"
    ),
    "a long prompt compresses at N_max": edit(
        Limits, "next_compress_len", "held + ceil_div(max(0, seq.num_prompt - seq.num_written), size)", "0"
    ),
    # Slots
    "a slot is not given back": edit(QuerySlots, "leave", "self.free.append(seq.query_slot)", "pass"),
    "nobody waits for a slot": edit(Scheduler, "_set_event", "if seq.wants_slot", "if False and seq.wants_slot"),
    "a slot is late by one entry": edit(
        Limits, "slot_len", "- self.config.compression.window", "- self.config.compression.window + 1"
    ),
    "prefill needs no slot": edit(Scheduler, "_admit", "if needs_slot or constrained:", "if constrained:"),
    "slot holders may exceed the pool": edit(
        QuerySlots, "fits", "self.num_set_aside + seq.slot_pages <= self._num_pages", "True"
    ),
    "constrained admits more than M": edit(Scheduler, "_admit", "self.num_running >= self.limits.num_slots", "False"),
    # Preemption and ends
    "compressed requests are preempted": edit(Scheduler, "_on_compress", "self._victims.pop(seq, None)", "pass"),
    "a preempted request loses a token": edit(
        Scheduler, "_requeue", "seq.forget_cache()", "seq.forget_cache(); seq.all_ids[-1:] = []"
    ),
    "a preempted request keeps its seat": edit(
        Scheduler, "_release", "self._seats.append(seq.seat)", "self._seats.append(seq.seat) if seq.finished else None"
    ),
    "a preempted request does not wait for its token": edit(Scheduler, "_admit", "if seq.in_flight:", "if False:"),
    "pages in the making are leaked": edit(
        Scheduler, "_release", "[page for page in seq.pending_ids if page not in held]", "[]"
    ),
    "pages are not counted again": edit(
        Scheduler,
        "_obtain",
        "while self.pool.num_free < num_needed(seq):",
        "num = num_needed(seq)\n    while self.pool.num_free < num:",
    ),
    "an aborted request keeps waiting": edit(Scheduler, "_end", "del self.waiting[seq]", "pass"),
    "late tokens are taken": edit(
        Scheduler, "commit", "if live is not rows and seq.status is Status.FINISHED:", "if False:"
    ),
    "one token too many": edit(Scheduler, "_at_event", "seq.num_tokens >= seq.max_len", "seq.num_tokens > seq.max_len"),
    "stops are ignored": edit(Scheduler, "_check_stop", "token in seq.stop_ids", "False"),
    "min_tokens is ignored": edit(Scheduler, "_check_stop", "and len(seq.all_ids) >= seq.min_len", ""),
    "nothing is refused": edit(Limits, "accept", "if prefill > usable:", "if False:"),
    "outgrown requests wait for ever": edit(
        Limits, "accept", "seq.max_len = min(seq.max_len, usable * size + 1)", "pass"
    ),
    "a failure forgets the prefix map's pages only": edit(
        Scheduler, "reset_after_failure", "self.pool.reset()", "None"
    ),
    "a failure keeps lost tokens": edit(Scheduler, "reset_after_failure", "seq.num_tokens = len(seq.all_ids)", "pass"),
    "a failure prefills compressed requests": edit(Scheduler, "reset_after_failure", "if seq.compressed", "if False"),
    # Prefill
    "a chunk is one token short": edit(
        Scheduler, "_add_chunk", "start=start, length=length", "start=start, length=max(1, length - 1)"
    ),
    "a chunk ignores the next compression": edit(
        Scheduler, "_add_chunk", "if self.limits.compresses(seq):", "if False:"
    ),
    "chunks exceed the budget": edit(Scheduler, "_plan_prefill", "budget -= self._add_chunk", "self._add_chunk"),
    "reserves leak": edit(Scheduler, "_release", "self._reserved -= seq.reserve", "pass"),
}


KILLERS = {
    "the chain is not continued after a hit": test_scheduler_queue.test_pages_after_a_hit_continue_its_chain,
    "pages in the making are leaked": test_scheduler_limits.test_abort_frees_the_fresh_targets_of_a_compression_in_flight,
    "pages are not counted again": test_scheduler_queue.test_a_compression_counts_its_pages_again_after_each_preemption,
}
"""Cases for what is too rare in random lives."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    for seed in range(MAX_LIVES):
        try:
            random_world(random.Random(seed)) if name not in KILLERS else KILLERS[name]()
        except Exception:  # Any failure is a kill: an assertion of the checks, or of the code itself.
            return
    pytest.fail(f"survived {MAX_LIVES} lives")
