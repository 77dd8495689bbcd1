"""`python -m zipage_jax.bench compression`: seconds of each stage of a compression, and the workspace it takes.

A cache of random entries in the shapes of a model; `rows` requests of `pages` full pages each are compressed to `budget_pages`,
one slice of layers at a time, as the engine does. The last line is one JSON object.
"""

import functools
import json
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from models import SHAPES, ModelConfig
from pallas_kernels.select_entries import select_entries
from zipage_jax.compression import (
    compact_cache,
    compress_layers,
    flatten_layers,
    protect_entries,
    score_entries,
    workspace_bytes,
)
from zipage_jax.config import CompressionConfig
from zipage_jax.state import CacheState, CompressBatch


@dataclass(frozen=True)
class Arguments:
    """Time of a compression, stage by stage.

    Attributes:
        model: a named shape.
        policy: a preset.
        rows: requests compressed together.
        pages: full pages that each holds.
        budget_pages: pages that each keeps.
        layer_stride: layers of one slice.
        implementation: of the kernels; None takes the device's default.
        repeats: timed calls; the median is reported.
    """

    model: str = "qwen3-8b"
    policy: str = "zipage"
    rows: int = 8
    pages: int = 9
    budget_pages: int = 8
    page_size: int = 256
    window: int = 16
    layer_stride: int = 8
    dtype: str = "bfloat16"
    implementation: str | None = None
    repeats: int = 10


def main(argv: list[str]) -> None:
    arguments = tyro.cli(Arguments, args=argv)
    if arguments.model not in SHAPES:
        raise ValueError(f"unknown shape {arguments.model!r}; known: {sorted(SHAPES)}")
    result = measure(SHAPES[arguments.model], arguments)
    table = Table("stage", "ms")
    for stage, seconds in result["stages_s"].items():
        table.add_row(stage, f"{1e3 * seconds:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"workspace: {result['workspace_bytes'] / 2**20:.1f} MiB used, {result['planned_bytes'] / 2**20:.1f} MiB planned"
    )
    print(json.dumps(result))


def measure(model: ModelConfig, arguments: Arguments) -> dict:
    """Median seconds of every stage and of the whole slice, and bytes of temporaries, used and planned."""
    a = arguments
    config = CompressionConfig(
        budget_pages=a.budget_pages, window=a.window, policy=a.policy, layer_stride=a.layer_stride
    )
    config.check(a.page_size)
    layers = min(a.layer_stride, model.num_layers)
    cache, batch = random_job(model, config, layers, a)
    start = jnp.int32(0)
    policy, implementation = config.policy, a.implementation

    def context_of(cache):
        return flatten_layers(cache, batch, start, layers, policy, implementation)

    @jax.jit
    def score(cache):
        return score_entries(context_of(cache)[0], policy, layers)

    @jax.jit
    def protect(cache, scores):
        return protect_entries(scores, context_of(cache)[0], config.sink_len)

    @jax.jit
    def select(cache, scores):
        context, targets = context_of(cache)
        most = targets.shape[1] * context.page_size
        return select_entries(scores, context.budget, max_budget=most, implementation=implementation)

    @functools.partial(jax.jit, donate_argnums=0)
    def compact(cache, kept, history):
        context, targets = context_of(cache)
        return compact_cache(cache, context, kept, targets, history)

    whole = jax.jit(
        functools.partial(compress_layers, config=config, num_layers=layers, implementation=implementation),
        donate_argnames="cache",
    )
    memory = whole.lower(cache=cache, batch=batch, layer_start=start).compile().memory_analysis()
    stages = {}
    scored, stages["score"] = timed(score, a.repeats, cache)
    scores, stages["protect"] = timed(protect, a.repeats, cache, scored.scores)
    kept, stages["select"] = timed(select, a.repeats, cache, scores)
    cache, stages["compact"] = timed_update(lambda c: compact(c, kept, scored.history), a.repeats, cache)
    cache, stages["whole slice"] = timed_update(
        lambda c: whole(cache=c, batch=batch, layer_start=start), a.repeats, cache
    )
    planned = workspace_bytes(
        config,
        rows=a.rows,
        pages=a.pages,
        target_pages=a.budget_pages,
        num_layers=layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=a.page_size,
        itemsize=cache.k_pages.dtype.itemsize,
    )
    device = jax.devices()[0]
    return {
        **vars(a),
        "device": device.device_kind,
        "jax": jax.__version__,
        "stages_s": stages,
        "slices": -(-model.num_layers // layers),
        "workspace_bytes": memory.temp_size_in_bytes,
        "planned_bytes": planned,
    }


def random_job(
    model: ModelConfig, config: CompressionConfig, layers: int, a: Arguments
) -> tuple[CacheState, CompressBatch]:
    """A cache of one slice of layers and a batch that compresses every row into its own first pages, for the second time."""
    num_pages = 1 + a.rows * a.pages
    pool = (layers * num_pages, model.num_kv_heads, a.page_size)
    keys = jax.random.split(jax.random.key(0), 4)
    dtype = jnp.dtype(a.dtype)
    queries = (layers * (a.rows + 1), a.window, model.num_heads, model.head_dim)
    cache = CacheState(
        k_pages=jax.random.normal(keys[0], (*pool, model.head_dim), dtype),
        v_pages=jax.random.normal(keys[1], (*pool, model.head_dim), dtype),
        scores=jax.random.uniform(keys[2], pool) / a.page_size if config.policy.keeps_history else None,
        window_queries=jax.random.normal(keys[3], queries, dtype),
        num_layers=layers,
    )
    ids = 1 + np.random.default_rng(0).permutation(a.rows * a.pages).astype(np.int32).reshape(a.rows, a.pages)
    budget = np.full(a.rows, a.budget_pages * a.page_size, np.int32)
    batch = CompressBatch(
        page_ids=ids,
        num_pages=np.full(a.rows, a.pages, np.int32),
        target_ids=ids[:, : a.budget_pages],
        budget=budget,
        history_len=budget,
        slots=1 + np.arange(a.rows, dtype=np.int32),
        seeds=np.arange(a.rows, dtype=np.int32),
    )
    return cache, batch


def timed(function, repeats: int, *args):
    """(result, median seconds) of a function that changes nothing; the first call compiles and is not counted."""
    result = jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return result, float(np.median(seconds))


def timed_update(function, repeats: int, state):
    """The same for a function that donates its state and returns the next one."""
    state = jax.block_until_ready(function(state))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(function(state))
        seconds.append(time.perf_counter() - start)
    return state, float(np.median(seconds))
