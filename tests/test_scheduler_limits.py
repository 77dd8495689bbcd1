"""Budgets, refusals, stops and ends."""

import pytest

from tests.scheduler_cases import build, commit, drain, request, step
from zipage_jax.request import Status

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


def test_without_max_tokens_a_request_goes_on_until_max_model_len():
    scheduler = build(model_len=40)
    full, share = (request(scheduler, [n] * 10, max_tokens=None, kv_budget=b) for n, b in enumerate(("full", 0.25)))
    assert share.budget_pages == 3
    drain(scheduler)
    assert [(seq.finish_reason, len(seq.all_ids)) for seq in (full, share)] == [("length", 40)] * 2


def test_a_share_is_of_what_was_asked_for():
    """Also where max_model_len ends the request before."""
    scheduler = build(model_len=40)
    assert request(scheduler, 10, max_tokens=54, kv_budget=0.25).budget_pages == 4


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
