"""Scheduler rules, one case each: when to compress, who holds a slot, who gives way, what is shared, what is refused."""

import itertools
import random

import pytest

from tests.scheduler_world import BASES, World, act, draw_request
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.request import SamplingParams, Sequence, Status
from zipage_jax.scheduler import Scheduler

TOKEN = 7


def build(*, budget=2, window=2, slots=4, pages=32, size=4, layers=4, model_len=512, **options) -> Scheduler:
    """A scheduler with pages of 4 entries; `budget=None` is full KV. `pages` excludes the null page."""
    own = {
        key: options.pop(key)
        for key in ("max_rows", "layer_stride", "compress_during_prefill", "sink_len")
        if key in options
    }
    compression = None if budget is None else CompressionConfig(budget_pages=budget, window=window, **own)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "async_compression": False} | options
    config = EngineConfig(page_size=size, num_pages=pages + 1, compression=compression, **options)
    return Scheduler(
        config, num_pages=pages + 1, num_slots=slots if compression else 0, num_layers=layers, max_model_len=model_len
    )


def request(scheduler: Scheduler, prompt, max_tokens=100, name=None, **params) -> Sequence:
    prompt = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    name = name or f"r{len(scheduler._requests)}"
    seq = Sequence(name, prompt, SamplingParams(max_tokens=max_tokens, **params), eos_ids=(1,))
    scheduler.add(seq)
    return seq


def step(scheduler: Scheduler, num=1, token=TOKEN):
    """Plan and commit `num` steps at once; returns the last plan."""
    for _ in range(num):
        plan = scheduler.plan()
        commit(scheduler, plan, token)
    return plan


def commit(scheduler, plan, token=TOKEN, hook=None):
    return scheduler.commit(plan, [token] * (len(plan.decode) + sum(chunk.samples for chunk in plan.prefill)), hook)


def drain(scheduler: Scheduler, limit=5_000):
    plans = []
    while scheduler.has_unfinished():
        plans.append(step(scheduler))
        assert len(plans) < limit, "never ends"
    assert scheduler.pool.num_used == 0
    return plans


# When and how a request compresses


def test_a_request_compresses_exactly_when_its_next_token_needs_an_entry_past_n_max_pages():
    scheduler = build()
    seq = request(scheduler, 5)
    step(scheduler)
    lengths = []
    for _ in range(30):
        plan = step(scheduler)
        if plan.compress:
            (job,) = plan.compress
            lengths.append(seq.num_written)
            assert len(job.source_page_ids) == 3 and len(job.target_page_ids) == job.budget_pages == 2
            assert job.history_len == (0 if len(lengths) == 1 else 8)
            assert job.layers == (0, 4) and plan.decode == (seq,), "synchronous: it decodes in the same step"
            assert seq.cache_len == 9 and seq.page_ids[:2] == list(job.target_page_ids) and len(seq.page_ids) == 3
        assert seq.position == seq.num_written - 1 and seq.cache_len <= 12
    assert lengths == [13, 17, 21, 25, 29, 33]
    assert seq.stats.num_compressions == 6 and seq.stats.entries_evicted == 24 and seq.stats.peak_pages == 3


def test_a_prompt_longer_than_n_max_pages_is_kept_whole_until_its_last_page_is_full():
    scheduler = build()
    seq = request(scheduler, 18)
    step(scheduler)
    assert len(seq.page_ids) == 5
    assert not step(scheduler, 2).compress and seq.cache_len == 20
    assert step(scheduler).compress and seq.cache_len == 9
    assert seq.stats.num_compressions == 1 and seq.stats.entries_evicted == 12 and len(seq.page_ids) == 3
    assert scheduler.pool.num_used == 3


@pytest.mark.parametrize("num_prompt", [12, 16])
def test_a_prompt_of_whole_pages_compresses_before_its_first_decode(num_prompt):
    scheduler = build()
    seq = request(scheduler, num_prompt)
    assert step(scheduler).prefill[0].samples
    plan = step(scheduler)
    assert plan.compress[0].seq is seq and plan.decode == (seq,) and seq.cache_len == 9


