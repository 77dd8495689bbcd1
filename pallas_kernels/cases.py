"""Shapes that the attention ops are tested and timed on, and random inputs for them. Nothing here runs a kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

MODEL_SHAPES = {
    "qwen3-8b": (32, 8, 128),
    "qwen3-14b": (40, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-0.6b": (16, 8, 128),
    "qwen2.5-0.5b": (14, 2, 64),
    "smollm2": (9, 3, 64),
}
"""Model -> (heads, kv_heads, head_dim)."""


@dataclass(frozen=True)
class DecodeCase:
    """One query token a row over `lens` entries.

    Attributes:
        must_reach: least share of the measured read bandwidth that counts as good, or None.
    """

    name: str
    lens: tuple[int, ...]
    model: str = "qwen3-8b"
    page_size: int = 256
    dtype: str = "bfloat16"
    must_reach: float | None = None


@dataclass(frozen=True)
class PrefillCase:
    """`query_lens` new tokens a row after `prefix_lens` older entries."""

    name: str
    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    model: str = "qwen3-8b"
    page_size: int = 256
    dtype: str = "bfloat16"


def log_uniform_lens(rows: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """`rows` lengths between 1 and `longest`, uniform in their logarithm."""
    drawn = np.exp(np.random.default_rng(seed).uniform(0, np.log(longest), rows))
    return tuple(int(n) for n in drawn.clip(1, longest))


DECODE_CASES = (
    DecodeCase("256 x 2176", (2176,) * 256, must_reach=0.90),
    DecodeCase("128 x 1150", (1150,) * 128, must_reach=0.85),
    DecodeCase("16 x 8192", (8192,) * 16, must_reach=0.85),
    DecodeCase("1 x 32768", (32768,), must_reach=0.70),
    DecodeCase("128 ragged 1-16384", log_uniform_lens(128, 16384), must_reach=0.70),
)
DECODE_SHAPE_CASES = (
    *(DecodeCase(f"{name}, 128 x 2048", (2048,) * 128, model=name) for name in MODEL_SHAPES if name != "qwen3-8b"),
    *(DecodeCase(f"page {size}, 128 x 2048", (2048,) * 128, page_size=size) for size in (16, 32, 64, 128)),
    DecodeCase("float16, 128 x 2048", (2048,) * 128, dtype="float16"),
    DecodeCase("4 x 1150", (1150,) * 4),
)
"""Other models, page sizes and dtypes: must work, and are timed to see that none falls off."""

PREFILL_CASES = (
    PrefillCase("1 x 8192", (8192,), (0,)),
    PrefillCase("16 x 512", (512,) * 16, (0,) * 16),
    PrefillCase("4096 on 16384", (4096,), (16384,)),
    PrefillCase("64 x 128", (128,) * 64, (0,) * 64),
)


def page_table(lens, page_size: int, seed: int = 0, spare: int = 1) -> tuple[np.ndarray, int]:
    """(page_ids [rows, max_pages] on shuffled pages of their own, pages of the pool). The last of `spare` pages pad it."""
    num_pages = [-(-n // page_size) for n in lens]
    total = sum(num_pages) + spare
    order = np.random.default_rng(seed).permutation(total - 1) + 1
    table, used = np.zeros((len(lens), max(*num_pages, 1)), np.int32), 0
    for row, num in enumerate(num_pages):
        table[row, :num] = order[used : used + num]
        used += num
    return table, total


def random_pools(pages: int, model: str, page_size: int, dtype, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """(k_pages, v_pages) of normal noise."""
    _, kv_heads, head_dim = MODEL_SHAPES[model]
    shape = (pages, kv_heads, page_size, head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(dtype)))
    return tuple(draw(key) for key in jax.random.split(jax.random.key(seed)))


def decode_inputs(case: DecodeCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """(queries, k_pages, v_pages, page_ids, cache_len)."""
    heads, _, head_dim = MODEL_SHAPES[case.model]
    table, pages = page_table(case.lens, case.page_size, seed)
    pools = random_pools(pages, case.model, case.page_size, case.dtype, seed)
    queries = jax.random.normal(jax.random.key(seed + 1), (len(case.lens), heads, head_dim), jnp.dtype(case.dtype))
    return queries, *pools, jnp.asarray(table), jnp.asarray(case.lens, jnp.int32)


def prefill_inputs(case: PrefillCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """(queries, k_pages, v_pages, page_ids, query_start, cache_len)."""
    heads, _, head_dim = MODEL_SHAPES[case.model]
    lens = [q + p for q, p in zip(case.query_lens, case.prefix_lens, strict=True)]
    table, pages = page_table(lens, case.page_size, seed)
    pools = random_pools(pages, case.model, case.page_size, case.dtype, seed)
    start = np.concatenate([[0], np.cumsum(case.query_lens)]).astype(np.int32)
    shape = (int(start[-1]), heads, head_dim)
    queries = jax.random.normal(jax.random.key(seed + 1), shape, jnp.dtype(case.dtype))
    return queries, *pools, jnp.asarray(table), jnp.asarray(start), jnp.asarray(lens, jnp.int32)
