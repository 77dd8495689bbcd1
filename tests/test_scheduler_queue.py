"""Who gives way, what is shared, how prompts are cut, and that none of it changes what a request returns."""

import itertools
import random

import pytest

from tests.scheduler_cases import build, commit, drain, request, step
from tests.scheduler_world import BASES, World, act, draw_request
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.request import SamplingParams, Sequence, Status

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