def test_asynchronous_slices_let_the_others_decode_on():
    scheduler = build(async_compression=True, layer_stride=3, layers=9)
    first, other = request(scheduler, 12), request(scheduler, [9, 9])
    step(scheduler)
    seen = []
    for _ in range(3):
        plan = step(scheduler)
        seen.append([job.layers for job in plan.compress])
        assert other in plan.decode
        assert (first in plan.decode) == (len(seen) == 3), "it decodes in the step of its last slice"
        assert plan.compress[0].source_page_ids == plan.compress[-1].source_page_ids
    assert seen == [[(0, 3)], [(3, 6)], [(6, 9)]]


def test_rows_of_a_job_are_capped_and_the_rest_waits_its_turn():
    scheduler = build(max_rows=3, slots=8, pages=64)
    for n in range(8):
        request(scheduler, [n] * 12)
    step(scheduler)
    assert [len(step(scheduler).compress) for _ in range(3)] == [3, 3, 2]


def test_a_step_takes_one_slice_more_for_every_full_job_that_waits():
    scheduler = build(
        max_rows=2, slots=8, pages=64, max_num_batched_tokens=128, async_compression=True, layer_stride=1, layers=4
    )
    for n in range(7):
        request(scheduler, [n] * 12, max_tokens=3)
    step(scheduler)
    jobs = [step(scheduler).compress for _ in range(9)]
    assert [(len(job), job[0].layers) for job in jobs] == [
        (2, (0, 3)),
        (2, (3, 4)),
        (2, (0, 2)),
        (2, (2, 4)),
        (2, (0, 1)),
        (2, (1, 2)),
        (2, (2, 3)),
        (2, (3, 4)),
        (1, (0, 1)),
    ]


def test_a_compression_during_prefill_never_holds_more_than_n_max_and_a_chunk():
    scheduler = build(compress_during_prefill=True, max_num_batched_tokens=16, pages=64, model_len=4096)
    seq = request(scheduler, 1000, max_tokens=30)
    plans = drain(scheduler)
    assert seq.stats.peak_pages <= 3 + 4 and seq.stats.num_compressions > 60
    assert sum(chunk.length for plan in plans for chunk in plan.prefill) == 1000
    assert len(seq.output_ids) == 30


# Targets (SPEC §11)


def test_shared_pages_are_not_targets_and_lose_a_reference():
    scheduler = build(slots=4, max_rows=1)
    prompt = list(range(50, 62))
    first, second = request(scheduler, prompt), request(scheduler, [*prompt, 3, 4])
    step(scheduler)
    shared = first.page_ids[:3]
    assert second.page_ids[:3] == shared, "a hit within one batch"
    plan = step(scheduler)
    assert scheduler.counters.all_shared_compressions == 1
    assert not set(plan.compress[0].target_page_ids) & set(shared) and not set(first.page_ids) & set(shared)
    assert [scheduler.pool.counts[page] for page in shared] == [1, 1, 1]


def test_own_pages_are_targets_before_fresh_ones():
    scheduler = build(max_rows=1)
    prompt = list(range(50, 62))
    first, second = request(scheduler, prompt), request(scheduler, [*prompt[:8], 3])
    step(scheduler)
    assert second.page_ids[:2] == first.page_ids[:2]
    own, used = first.page_ids[2], scheduler.pool.num_used
    job = step(scheduler).compress[0]
    assert job.target_page_ids[0] == own and scheduler.counters.shared_compressions == 1
    assert scheduler.pool.num_used == used + 2, "max(0, B + 1 − (N − P)) fresh pages"


def test_pages_released_by_a_first_compression_stay_revivable():
    scheduler = build()
    prompt = list(range(50, 70))
    first = request(scheduler, prompt)
    step(scheduler, 3)
    assert first.stats.num_compressions == 1
    second = request(scheduler, prompt)
    step(scheduler)
    assert second.stats.num_cached_tokens == 8, "the two heads that were no targets"


def test_a_target_leaves_the_prefix_map_before_it_is_written():
    scheduler = build(async_compression=True, layer_stride=1)
    prompt = list(range(50, 62))
    request(scheduler, prompt)
    step(scheduler, 2)
    second = request(scheduler, prompt)
    step(scheduler)
    assert second.stats.num_cached_tokens == 0


# Query slots (SPEC §10)


