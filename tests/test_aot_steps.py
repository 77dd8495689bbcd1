"""The steps of Qwen3-8B's shape compile for the H200 without one: in place, and without room for a second layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.aot import as_on_hopper, compile_for_gpu
from zipage_jax.batches import NUM_FIELDS
from zipage_jax.config import CompressionConfig
from zipage_jax.programs import GPU_COMPILER_OPTIONS
from zipage_jax.state import TOKEN_FIELDS, CacheState, CompressBatch, PrefillBatch, RowBatch, SeatState
from zipage_jax.steps import StepOptions, compress_step, decode_step, prefill_step

pytestmark = pytest.mark.aot


@pytest.fixture(autouse=True)
def on_hopper():
    with as_on_hopper():
        yield


PAGES, SLOTS, ROWS, PAGE = 641, 129, 128, 256
CONFIG = models.SHAPES["qwen3-8b"]
LAYER_POOL = PAGES * CONFIG.num_kv_heads * PAGE * CONFIG.head_dim * 2


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def cache() -> CacheState:
    c = CONFIG
    pages = (c.num_layers * PAGES, c.num_kv_heads, PAGE)
    pool = jax.ShapeDtypeStruct((*pages, c.head_dim), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((c.num_layers * SLOTS, 16, c.num_heads, c.head_dim), jnp.bfloat16)
    scores = jax.ShapeDtypeStruct(pages, jnp.float32)
    return CacheState(k_pages=pool, v_pages=pool, scores=scores, window_queries=queries, num_layers=c.num_layers)


def num_bytes(tree) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check_in_place(compiled, state) -> None:
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(state)
    assert memory.temp_size_in_bytes < LAYER_POOL


def test_decode_step():
    step = functools.partial(decode_step, model=CONFIG, options=StepOptions())
    state = (cache(), SeatState(last_token=ints(ROWS + 1)))
    args = (models.abstract_params(CONFIG, jnp.bfloat16), *state, RowBatch(packed=ints(ROWS, NUM_FIELDS + 5)))
    compiled = compile_for_gpu(step, args, donate_argnums=(1, 2), compiler_options=GPU_COMPILER_OPTIONS)
    check_in_place(compiled, state)


def test_prefill_step():
    step = functools.partial(prefill_step, model=CONFIG, options=StepOptions())
    state = (cache(), SeatState(last_token=ints(ROWS + 1)))
    batch = PrefillBatch(
        rows=RowBatch(packed=ints(64, NUM_FIELDS + 33)), tokens=ints(2048, len(TOKEN_FIELDS)), query_start=ints(65)
    )
    args = (models.abstract_params(CONFIG, jnp.bfloat16), *state, batch)
    compiled = compile_for_gpu(step, args, donate_argnums=(1, 2), compiler_options=GPU_COMPILER_OPTIONS)
    check_in_place(compiled, state)


@pytest.mark.parametrize("policy", ["zipage", "attention"])
def test_compress_step(policy):
    config = CompressionConfig(budget_pages=4, policy=policy)
    step = functools.partial(compress_step, config=config, num_layers=config.layer_stride)
    batch = CompressBatch(
        page_ids=ints(8, 5),
        num_pages=ints(8),
        target_ids=ints(8, 4),
        budget=ints(8),
        history_len=ints(8),
        slots=ints(8),
        seeds=ints(8),
    )
    compiled = compile_for_gpu(
        step, (cache(), batch, ints()), donate_argnums=(0,), compiler_options=GPU_COMPILER_OPTIONS
    )
    check_in_place(compiled, cache())
