"""Hopper kernel of key_redundancy within a page: wgmma multiplies C, which is looked at in registers and never stored.

C is symmetric, so the last row above the threshold in column n is the last column above it in row n, which a reduction along the
row finds: one maximum over integers that hold the column in their high bits and C in their low 23.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SMALLEST_NORM = 1e-6
WGMMA_ROWS = 64
TILE = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = TILE.reduce(1), TILE.reduce(0)
VALUE_BITS = 23
VALUE_OFFSET = 6.0
VALUE_OFFSET_BITS = 0x40800000
"""C + 6 lies in [4, 8), one binade (4.0 has these bits): its mantissa is C in steps of 2**-21, and orders like an integer."""

CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 160}
PRODUCER_REGISTERS = 24
"""Registers a thread; a consumer's by consumers a program (65,536 an SM in all)."""


@dataclass(frozen=True)
class LightningConfig:
    """Tile sizes of the kernel that compares keys within a page.

    Attributes:
        consumers: warpgroups that multiply, each with pages of its own; three hide each other's reductions.
        slots: pages in flight a consumer.
        block_n: columns of C in registers at a time; at 64 wgmma waits for shared memory.
        num_programs: persistent programs: one an SM.
    """

    consumers: int = 3
    slots: int = 1
    block_n: int = 128
    num_programs: int = 132


def lightning_redundancy(k_pages, page_ids, cache_len, threshold, config: LightningConfig):
    """As key_redundancy(mode="lightning"); one page with itself is a work item, and persistent programs share them out."""
    rows, row_pages = page_ids.shape
    _, kv_heads, page_size, head_dim = k_pages.shape
    kernel = _lightning_kernel(rows, row_pages, kv_heads, page_size, head_dim, k_pages.dtype, float(threshold), config)
    return kernel(k_pages, page_ids, cache_len)


def iota(shape, axis):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def zeros():
    return plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), PER_ROW)


def none_above():
    return plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -1, jnp.int32), PER_ROW)


def tile_sums(g, inv_row, inv_column, column, limit):
    """(Σ over columns of C / inv_row, packed last column above the threshold and C there, or −1) of a tile of products g.

    `limit` is the threshold / inv_row, so that C itself is only computed where it is packed.
    """
    g = g * lax.broadcast_in_dim(inv_column, g.shape, [1])
    total = g.sum(axis=1)
    c = g * lax.broadcast_in_dim(inv_row, g.shape, [0])
    key = lax.bitcast_convert_type(c + VALUE_OFFSET, jnp.int32)
    key = key + (lax.shift_left(column, VALUE_BITS) - VALUE_OFFSET_BITS)
    key = jnp.where(g > lax.broadcast_in_dim(limit, g.shape, [0]), key, -1)
    return total, key.max(axis=1)


def unpack(best):
    """(column, C) of packed keys; the column of −1 is −1."""
    value = (best & ((1 << VALUE_BITS) - 1)) + VALUE_OFFSET_BITS
    return lax.shift_right_arithmetic(best, VALUE_BITS), lax.bitcast_convert_type(value, jnp.float32) - VALUE_OFFSET


