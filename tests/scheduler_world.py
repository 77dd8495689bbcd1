"""A world to run the real scheduler in: the shadow device, requests drawn from a few families, one step late as in the engine.

Every step is followed by all checks that hold at any time; `finish` runs to the end and checks what holds only then. What a
request must return, how long it may get and whether it must be refused is computed here from the specification alone.
"""

from collections import Counter

from tests.reference.shadow import VOCAB, Mirror, Shadow, check_books
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.request import SamplingParams, Sequence, Status
from zipage_jax.scheduler import Scheduler

MAX_MODEL_LEN = 60
MAX_QUIET_STEPS = 150
"""Steps without a token or a completed compression that are taken for a hang (a few dozen prompts of 60 tokens, 2 at a time)."""


def draw_config(choose) -> tuple[EngineConfig, int]:
    """A small engine configuration and its number of slots; `choose` picks from a list."""
    page_size = choose([2, 3, 4])
    usable = choose([2, 3, 4, 5, 6, 8, 10, 14])
    compression = None
    if choose([True] * 9 + [False]):
        budget = choose(range(1, usable))
        window = choose(range(1, min(page_size, budget * page_size - 1) + 1))
        compression = CompressionConfig(
            budget_pages=budget,
            window=window,
            sink_len=0,
            layer_stride=choose([1, 2]),
            max_rows=choose([1, 2, 3]),
            compress_during_prefill=choose([False, False, True]),
        )
    config = EngineConfig(
        page_size=page_size,
        num_pages=usable + 1,
        max_num_seqs=choose(range(1, 7)),
        max_num_batched_tokens=choose(range(page_size, 21)),
        scheduling=choose(["hybrid", "hybrid", "constrained"]),
        enable_prefix_caching=choose([True, True, False]),
        async_compression=choose([True, False]),
        batch_invariant=choose([False, False, False, True]),
        compression=compression,
    )
    return config, (choose(range(1, 5)) if compression else 0)