def test_without_a_slot_a_request_decodes_up_to_the_window_of_its_last_page_and_then_waits():
    scheduler = build(slots=1)
    first, second = request(scheduler, [5] * 5), request(scheduler, [6] * 5)
    step(scheduler, 20)
    assert first.query_slot == 1 and first.stats.num_compressions > 0
    assert second.query_slot == 0 and second.status is Status.SUSPENDED
    assert second.cache_len == 10, "the next entry's offset is page_size − window in page N_max"
    scheduler.abort(first.request_id)
    plan = step(scheduler)
    assert second.query_slot == 1 and plan.decode == (second,)


def test_a_freed_slot_goes_to_the_foremost_without_one():
    scheduler = build(slots=1)
    first, second, third = (request(scheduler, [n] * 9) for n in range(5, 8))
    step(scheduler, 8)
    assert [seq.query_slot for seq in (first, second, third)] == [1, 0, 0]
    scheduler.abort(first.request_id)
    step(scheduler)
    assert [seq.query_slot for seq in (second, third)] == [1, 0]


def test_a_prompt_that_ends_in_the_window_of_page_n_max_needs_its_slot_before_prefill():
    scheduler = build(slots=1)
    request(scheduler, [5] * 5)
    waits, behind = request(scheduler, [6] * 11), request(scheduler, [8] * 3)
    step(scheduler)
    assert waits.status is behind.status is Status.WAITING, "first come, first served"
    scheduler = build(slots=1)
    request(scheduler, [5] * 5)
    admitted = request(scheduler, [6] * 10)
    step(scheduler)
    assert admitted.status is Status.DECODE


def test_requests_that_never_compress_take_no_slot():
    scheduler = build(slots=1)
    short, full, long = (
        request(scheduler, 5, max_tokens=8),
        request(scheduler, 30, kv_budget="full"),
        request(scheduler, 5),
    )
    step(scheduler, 3)
    assert [seq.query_slot for seq in (short, full, long)] == [0, 0, 1]
    assert short.position == 6 or short.finished


def test_slot_holders_could_all_hold_n_max_pages_at_once():
    scheduler = build(slots=4, pages=7)
    first, second, third = (request(scheduler, [n] * 3, kv_budget=budget) for n, budget in ((5, 8), (6, 12), (7, 8)))
    step(scheduler, 2)
    assert [bool(seq.query_slot) for seq in (first, second, third)] == [True, True, False]
    drain(scheduler)


def test_constrained_scheduling_runs_at_most_m_requests_and_preempts_nobody():
    scheduler = build(slots=2, scheduling="constrained", enable_prefix_caching=False, pages=6)
    for n in range(6):
        request(scheduler, [n] * 9, max_tokens=20)
    most = 0
    while scheduler.has_unfinished():
        step(scheduler)
        most = max(most, scheduler.num_running)
    assert most == 2 and scheduler.counters.preemptions == 0


# Preemption


def test_the_last_uncompressed_request_gives_way_and_returns_with_its_tokens():
    scheduler = build(budget=None, pages=6)
    first, second = request(scheduler, [5] * 8, max_tokens=16), request(scheduler, [6] * 7, max_tokens=12)
    step(scheduler)
    while second.status is not Status.WAITING:
        step(scheduler)
    kept = list(second.output_ids)
    assert kept and first.stats.num_preemptions == 0
    drain(scheduler)
    assert second.output_ids[: len(kept)] == kept and len(second.output_ids) == 12
    assert first.stats.num_preemptions == 0


def test_compressed_requests_are_never_preempted():
    scheduler = build(pages=8, slots=2)
    first, second = request(scheduler, [5] * 12, max_tokens=60), request(scheduler, [6] * 12, max_tokens=60)
    full = request(scheduler, [8] * 3, max_tokens=28, kv_budget="full")
    drain(scheduler)
    assert first.stats.num_preemptions == second.stats.num_preemptions == 0 and full.stats.num_preemptions > 0
    assert len(full.output_ids) == 28


def test_nobody_is_preempted_for_a_request_that_may_have_ended():
    scheduler = build(budget=None, pages=6)
    first, second = request(scheduler, [5] * 8, max_tokens=16), request(scheduler, [6] * 7, max_tokens=12)
    plan, pending = scheduler.plan(), None
    while first.status is not Status.BLOCKED:
        if pending:
            commit(scheduler, pending)
        plan, pending = scheduler.plan(), plan
    # The first needs a page, and the token that it would write is not known yet: it was an end-of-sequence token.
    assert first not in plan.decode and second.status is Status.DECODE and scheduler.counters.preemptions == 0
    commit(scheduler, pending, token=1)
    assert first.finish_reason == "stop" and scheduler.counters.preemptions == 0


