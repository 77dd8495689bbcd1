"""Which entries a compression keeps: the best of each (row, kv head), in time order.

An entry is kept iff fewer than budget entries are better; of two with equal scores the later one is better, so the choice depends
on nothing but the scores. Source: arXiv 2603.08743, sec. 4.2; the tie rule is ours, because a score tied at the cut must not depend
on the batch.

The Hopper kernel owns one (row, kv head) a program, its scores in registers as integers of the same order. It bisects for the score
at the cut, bit by bit, then for the first entry kept among those tied there. A scan of the dropped entries gives how far each kept
entry moves left, and a network of power-of-two moves, lowest first, brings them together.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve

THREADS = 128
MAX_KERNEL_ENTRIES = 8192
"""64 entries a thread, in registers; they and their moves also fit the halves of an int32."""
LOWEST = -(2**31)


def select_entries(
    scores: Float[Array, "rows kv_heads entries"],
    budget: Int[Array, " rows"],
    *,
    max_budget: int,
    implementation: str | None = None,
) -> Int[Array, "rows kv_heads max_budget"]:
    """Ascending entry indices of the budget[r] highest scores; positions past budget[r] hold `entries`, one past the end.

    budget[r] ≤ min(max_budget, entries). −0 ties with +0, −inf comes last of all; there must be no NaN.

    `None` takes XLA for rows longer than the kernel's.

    Raises:
        ValueError: scores that are not float32, or more entries than "pallas" takes.
    """
    entries = scores.shape[2]
    if scores.dtype != jnp.float32:
        raise ValueError(f"scores must be float32, not {scores.dtype}: in fewer bits many entries tie at the cut")
    chosen = resolve("select_entries", implementation)
    too_long = max(entries, max_budget) > MAX_KERNEL_ENTRIES
    if implementation == "pallas" and too_long:
        raise ValueError(f"{max(entries, max_budget)} entries exceed the {MAX_KERNEL_ENTRIES} of 'pallas'; use 'xla'")
    if chosen == "xla" or too_long:
        return _reference(scores, budget, max_budget)
    return _hopper(scores, budget, max_budget)


def _reference(scores, budget, max_budget):
    entries = scores.shape[-1]
    # top_k gives ties to the first entry it sees and tells −0 from +0.
    backwards = jnp.flip(jnp.where(scores == 0, 0.0, scores), axis=-1)
    _, order = lax.top_k(backwards, min(max_budget, entries))
    kept = entries - 1 - order
    kept = jnp.pad(kept, ((0, 0), (0, 0), (0, max_budget - kept.shape[-1])), constant_values=entries)
    within = jnp.arange(max_budget, dtype=jnp.int32)[None, None, :] < budget[:, None, None]
    return jnp.sort(jnp.where(within, kept, entries), axis=-1)


def _hopper(scores, budget, max_budget):
    rows, kv_heads, entries = scores.shape
    width = -(-max(entries, max_budget) // THREADS) * THREADS
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, width - entries)))
    kept_width = -(-max_budget // THREADS) * THREADS
    return _kernel(rows, kv_heads, width, entries, kept_width)(scores, budget)[..., :max_budget]


@functools.cache
def _kernel(rows, kv_heads, width, entries, kept_width):
    levels = max(1, (width - 1).bit_length())
    margin = max(1 << (levels - 1), THREADS)
    strided = plgpu.Layout.WG_STRIDED((width,), vec_size=1)
    i32 = jnp.int32

    def body(scores_ref, budget_ref, out_ref, *buffers):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        budget = budget_ref[row]
        score = plgpu.load(scores_ref.at[row, head], layout=strided)
        bits = lax.bitcast_convert_type(jnp.where(score == 0.0, 0.0, score), i32)
        key = bits ^ (lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF)
        entry = plgpu.broadcasted_iota(i32, (width,), 0, layout=strided)
        # Padding comes behind -inf.
        key = jnp.where(entry < entries, key, LOWEST)

        def count(mask):
            return jnp.sum(jnp.where(mask, 1, 0))

        def one_bit(k, cut):
            higher = cut + lax.shift_left(i32(1), 30 - k)
            return jnp.where(count(key >= higher) >= budget, higher, cut)

        # The highest cut that at least `budget` keys reach.
        cut = jnp.where(count(key >= 0) >= budget, i32(0), i32(LOWEST))
        cut = lax.fori_loop(0, 31, one_bit, cut)
        tied = key == cut
        wanted = budget - count(key > cut)

        def one_index_bit(k, start):
            later = start + lax.shift_left(i32(1), levels - 1 - k)
            return jnp.where(count(tied & (entry >= later)) >= wanted, later, start)

        start = lax.fori_loop(0, levels, one_index_bit, i32(0))
        keep = ((key > cut) | (tied & (entry >= start))) & (budget > 0)

        # Inclusive scan of the dropped: zeros lie left of the data.
        moves = jnp.where(keep, 0, 1)
        for buffer in buffers:
            buffer[pl.ds(0, margin)] = jnp.zeros((margin,), i32)
        for level in range(levels):
            buffer = buffers[level % 2]
            buffer[pl.ds(margin, width)] = moves
            moves = moves + plgpu.load(buffer.at[pl.ds(margin - (1 << level), width)], layout=strided)

        # An entry and its moves to come, packed; nothing is `entries` that stays. Two kept entries never meet.
        packed = jnp.where(keep, lax.shift_left(moves, 16) | entry, entries)
        for buffer in buffers:
            buffer[pl.ds(width, margin)] = jnp.full((margin,), entries, i32)
        for level in range(levels):
            buffer = buffers[level % 2]
            buffer[pl.ds(0, width)] = packed
            right = plgpu.load(buffer.at[pl.ds(1 << level, width)], layout=strided)
            leaves, arrives = ((lax.shift_right_logical(x, 16 + level) & 1) == 1 for x in (packed, right))
            packed = jnp.where(arrives, right, jnp.where(leaves, entries, packed))
        buffer = buffers[levels % 2]
        buffer[pl.ds(0, width)] = packed & 0xFFFF
        kept_layout = plgpu.Layout.WG_STRIDED((kept_width,), vec_size=1)
        out_ref[row, head] = plgpu.load(buffer.at[pl.ds(0, kept_width)], layout=kept_layout)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, kv_heads, kept_width), i32),
        scratch_types=[plgpu.SMEM((width + margin,), i32)] * 2,
        grid=(rows, kv_heads),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024),
    )