class World:
    """The scheduler of `config`, a shadow device, and what its requests must return."""

    def __init__(self, config: EngineConfig, num_slots: int, num_layers: int = 2):
        self.config, self.num_slots = config, num_slots
        self.scheduler = Scheduler(
            config,
            num_pages=config.num_pages,
            num_slots=num_slots,
            num_layers=num_layers,
            max_model_len=MAX_MODEL_LEN,
        )
        window = config.compression.window if config.compression else 1
        self.shadow = Shadow(
            num_pages=config.num_pages,
            num_slots=num_slots,
            num_layers=num_layers,
            page_size=config.page_size,
            window=window,
        )
        self.num_layers, self.window = num_layers, window
        self.pending = None
        self.expected: dict[Sequence, list[int]] = {}
        self.seats: dict[Sequence, int] = {}
        self.compressed: set[Sequence] = set()
        self.refused = self.steps = self.quiet = self.num_added = 0

    # What the specification says

    def budget(self, num_prompt: int, params: SamplingParams) -> int | None:
        compression, asked = self.config.compression, params.kv_budget
        if compression is None or asked == "full":
            return None
        if asked is None:
            return compression.budget_pages
        entries = asked if isinstance(asked, int) else int(asked * (num_prompt + params.max_tokens))
        return -(-entries // self.config.page_size)

    def verdict(self, num_prompt: int, params: SamplingParams) -> tuple[int | None, int, int]:
        """(output tokens or None if it must be refused, pages of a prefill segment or 0, budget or 0)."""
        size, usable = self.config.page_size, self.config.num_pages - 1
        budget = self.budget(num_prompt, params)
        length = min(num_prompt + params.max_tokens, MAX_MODEL_LEN)
        if num_prompt >= MAX_MODEL_LEN:
            return None, 0, 0
        pages = -(-num_prompt // size)
        if budget is None:
            return (None if pages > usable else min(length, usable * size + 1) - num_prompt), 0, 0
        if isinstance(params.kv_budget, int | float):
            asked = params.kv_budget
            entries = asked if isinstance(asked, int) else int(asked * (num_prompt + params.max_tokens))
            if entries <= self.window:
                return None, 0, 0
        segment = 0
        limit = max(budget + 1, pages)
        if self.config.compression.compress_during_prefill:
            segment = max(budget + 1, min(budget + self.config.max_num_batched_tokens // size, usable))
            limit = min(limit, segment)
        if length - 1 > limit * size:
            refused = budget + 1 > usable or min(pages, limit) > usable
            return (None if refused else length - num_prompt), segment, budget
        return (None if pages > usable else min(length, usable * size + 1) - num_prompt), segment, budget

    # What happens

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        """Add a request of params.n samples."""
        request_id = str(self.num_added)
        self.num_added += 1
        num_outputs, segment, budget = self.verdict(len(prompt), params)
        for index in range(params.n):
            seq = Sequence(request_id, prompt, params, index=index, seed=index % 3, eos_ids=(1,))
            try:
                self.scheduler.add(seq)
            except ValueError:
                assert num_outputs is None, f"a request that can run was refused: {len(prompt)} tokens, {params}"
                self.refused += 1
                continue
            assert num_outputs is not None, f"a request that cannot run was accepted: {len(prompt)} tokens, {params}"
            mirror = Mirror(
                len(prompt),
                page_size=self.config.page_size,
                window=self.window,
                num_layers=self.num_layers,
                budget_pages=budget or None,
                segment_pages=segment,
                seed=seq.seed,
            )
            stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else {1})
            self.expected[seq] = mirror.outputs(prompt, num_outputs, stops, params.min_tokens)
            mirror.clear()
            self.shadow.follow(seq, mirror)
        return request_id

    def step(self, late: bool = True) -> None:
        """One engine step; `late=False` commits its tokens at once."""
        scheduler = self.scheduler
        plan = scheduler.plan()
        self.check(plan)
        assert sum(chunk.length for chunk in plan.prefill) <= self.config.max_num_batched_tokens
        if self.config.batch_invariant:
            assert len(plan.prefill) <= 1
        tokens = None if plan.empty else self.shadow.run(plan)
        if plan.empty and self.pending is None:
            assert not scheduler.has_unfinished(), (
                f"I10: stuck with {scheduler.running()} and {scheduler.num_waiting} waiting"
            )
        ended = [job for job in plan.compress if job.layers[1] == self.num_layers]
        self.quiet = 0 if tokens or ended or not scheduler.has_unfinished() else self.quiet + 1
        assert self.quiet < MAX_QUIET_STEPS, "I10: no token for too long"
        self.commit()
        self.pending = None if tokens is None else (plan, tokens)
        if not late:
            self.commit()
        self.steps += 1

    def commit(self) -> None:
        if self.pending is not None:
            self.scheduler.commit(*self.pending)
            self.pending = None
            self.check()

    def abort(self, request_id: str) -> None:
        for seq in self.scheduler.abort(request_id):
            assert seq.finish_reason == "abort" and not seq.page_ids
        self.check()

    def preempt(self, which: int) -> None:
        """Preempt a running sequence that may be preempted, whether or not pages are short."""
        victims = list(self.scheduler._victims)
        if victims:
            self.scheduler._preempt(victims[which % len(victims)])
            self.check()

    def fail(self, end_all: bool = False) -> None:
        """Lose the device's contents, and the tokens in flight with them."""
        self.pending = None
        for seq in self.scheduler.reset_after_failure("lost", end_all=end_all):
            assert seq.finish_reason == "error" and seq.error == "lost"
            assert end_all or seq in self.compressed, "I13: a request that could be prefilled again was given up"
        self.shadow.lose()
        self.seats.clear()
        self.check()

    def check(self, plan=None) -> None:
        """What holds after every operation."""
        scheduler = self.scheduler
        check_books(scheduler, num_slots=self.num_slots, max_num_seqs=self.config.max_num_seqs)
        running = scheduler.running()
        if plan is not None:
            self.compressed.update(job.seq for job in plan.compress)
            orders = [seq.order for seq in plan.decode]
            assert len(set(orders)) == len(orders)
            for job in plan.compress:
                if job.layers[1] < self.num_layers:
                    assert job.seq.status is Status.COMPRESSING and job.seq not in plan.decode
                else:
                    # It rejoins, with a page to decode into.
                    assert len(job.seq.page_ids) > job.budget_pages
                    prefilled = [chunk.length for chunk in plan.prefill if chunk.seq is job.seq]
                    assert job.seq in plan.decode or prefilled or job.seq.num_written < job.seq.prefill_len
        waiting = set(scheduler.waiting)
        assert not waiting & self.compressed, "I7: a compressed request was preempted"
        if self.config.scheduling == "constrained" and self.config.compression:
            assert len(running) <= self.num_slots
        # Seats do not change while a sequence runs.
        self.seats = {seq: self.seats.get(seq, seq.seat) for seq in running if seq.order >= 0}
        assert all(seq.seat == seat for seq, seat in self.seats.items() if seq.stats.num_preemptions == 0)

    def finish(self) -> None:
        """Run to the end; then everything is free and every request returned what it would have alone."""
        for _ in range(100_000):
            if not self.scheduler.has_unfinished() and self.pending is None:
                break
            self.step()
        self.check()
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_usable, "I12: pages are held after the last request"
        assert not self.scheduler._requests and not self.scheduler._late and self.scheduler.num_running == 0
        for seq, expected in self.expected.items():
            assert seq.finished and seq.status is Status.FINISHED
            if seq.finish_reason in ("abort", "error"):
                assert seq.output_ids == expected[: len(seq.output_ids)]
            else:
                assert seq.output_ids == expected, f"I11/I14: {seq} returned {seq.output_ids}, alone {expected}"
                assert seq.stats.length == len(seq.all_ids)

    @property
    def totals(self) -> Counter:
        """Counters of what happened."""
        counters = self.scheduler.counters
        names = ("admissions", "preemptions", "compressions", "shared_compressions", "all_shared_compressions")
        totals = Counter({name: getattr(counters, name) for name in (*names, "suspensions", "cached_tokens")})
        totals.update(counters.finished)
        totals["revivals"] = self.scheduler.pool.num_revived
        totals["hits within a batch"] = self.shadow.counts["hits within a batch"]
        totals.update(refused=self.refused, steps=self.steps)
        return totals


BASES = [[2 + 7 * (i + 12 * base) % (VOCAB - 2) for i in range(MAX_MODEL_LEN + 4)] for base in range(2)]
"""Two prompts that the others begin like. The second is the first without its first 12 tokens, so that a page of one follows
other pages in the other (12 is a multiple of every page size)."""


def draw_request(choose, config: EngineConfig) -> tuple[list[int], SamplingParams]:
    """A prompt that shares pages with others, often a whole number of them, and sampling parameters."""
    size = config.page_size
    base = choose(BASES)
    most = min(MAX_MODEL_LEN // size, config.num_pages + 1)
    shared = choose(range(most + 1)) * size + choose([0, 0, 0, 1, size - 1])
    prompt = base[:shared] + [choose(range(2, VOCAB)) for _ in range(choose([0, 0, 1, 2]))]
    budget = None
    if config.compression is not None:
        window = config.compression.window
        budget = choose([None, None, None, "full", window, window + 1, window + size, 0.5, 1.0])
    max_tokens = choose([1, 2, 3, size, 2 * size, 4 * size, 7 * size, MAX_MODEL_LEN])
    params = SamplingParams(
        n=choose([1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=choose([0, 0, max_tokens // 2]),
        ignore_eos=choose([True, True, False]),
        stop_token_ids=choose([None, None, (3, 9)]),
        kv_budget=budget,
    )
    return prompt or base[:1], params


def add_family(world: World, choose) -> None:
    """A request that compresses after its prompt, and a longer one that begins with all of its pages."""
    if world.config.compression is None:
        return
    first, second = BASES
    length = min(world.config.compression.max_pages * world.config.page_size, MAX_MODEL_LEN - 2)
    longer = min(length + choose([1, 2, world.config.page_size]), MAX_MODEL_LEN - 1)
    # While the first compresses, the second waits its turn and the third takes hold of all its pages.
    for prompt in (second[:length], first[:length], first[:longer])[choose([0, 1]) :]:
        world.add(prompt, SamplingParams(max_tokens=choose([3, 9]), ignore_eos=True))


def random_world(random) -> World:
    """A world that has lived through some dozen random operations and run to its end."""
    world = World(*draw_config(random.choice))
    for _ in range(random.randint(10, 40)):
        act(world, random.choice)
    world.finish()
    return world


def act(world: World, choose) -> None:
    """One random operation."""
    kind = choose(
        ["add"] * 5 + ["family"] * 2 + ["step"] * 9 + ["steps"] * 3 + ["abort", "preempt", "preempt", "wait", "fail"]
    )
    if kind == "add":
        world.add(*draw_request(choose, world.config))
    elif kind == "family":
        add_family(world, choose)
    elif kind == "abort":
        compressing = list(world.scheduler.compressor.rows)
        world.abort(choose(compressing).request_id if compressing else str(choose(range(world.num_added + 1))))
    elif kind == "preempt":
        world.preempt(choose(range(6)))
    elif kind == "wait":
        world.step(late=False)
    elif kind == "fail":
        if choose([True, False, False, False]):
            world.fail()
    else:
        for _ in range(1 if kind == "step" else 8):
            world.step()