def test_preempted_requests_keep_their_order_at_the_front():
    scheduler = build(pages=20, slots=8)
    running = [request(scheduler, [n] * 5) for n in range(4)]
    step(scheduler, 2)
    last = request(scheduler, 4)
    for seq in reversed(running[1:]):
        scheduler._preempt(seq)
    assert list(scheduler.waiting) == [*running[1:], last]


def test_admission_leaves_room_for_what_the_running_ones_are_about_to_need():
    scheduler = build(budget=None, pages=9, max_num_seqs=8)
    seqs = [request(scheduler, [n] * 3, max_tokens=21) for n in range(8)]
    stints, since = [], {}
    while scheduler.has_unfinished():
        before = set(scheduler.running())
        step(scheduler)
        running = set(scheduler.running())
        since |= {seq: len(seq.all_ids) for seq in running - before}
        stints += [len(seq.all_ids) - since[seq] for seq in before - running if not seq.finished]
    # Every request ends with six pages, so some must give way; but each first got on by a page of tokens.
    assert stints and min(stints) >= 4
    assert all(len(seq.output_ids) == 21 for seq in seqs)


def test_a_compression_counts_its_pages_again_after_each_preemption():
    """A due request shares all pages with one behind it; preempting that one is enough, it must not give way itself."""
    scheduler = build(pages=5)
    prompt = list(range(50, 62))
    first = request(scheduler, prompt, max_tokens=20)
    second = request(scheduler, [*prompt, 1, 2, 3, 4, 5], max_tokens=4)
    step(scheduler)
    assert second.page_ids[:3] == first.page_ids[:3] and scheduler.pool.num_free == 0
    step(scheduler)
    assert first.stats.num_compressions == 1 and first.stats.num_preemptions == 0
    drain(scheduler)


# Prefix cache


def test_64_requests_with_one_prompt_compute_its_shared_part_once():
    scheduler = build(
        budget=8,
        window=16,
        size=256,
        pages=1024,
        slots=100,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        model_len=4096,
    )
    prompt = list(range(1000))
    for n in range(64):
        request(scheduler, prompt, max_tokens=2, name=f"r{n}")
    plans = drain(scheduler)
    computed = sum(chunk.length for plan in plans for chunk in plan.prefill)
    assert computed == 1000 + 63 * (1000 - 768)
    assert scheduler.counters.cached_tokens == 63 * 768


