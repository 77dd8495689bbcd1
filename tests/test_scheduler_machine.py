"""The invariants I1–I14 after every step of random lives of the scheduler: a Hypothesis state machine on a shadow device."""

import functools
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.scheduler_world import World, add_family, draw_config, draw_request


@functools.cache
def below(num: int) -> st.SearchStrategy[int]:
    return st.integers(0, num - 1)


def chooser(data):
    """Picks one of a sequence of options."""
    return lambda options: options[data.draw(below(len(options)))]


class SchedulerMachine(RuleBasedStateMachine):
    """add / step / abort / preempt / lose the device, in any order; every example is run to its end."""

    totals: ClassVar[Counter] = Counter()

    @initialize(data=st.data())
    def start(self, data):
        self.world = World(*draw_config(chooser(data)))

    @rule(data=st.data())
    def add(self, data):
        self.world.add(*draw_request(chooser(data), self.world.config))

    @rule(data=st.data())
    def add_family(self, data):
        add_family(self.world, chooser(data))

    @rule(data=st.data())
    def run_family(self, data):
        self.world.finish()
        add_family(self.world, chooser(data))
        self.step(4)

    @precondition(lambda self: self.world.scheduler.has_unfinished())
    @rule(num=st.sampled_from([1, 1, 2, 4, 8]))
    def step(self, num):
        for _ in range(num):
            self.world.step()

    @precondition(lambda self: self.world.scheduler.has_unfinished())
    @rule()
    def step_and_wait(self):
        self.world.step(late=False)

    @precondition(lambda self: self.world.num_added)
    @rule(which=st.integers(0, 1000))
    def abort(self, which):
        self.world.abort(str(which % self.world.num_added))

    @rule(which=st.integers(0, 5))
    def preempt(self, which):
        self.world.preempt(which)

    @precondition(lambda self: self.world.steps % 8 == 7)
    @rule(end_all=st.sampled_from([False, False, False, True]))
    def fail(self, end_all):
        self.world.fail(end_all)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()
            type(self).totals.update(self.world.totals)
            type(self).totals["examples"] += 1


def run(max_examples: int, step_count: int) -> Counter:
    """Counters of `max_examples` examples of up to `step_count` operations."""
    SchedulerMachine.totals = Counter()
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=max_examples, stateful_step_count=step_count)
    )
    return SchedulerMachine.totals


def test_invariants_hold_in_random_lives():
    totals = run(max_examples=120, step_count=50)
    assert all(totals[name] for name in ("compressions", "preemptions", "revivals", "shared_compressions", "error"))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_invariants_hold_in_the_record():
    """20,000 examples of 50 operations; prints what they met (-s)."""
    totals = run(max_examples=20_000, step_count=50)
    print(dict(totals))
    assert totals["examples"] >= 20_000
    for name in ("compressions", "preemptions", "revivals", "shared_compressions", "all_shared_compressions"):
        assert totals[name] >= 1_000, f"{name}: {totals[name]}"
