"""When a request compresses, which pages take what is kept, and who holds a query slot."""

import pytest

from tests.scheduler_cases import build, drain, request, step
from zipage_jax.request import Status

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


# Targets


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


# Query slots


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