def test_samples_of_a_request_share_full_pages_only():
    scheduler = build()
    prompt = list(range(50, 60))
    seqs = [Sequence("a", prompt, SamplingParams(n=3, max_tokens=5), index=i) for i in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    step(scheduler)
    assert seqs[0].page_ids[:2] == seqs[1].page_ids[:2] == seqs[2].page_ids[:2]
    assert len({seq.page_ids[2] for seq in seqs}) == 3
    assert scheduler.abort("a") == seqs and not scheduler.has_unfinished()


def test_without_prefix_caching_nothing_is_shared():
    scheduler = build(enable_prefix_caching=False)
    first, second = (request(scheduler, list(range(50, 62)), name=name) for name in "ab")
    step(scheduler)
    assert not set(first.page_ids) & set(second.page_ids) and scheduler.pool.num_registered == 0


def test_a_second_turn_finds_what_the_first_generated():
    scheduler = build(budget=None)
    first = request(scheduler, 6, max_tokens=11)
    drain(scheduler)
    second = request(scheduler, [*first.all_ids, 1, 2, 3])
    step(scheduler)
    assert second.stats.num_cached_tokens == 16, "16 of the first turn's 17 tokens were written"


def test_a_preempted_request_revives_its_own_pages():
    scheduler = build()
    seq = request(scheduler, 7, max_tokens=20)
    step(scheduler, 4)
    scheduler._preempt(seq)
    (chunk,) = step(scheduler).prefill
    assert chunk.start == 8 and chunk.length == len(seq.output_ids) - 1 + 7 - 8


@pytest.mark.parametrize("num_prompt", [12, 16])
def test_the_page_whose_queries_score_a_compression_is_computed_even_if_it_is_cached(num_prompt):
    scheduler = build(slots=2)
    prompt = list(range(50, 50 + num_prompt + 4))
    request(scheduler, prompt, max_tokens=1)
    drain(scheduler)
    seq = request(scheduler, prompt[:num_prompt])
    (chunk,) = scheduler.plan().prefill
    assert chunk.start == num_prompt - 4 and seq.query_slot
    # The same after a preemption that came between its first output and the compression.
    scheduler = build(slots=2)
    seq = request(scheduler, prompt[:num_prompt])
    step(scheduler)
    scheduler._preempt(seq)
    chunks = [step(scheduler).prefill[0] for _ in range(2)]
    assert [(c.start, c.length, c.samples) for c in chunks] == [(num_prompt - 4, 4, False), (num_prompt, 1, True)]
    assert seq.stats.num_compressions == 1


def test_pages_after_a_hit_continue_its_chain():
    scheduler = build(budget=None)
    head, tail = list(range(50, 58)), list(range(80, 85))
    request(scheduler, [*head, 1], max_tokens=1)
    drain(scheduler)
    request(scheduler, head + tail, max_tokens=1)
    drain(scheduler)
    for prompt, cached in (([*tail, 2], 0), (head + tail, 12)):
        seq = request(scheduler, prompt, max_tokens=1)
        step(scheduler)
        assert seq.stats.num_cached_tokens == cached


def test_prompt_log_probabilities_need_the_whole_prompt_computed():
    scheduler = build()
    request(scheduler, 12, max_tokens=1)
    drain(scheduler)
    request(scheduler, 12, prompt_logprobs=1)
    assert scheduler.plan().prefill[0].start == 0


# Chunked prefill


def test_long_prompts_are_prefilled_in_chunks_between_decode_steps():
    scheduler = build(max_num_batched_tokens=16, pages=64)
    short = request(scheduler, 3)
    step(scheduler)
    long = request(scheduler, [9] * 50)
    chunks = []
    while long.status is not Status.DECODE:
        plan = step(scheduler)
        assert short in plan.decode or plan.compress
        chunks += [(chunk.start, chunk.length, chunk.samples) for chunk in plan.prefill]
    assert chunks == [(0, 16, False), (16, 16, False), (32, 16, False), (48, 2, True)]


def test_batch_invariant_prefills_one_prompt_a_step_with_fixed_borders():
    scheduler = build(max_num_batched_tokens=16, pages=64, batch_invariant=True, enable_prefix_caching=False)
    for n in range(3):
        request(scheduler, [n] * 20, max_tokens=2)
    plans = drain(scheduler)
    chunks = [[(chunk.start, chunk.length) for chunk in plan.prefill] for plan in plans if plan.prefill]
    assert chunks == [[(0, 16)], [(16, 4)]] * 3


# Budgets, limits, refusals


def test_one_engine_serves_different_budgets():
    scheduler = build(pages=64, slots=8)
    asked = {"full": None, 6: 2, 16: 4, 0.25: 3}
    seqs = {budget: request(scheduler, [n] * 10, max_tokens=38, kv_budget=budget) for n, budget in enumerate(asked)}
    assert {budget: seq.budget_pages for budget, seq in seqs.items()} == asked
    drain(scheduler)
    assert {budget: seq.stats.peak_pages for budget, seq in seqs.items()} == {"full": 12, 6: 3, 16: 5, 0.25: 4}


@pytest.mark.parametrize(
    "options, ask, match",
    [
        ({}, {"kv_budget": 2}, r"kv_budget=2 keeps 2 entries; it must be more than window \+ sink_len = 2"),
        ({"sink_len": 1}, {"kv_budget": 3}, "window \\+ sink_len = 3"),
        ({}, {"kv_budget": 0.01}, "keeps 2 entries"),
        ({}, {"kv_budget": 128}, "budget of 32 pages needs 33, the pool has 32"),
        ({"budget": None}, {"kv_budget": 8}, "needs an engine with compression"),
        ({}, {"prompt": 140}, "140 tokens needs 35 pages of 4, the pool has 32"),
        ({"budget": None}, {"prompt": 140}, "needs 35 pages"),
        ({"model_len": 16}, {"prompt": 16}, "max_model_len=16 leaves no room"),
        ({}, {"prompt": []}, "the prompt is empty"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(options, ask, match):
    scheduler = build(**options)
    with pytest.raises(ValueError, match=match):
        request(scheduler, **({"prompt": 10, "max_tokens": 200} | ask))
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize(
    "options, match",
    [
        ({"pages": 2}, "budget_pages=2 needs N_max = 3 pages, the pool has 2"),
        ({"slots": 0}, "num_query_slots=0"),
        ({"model_len": 1}, "max_model_len=1"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3 is below page_size=4"),
    ],
)
def test_an_engine_that_can_run_nothing_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        build(**options)


def test_a_request_that_outgrows_the_pool_ends_with_length():
    scheduler = build(budget=None, pages=5)
    seq, other = request(scheduler, 6, max_tokens=400), request(scheduler, [9] * 3, max_tokens=9)
    drain(scheduler)
    assert seq.finish_reason == "length" and len(seq.all_ids) == 5 * 4 + 1
    assert other.finish_reason == "length" and len(other.output_ids) == 9


def test_the_model_length_ends_a_request():
    scheduler = build(model_len=40)
    seq = request(scheduler, 6, max_tokens=400)
    drain(scheduler)
    assert seq.finish_reason == "length" and len(seq.all_ids) == 40


# Stops and ends


def test_stops_by_token_string_and_length():
    scheduler = build()
    eos, stop, string, length = (
        request(scheduler, [n], max_tokens=4, stop_token_ids=(9,), name=str(n)) for n in range(4)
    )
    plan = scheduler.plan()
    changed = scheduler.commit(plan, [1, 9, 5, 5], lambda seq, index, token: "end" if index == 2 else None)
    assert changed == [eos, stop, string, length]
    assert [(seq.finish_reason, seq.stop_reason) for seq in changed[:3]] == [
        ("stop", None),
        ("stop", 9),
        ("stop", "end"),
    ]
    drain(scheduler)
    assert length.finish_reason == "length" and length.output_ids == [5, 7, 7, 7]


def test_min_tokens_and_ignore_eos():
    scheduler = build()
    patient, deaf = (
        request(scheduler, 3, max_tokens=6, min_tokens=3),
        request(scheduler, 3, max_tokens=6, ignore_eos=True),
    )
    while scheduler.has_unfinished():
        step(scheduler, token=1)
    assert len(patient.output_ids) == 3 and len(deaf.output_ids) == 6


def test_a_token_that_comes_after_the_end_is_dropped():
    scheduler = build()
    seq = request(scheduler, 3)
    first = scheduler.plan()
    second = scheduler.plan()
    assert second.decode == (seq,)
    assert commit(scheduler, first, token=1) == [seq] and seq.finished
    assert commit(scheduler, second) == [] and seq.output_ids == [1] and not scheduler._late


def test_the_last_token_frees_everything_before_it_is_known():
    scheduler = build()
    seq = request(scheduler, 3, max_tokens=1)
    plan = scheduler.plan()
    assert scheduler.plan().empty and seq.status is Status.DRAINING and scheduler.pool.num_used == 0
    commit(scheduler, plan)
    assert seq.finish_reason == "length" and not scheduler.has_unfinished()


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.FINISHED])
def test_abort_frees_everything_in_any_state(status):
    scheduler = build(
        slots=2, pages=12, async_compression=True, layer_stride=1, max_num_batched_tokens=8, max_rows=1, max_num_seqs=5
    )
    for n in range(40):
        request(scheduler, [n] * (3 + n % 9), max_tokens=1 + n, kv_budget=(None, "full", None)[n % 3])
    pending = None
    for _ in range(2_000):
        plan = scheduler.plan()
        found = [seq for samples in scheduler._requests.values() for seq in samples if seq.status is status]
        if found:
            break
        if pending:
            commit(scheduler, pending)
        pending = plan
    (seq,) = scheduler.abort(found[-1].request_id)
    assert seq is found[-1] and seq.finish_reason == "abort" and seq in scheduler.take_ended()
    assert not seq.page_ids and not seq.pending_ids and seq.seat == -1 and seq.query_slot == 0
    assert scheduler.abort(seq.request_id) == scheduler.abort("unknown") == []
    for late in filter(None, (pending, plan)):
        commit(scheduler, late)
    for request_id in list(scheduler._requests):
        scheduler.abort(request_id)
    assert scheduler.pool.num_used == 0 and not scheduler.has_unfinished()
    assert len(scheduler.slots.free) == 2 and len(scheduler._seats) == 5


def test_abort_frees_the_fresh_targets_of_a_compression_in_flight():
    scheduler = build(async_compression=True, layer_stride=1)
    prompt = list(range(50, 62))
    first, second = request(scheduler, prompt), request(scheduler, [*prompt, 3, 4])
    step(scheduler, 2)
    assert first.status is Status.COMPRESSING and len(set(first.pending_ids) - set(first.page_ids)) == 3
    scheduler.abort(first.request_id)
    assert scheduler.pool.num_used == len(second.page_ids)


def test_seats_are_stable_and_reused():
    scheduler = build(max_num_seqs=2)
    seqs = [request(scheduler, [n] * 3, max_tokens=4 + n) for n in range(4)]
    seats = {}
    while scheduler.has_unfinished():
        step(scheduler)
        for seq in scheduler.running():
            assert seats.setdefault(seq, seq.seat) == seq.seat < 2
    assert set(seats) == set(seqs)


def test_a_failed_step_ends_compressed_requests_and_prefills_the_others_again():
    scheduler = build(slots=2)
    compressed, plain, waiting = request(scheduler, [5] * 12), request(scheduler, [6] * 3), request(scheduler, [7] * 11)
    step(scheduler, 3)
    lost = scheduler.plan()
    assert plain in lost.decode and plain.in_flight == 1
    assert scheduler.reset_after_failure("boom") == [compressed]
    assert compressed.finish_reason == "error" and compressed.error == "boom"
    assert scheduler.pool.num_used == scheduler.pool.num_registered == 0 and plain.in_flight == 0
    (first, *_) = step(scheduler).prefill
    assert first.seq is plain and first.length == len(plain.all_ids) - 1
    assert waiting.status is not Status.FINISHED
    assert (
        set(scheduler.reset_after_failure("boom", end_all=True)) == {plain, waiting} and not scheduler.has_unfinished()
    )


def test_an_exception_in_the_callback_leaves_the_other_requests_alone():
    scheduler = build()
    request(scheduler, 3)
    plan = scheduler.plan()
    with pytest.raises(RuntimeError, match="broken"):
        commit(scheduler, plan, hook=lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    assert scheduler.reset_after_failure("broken") == []
    drain(scheduler)


# Independence


@pytest.mark.parametrize("during_prefill", [False, True])
def test_outputs_are_those_of_each_request_alone_whatever_the_schedule(during_prefill):
    """Every combination returns what the mirror computed without pages (checked by World.finish)."""
    requests = random.Random(4)
    outputs = []
    for asynchronous, caching, scheduling, pages in itertools.product(
        [True, False], [True, False], ["hybrid", "constrained"], [15, 60]
    ):
        compression = CompressionConfig(
            budget_pages=2, window=2, layer_stride=1, max_rows=2, compress_during_prefill=during_prefill
        )
        config = EngineConfig(
            page_size=4,
            num_pages=pages + 1,
            max_num_seqs=6,
            max_num_batched_tokens=12,
            scheduling=scheduling,
            enable_prefix_caching=caching,
            async_compression=asynchronous,
            compression=compression,
        )
        world = World(config, num_slots=3)
        requests.seed(4)
        for _ in range(12):
            prompt, params = draw_request(requests.choice, config)
            if len(prompt) <= 40 and params.kv_budget not in ("full", 2):
                world.add(prompt, params)
        world.finish()
        outputs.append([seq.output_ids for seq in world.expected])
    assert all(output == outputs[0] for output in outputs) and any(outputs[0])


def test_random_lives_keep_the_invariants():
    for seed in range(60):
        choose = random.Random(seed).choice
        world = World(
            EngineConfig(
                page_size=2,
                num_pages=10,
                max_num_seqs=5,
                max_num_batched_tokens=6,
                compression=CompressionConfig(budget_pages=2, window=1, layer_stride=1, max_rows=1),
            ),
            num_slots=2,
        )
        world.add(BASES[0][:7], SamplingParams(n=3, max_tokens=9))
        for _ in range(20):
            act(world, choose)
        world.finish()