@functools.cache
def _lightning_kernel(rows, row_pages, kv_heads, page_size, head_dim, dtype, threshold, config: LightningConfig):
    consumers, slots = config.consumers, config.slots
    block_n = min(config.block_n, page_size)
    blocks = page_size // WGMMA_ROWS
    num_items = rows * row_pages * kv_heads

    def body(k_ref, ids_ref, len_ref, out_ref, k_smem, inv_smem, last_smem, value_smem, sum_smem, full, free):
        wg = lax.axis_index("wg")
        first = lax.axis_index("program")

        def mine(consumer):
            stride = config.num_programs * consumers
            start = first * consumers + consumer
            return start, stride, lax.div(jnp.maximum(num_items - start + stride - 1, 0), jnp.int32(stride))

        def item(index):
            page = lax.div(index, jnp.int32(kv_heads))
            return (
                lax.div(page, jnp.int32(row_pages)),
                lax.rem(page, jnp.int32(row_pages)),
                lax.rem(index, jnp.int32(kv_heads)),
            )

        @pl.when(wg == consumers)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            _, _, most = mine(0)

            def one_round(i, carry):
                for consumer in range(consumers):
                    start, stride, count = mine(consumer)
                    slot = consumer * slots + lax.rem(i, jnp.int32(slots))

                    @pl.when(i < count)
                    def _(start=start, stride=stride, slot=slot):
                        row, page, head = item(start + i * stride)

                        @pl.when(i >= slots)
                        def _():
                            plgpu.barrier_wait(free.at[slot])

                        plgpu.copy_gmem_to_smem(k_ref.at[ids_ref[row, page], head], k_smem.at[slot], full.at[slot])

                return carry

            lax.fori_loop(0, most, one_round, 0)
            for consumer in range(consumers):
                for slot in range(slots):

                    @pl.when(mine(consumer)[2] > slot)
                    def _(slot=consumer * slots + slot):
                        plgpu.barrier_wait(free.at[slot])

        @pl.when(wg < consumers)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS[consumers], action="increase")
            start, stride, count = mine(wg)
            inv, last_of, value_of, sums = (x.at[wg] for x in (inv_smem, last_smem, value_smem, sum_smem))

            def one_item(i, carry):
                row, page, head = item(start + i * stride)
                held = jnp.clip(len_ref[row] - page * page_size, 0, page_size)
                slot = wg * slots + lax.rem(i, jnp.int32(slots))
                keys = k_smem.at[slot]
                plgpu.barrier_wait(full.at[slot])

                @pl.when(held < page_size)
                def _zero_the_tail():
                    def one_block(b, carry):
                        part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                        k = plgpu.load(keys.at[part], layout=TILE)
                        keys[part] = jnp.where(iota(k.shape, 0) < held - b * WGMMA_ROWS, k, jnp.zeros_like(k))
                        sums[part] = zeros()
                        return carry

                    lax.fori_loop(0, blocks, one_block, 0)
                    plgpu.commit_smem()

                used_blocks = jnp.where(held > 0, blocks, 0)

                def norms(b, carry):
                    part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                    k = plgpu.load(keys.at[part], layout=TILE).astype(jnp.float32)
                    inv[part] = 1.0 / jnp.maximum(jnp.sqrt((k * k).sum(axis=1)), SMALLEST_NORM)
                    return carry

                lax.fori_loop(0, used_blocks, norms, 0)

                def row_block(b, carry):
                    part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                    inv_row = plgpu.load(inv.at[part], layout=PER_ROW)
                    limit = threshold / inv_row

                    def one_tile(j, carry):
                        total, best = carry
                        columns = pl.ds(j * block_n, block_n)

                        def multiply(acc):
                            plgpu.wgmma(acc, keys.at[part], keys.at[columns].transpose((1, 0)))
                            return acc[...]

                        g = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, block_n), jnp.float32))
                        column = iota(g.shape, 1) + j * block_n

                        def off_diagonal(g):
                            return jnp.where(iota(g.shape, 0) + b * WGMMA_ROWS == column, 0.0, g)

                        g = lax.cond(lax.div(b * WGMMA_ROWS, block_n) == j, off_diagonal, lambda g: g, g)
                        inv_column = plgpu.load(inv.at[columns], layout=PER_COLUMN)
                        tile_total, tile_best = tile_sums(g, inv_row, inv_column, column, limit)
                        return total + tile_total, jnp.maximum(best, tile_best)

                    total, best = lax.fori_loop(0, page_size // block_n, one_tile, (zeros(), none_above()))
                    sums[part] = total * inv_row
                    last_of[part], value_of[part] = unpack(best)
                    return carry

                lax.fori_loop(0, used_blocks, row_block, 0)
                # The keys were read as ordinary shared memory too, which must be before the copy engine writes them again.
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])

                def remove(b, carry):
                    part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                    total = plgpu.load(sums.at[part], layout=PER_ROW)
                    shape = (WGMMA_ROWS, WGMMA_ROWS)

                    def one_tile(j, total):
                        columns = pl.ds(j * WGMMA_ROWS, WGMMA_ROWS)
                        last = plgpu.load(last_of.at[columns], layout=PER_COLUMN)
                        value = plgpu.load(value_of.at[columns], layout=PER_COLUMN)
                        here = iota(shape, 0) + b * WGMMA_ROWS == lax.broadcast_in_dim(last, shape, [1])
                        return total - jnp.where(here, lax.broadcast_in_dim(value, shape, [1]), 0.0).sum(axis=1)

                    total = lax.fori_loop(0, blocks, one_tile, total)
                    sums[part] = total
                    return carry

                lax.fori_loop(0, used_blocks, remove, 0)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(sums, out_ref.at[row, head, pl.ds(page * page_size, page_size)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                return carry

            lax.fori_loop(0, count, one_item, 0)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, kv_heads, row_pages * page_size), jnp.float32),
        scratch_types=[
            plgpu.SMEM((consumers * slots, page_size, head_dim), dtype),
            plgpu.SMEM((consumers, page_size), jnp.float32),
            plgpu.SMEM((consumers, page_size), jnp.int32),
            plgpu.SMEM((consumers, page_size), jnp.float32),
            plgpu.SMEM((consumers, page_size), jnp.float32),
            plgpu.Barrier(num_barriers=consumers * slots),
            plgpu.Barrier(num_barriers=consumers * slots),
        ],
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
