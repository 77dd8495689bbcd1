"""A small scheduler and how to drive it, for cases that look at single plans."""

from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.request import SamplingParams, Sequence
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
