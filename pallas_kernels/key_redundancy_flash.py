"""Hopper kernel of key_redundancy over all entries of a row: C goes by tile by tile, and no more than a row's sums is kept.

A program owns 64 rows of C a consumer and goes through all columns in order, so the last one above the threshold is the one seen
last (C is symmetric: what holds of a row holds of the column). A similarity to be taken away belongs to another program's row;
XLA adds those up afterwards.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.key_redundancy_lightning import (
    CONSUMER_REGISTERS,
    PER_COLUMN,
    PER_ROW,
    PRODUCER_REGISTERS,
    SMALLEST_NORM,
    WGMMA_ROWS,
    iota,
    none_above,
    tile_sums,
    unpack,
    zeros,
)


@dataclass(frozen=True)
class FlashConfig:
    """Tile sizes of the kernel that compares a row's keys with all others.

    Attributes:
        consumers: warpgroups that multiply, each 64 rows of C by the same columns.
        slots: tiles of columns in flight.
        block_n: columns of a tile.
        num_programs: persistent programs: one an SM.
    """

    consumers: int = 3
    slots: int = 3
    block_n: int = 128
    num_programs: int = 132


def flash_redundancy(k_pages, page_ids, cache_len, threshold, config: FlashConfig):
    """As key_redundancy(mode="flash"): the kernel gives every row's sum and its last similarity, and where that is.

    The last similarities are then taken from the entries they belong to in integers, whose sum depends on no order.
    """
    rows, row_pages = page_ids.shape
    _, kv_heads, page_size, head_dim = k_pages.shape
    entries = row_pages * page_size
    height = config.consumers * WGMMA_ROWS
    held = jnp.arange(entries, dtype=jnp.int32)[None, None, :] < cache_len[:, None, None]
    norms = jnp.sum(jnp.square(k_pages[page_ids].astype(jnp.float32)), axis=-1)
    norms = jnp.sqrt(norms.transpose(0, 2, 1, 3).reshape(rows, kv_heads, entries))
    inv = jnp.where(held, 1.0 / jnp.maximum(norms, SMALLEST_NORM), 1.0)
    padded = max(-(-entries // config.block_n) * config.block_n, -(-entries // height) * height)
    inv = jnp.pad(inv, ((0, 0), (0, 0), (0, padded - entries)), constant_values=1.0)
    kernel = _flash_kernel(
        rows, row_pages, kv_heads, page_size, head_dim, k_pages.dtype, padded, float(threshold), config
    )
    sums, values, last = (x[..., :entries] for x in kernel(k_pages, page_ids, cache_len, inv))
    # A sum of at most `entries` values of at most 1 (and rounding) fits an int32.
    unit = 2.0 ** (29 - entries.bit_length())
    found = held & (last >= 0)
    taken = jnp.round(jnp.where(found, values, 0.0) * unit).astype(jnp.int32)
    row, head = (jnp.arange(n, dtype=jnp.int32) for n in (rows, kv_heads))
    removed = jnp.zeros(sums.shape, jnp.int32)
    removed = removed.at[row[:, None, None], head[None, :, None], jnp.where(found, last, 0)].add(taken)
    return jnp.where(held, sums - removed.astype(jnp.float32) / unit, 0.0)


@functools.cache
def _flash_kernel(rows, row_pages, kv_heads, page_size, head_dim, dtype, padded, threshold, config: FlashConfig):
    consumers, slots, block_n = config.consumers, config.slots, config.block_n
    height = consumers * WGMMA_ROWS
    bands = -(-row_pages * page_size // height)
    copies, sub_tiles = max(1, block_n // page_size), max(1, page_size // block_n)
    span = block_n // copies
    num_items = rows * kv_heads * bands
    i32 = jnp.int32

    def body(k_ref, ids_ref, len_ref, inv_ref, sum_ref, value_ref, last_ref, *scratch):
        a_smem, k_smem, inv_smem, out_smem, last_smem, a_full, a_free, full, free = scratch
        wg = lax.axis_index("wg")
        first = lax.axis_index("program")
        mine = lax.div(num_items - first + config.num_programs - 1, i32(config.num_programs))

        def item(i):
            index = first + i * config.num_programs
            pair = lax.div(index, i32(bands))
            row = lax.div(pair, i32(kv_heads))
            length = len_ref[row]
            band = lax.rem(index, i32(bands))
            # Bands past the row's entries have no tiles.
            tiles = jnp.where(band * height < length, lax.div(length + block_n - 1, i32(block_n)), 0)
            return row, lax.rem(pair, i32(kv_heads)), band * height, length, tiles

        @pl.when(wg == consumers)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def one_item(i, done):
                row, head, start, _, tiles = item(i)
                side = lax.rem(i, i32(2))

                @pl.when(i >= 2)
                def _():
                    plgpu.barrier_wait(a_free.at[side])

                for c in range(consumers):
                    entry = start + c * WGMMA_ROWS
                    page = jnp.minimum(lax.div(entry, i32(page_size)), row_pages - 1)
                    plgpu.copy_gmem_to_smem(
                        k_ref.at[ids_ref[row, page], head, pl.ds(lax.rem(entry, i32(page_size)), WGMMA_ROWS)],
                        a_smem.at[side, c],
                        a_full.at[side],
                    )

                def one_tile(t, carry):
                    slot = lax.rem(done + t, i32(slots))

                    @pl.when(done + t >= slots)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(
                        inv_ref.at[row, head, pl.ds(t * block_n, block_n)], inv_smem.at[slot], full.at[slot]
                    )
                    for c in range(copies):
                        page = jnp.minimum(t * copies + c, row_pages - 1) if copies > 1 else lax.div(t, i32(sub_tiles))
                        offset = 0 if copies > 1 else lax.rem(t, i32(sub_tiles)) * block_n
                        plgpu.copy_gmem_to_smem(
                            k_ref.at[ids_ref[row, page], head, pl.ds(offset, span)],
                            k_smem.at[slot, pl.ds(c * span, span)],
                            full.at[slot],
                        )
                    return carry

                lax.fori_loop(0, tiles, one_tile, 0)
                return done + tiles

            done = lax.fori_loop(0, mine, one_item, i32(0))
            for slot in range(slots):

                @pl.when(done > slot)
                def _(slot=slot):
                    plgpu.barrier_wait(free.at[slot])

            for side in range(2):

                @pl.when(mine > side)
                def _(side=side):
                    plgpu.barrier_wait(a_free.at[side])

        @pl.when(wg < consumers)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS[consumers], action="increase")

            def one_item(i, done):
                row, head, start, length, tiles = item(i)
                start = start + wg * WGMMA_ROWS
                side = lax.rem(i, i32(2))
                plgpu.barrier_wait(a_full.at[side])
                inv_row = plgpu.load(inv_ref.at[row, head, pl.ds(start, WGMMA_ROWS)], layout=PER_ROW, optimized=False)
                limit = threshold / inv_row

                def one_tile(t, carry):
                    total, value, last = carry
                    slot = lax.rem(done + t, i32(slots))
                    plgpu.barrier_wait(full.at[slot])

                    def multiply(acc):
                        plgpu.wgmma(acc, a_smem.at[side, wg], k_smem.at[slot].transpose((1, 0)))
                        return acc[...]

                    g = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, block_n), jnp.float32))
                    column = iota(g.shape, 1)

                    def border(g):
                        # Zero the diagonal, and what lies past the row's entries.
                        out = (iota(g.shape, 0) + start == column + t * block_n) | (column + t * block_n >= length)
                        return jnp.where(out, 0.0, g)

                    on_border = (lax.div(start, i32(block_n)) == t) | ((t + 1) * block_n > length)
                    g = lax.cond(on_border, border, lambda g: g, g)
                    inv_column = plgpu.load(inv_smem.at[slot], layout=PER_COLUMN)
                    tile_total, best = tile_sums(g, inv_row, inv_column, column, limit)
                    # What was read as ordinary shared memory must be before the copy engine writes it again.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[slot])
                    tile_last, tile_value = unpack(best)
                    value = jnp.where(best >= 0, tile_value, value)
                    last = jnp.where(best >= 0, tile_last + t * block_n, last)
                    return total + tile_total, value, last

                total, value, last = lax.fori_loop(0, tiles, one_tile, (zeros(), zeros(), none_above()))
                plgpu.barrier_arrive(a_free.at[side])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[wg, 0] = total * inv_row
                out_smem[wg, 1] = value
                last_smem[wg] = last
                plgpu.commit_smem()
                part = pl.ds(start, WGMMA_ROWS)
                plgpu.copy_smem_to_gmem(out_smem.at[wg, 0], sum_ref.at[row, head, part])
                plgpu.copy_smem_to_gmem(out_smem.at[wg, 1], value_ref.at[row, head, part])
                plgpu.copy_smem_to_gmem(last_smem.at[wg], last_ref.at[row, head, part])
                return done + tiles

            lax.fori_loop(0, mine, one_item, i32(0))
            plgpu.wait_smem_to_gmem(0)

    shape = (rows, kv_heads, padded)
    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shape, x) for x in (jnp.float32, jnp.float32, i32)),
        scratch_types=[
            plgpu.SMEM((2, consumers, WGMMA_ROWS, head_dim), dtype),
            plgpu.SMEM((slots, block_n, head_dim), dtype),
            plgpu.SMEM((slots, block_n), jnp.float32),
            plgpu.SMEM((consumers, 2, WGMMA_ROWS), jnp.float32),
            plgpu.SMEM((consumers, WGMMA_ROWS), i32),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
            plgpu.Barrier(num_arrivals=copies + 1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
        ],
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
