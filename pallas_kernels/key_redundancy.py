"""How much each cached key repeats the others: summed cosine similarities, the newest of near-duplicates spared.

k̂ = k / max(‖k‖, 1e-6); C[m, n] = k̂_m · k̂_n with a zero diagonal; in each column n the last m with C[m, n] > threshold is set
to 0; r[m] = Σ_n C[m, n]. `lightning` knows C only inside a page, `flash` over all entries of the row, tile by tile.
Source: arXiv 2603.08743, app. C.5 and C.7 (after R-KV, arXiv 2505.24133).

The Hopper kernel of `lightning` multiplies a page with itself by wgmma and never stores C. C is symmetric, so the last row above
the threshold in column n is the last column above it in row n, which a reduction along the row finds: one maximum over keys that
hold the column in their high bits and C in their low 23.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve

MODES = ("lightning", "flash")
SMALLEST_NORM = 1e-6
CHUNK_SIMILARITIES = 1 << 24
"""Elements of C that the XLA form holds at a time (64 MiB), or those of one row's heads if that is more."""
WGMMA_ROWS = 64
VALUE_BITS = 23
VALUE_OFFSET = 6.0
VALUE_OFFSET_BITS = 0x40800000
"""C + 6 lies in [4, 8), one binade (4.0 has these bits): its mantissa is C in steps of 2**-21, and orders like an integer."""

CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 160}
"""Registers a thread of a consumer, by consumers a program (65,536 an SM, the producer's 24 too)."""


@dataclass(frozen=True)
class Config:
    """Tile sizes of the Hopper kernel.

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


def key_redundancy(
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows row_pages"],
    cache_len: Int[Array, " rows"],
    *,
    mode: str = "lightning",
    threshold: float = 0.5,
    implementation: str | None = None,
    config: Config | None = None,
) -> Float[Array, "rows kv_heads entries"]:
    """r of every entry, float32, before any softmax; 0 past cache_len, whatever the pages hold there.

    entries = row_pages · page_size. Memory beyond the result: O(entries · page_size) for `flash`. `None` takes XLA for `flash` and
    for what the kernel cannot tile. Near-duplicates whose C differs from the threshold by rounding may fall on either side of it.

    Raises:
        ValueError: unknown `mode`; pages that "pallas" cannot tile.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {list(MODES)}")
    available = ("xla", "pallas") if mode == "lightning" else ("xla",)
    chosen = resolve(f"key_redundancy ({mode})", implementation, available)
    problem = _problem(k_pages)
    if implementation == "pallas" and problem:
        raise ValueError(problem)
    if chosen == "xla" or problem:
        return _reference(k_pages, page_ids, cache_len, mode, threshold)
    rows, row_pages = page_ids.shape
    _, kv_heads, page_size, head_dim = k_pages.shape
    kernel = _kernel(
        rows, row_pages, kv_heads, page_size, head_dim, k_pages.dtype, float(threshold), config or Config()
    )
    return kernel(k_pages, page_ids, cache_len)


def _problem(k_pages) -> str | None:
    """Why the kernel cannot take these pages."""
    page_size, head_dim = k_pages.shape[2:]
    if k_pages.dtype not in (jnp.bfloat16, jnp.float16):
        return f"pages are {k_pages.dtype}, but 'pallas' takes bfloat16 or float16; use 'xla'"
    if page_size not in (64, 128, 256) or head_dim not in (64, 128):
        return f"page_size={page_size} must be 64, 128 or 256 and head_dim={head_dim} 64 or 128 for 'pallas'; use 'xla'"
    return None


def _reference(k_pages, page_ids, cache_len, mode, threshold):
    kv_heads, page_size = k_pages.shape[1:3]
    rows, row_pages = page_ids.shape
    entry = jnp.arange(row_pages * page_size, dtype=jnp.int32).reshape(row_pages, 1, page_size, 1)
    one_head = _lightning_head if mode == "lightning" else _flash_head

    def one_row(arrays):
        ids, length = arrays
        keys = jnp.where(entry < length, k_pages[ids].astype(jnp.float32), 0.0).transpose(1, 0, 2, 3)
        norms = jnp.sqrt(jnp.sum(keys * keys, axis=-1, keepdims=True))
        keys = keys / jnp.maximum(norms, SMALLEST_NORM)
        return jax.vmap(lambda k: one_head(k, threshold))(keys).reshape(kv_heads, row_pages * page_size)

    held = kv_heads * page_size * page_size * (row_pages if mode == "lightning" else 1)
    rows_at_once = max(1, CHUNK_SIMILARITIES // held)
    return lax.map(one_row, (page_ids, cache_len), batch_size=min(rows_at_once, rows))


def _similarities(a: Float[Array, "m head_dim"], b: Float[Array, "n head_dim"], same) -> Float[Array, "m n"]:
    """a · bᵀ, its diagonal 0 where the tile lies on C's diagonal (`same`)."""
    product = jnp.matmul(a, b.T, precision=lax.Precision.HIGHEST)
    return jnp.where(same & jnp.eye(a.shape[0], dtype=bool), 0.0, product)


def _last_above(tile: Float[Array, "m n"], threshold) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """In each column the last row above the threshold, −1 if there is none, and the value there."""
    row = jnp.arange(tile.shape[0], dtype=jnp.int32)[:, None]
    last = jnp.max(jnp.where(tile > threshold, row, -1), axis=0)
    return last, jnp.sum(jnp.where(row == last[None, :], tile, 0.0), axis=0)


def _lightning_head(
    keys: Float[Array, "row_pages page_size head_dim"], threshold
) -> Float[Array, "row_pages page_size"]:
    def one_page(k):
        tile = _similarities(k, k, same=jnp.asarray(True))
        last, _ = _last_above(tile, threshold)
        row = jnp.arange(tile.shape[0], dtype=jnp.int32)[:, None]
        return jnp.sum(jnp.where(row == last[None, :], 0.0, tile), axis=1)

    return jax.vmap(one_page)(keys)


def _flash_head(keys: Float[Array, "row_pages page_size head_dim"], threshold) -> Float[Array, "row_pages page_size"]:
    """Row pages m in order, so that the last row above the threshold in a column is the one seen last."""
    row_pages, page_size, _ = keys.shape

    def one_tile(carry, pair):
        last, removed = carry
        m, n = pair
        tile = _similarities(keys[m], keys[n], same=m == n)
        row, value = _last_above(tile, threshold)
        found = row >= 0
        last = last.at[n].set(jnp.where(found, row + m * page_size, last[n]))
        removed = removed.at[n].set(jnp.where(found, value, removed[n]))
        return (last, removed), (m, tile.sum(axis=1))

    page = jnp.arange(row_pages, dtype=jnp.int32)
    pairs = jnp.repeat(page, row_pages), jnp.tile(page, row_pages)
    start = jnp.full((row_pages, page_size), -1, jnp.int32), jnp.zeros((row_pages, page_size), jnp.float32)
    (last, removed), (_, sums) = lax.scan(one_tile, start, pairs)
    sums = sums.reshape(row_pages, row_pages, page_size).sum(axis=1).reshape(-1)
    # A column without one removes 0 from entry 0.
    sums = sums.at[jnp.maximum(last, 0).reshape(-1)].add(-removed.reshape(-1))
    return sums.reshape(row_pages, page_size)


@functools.cache
def _kernel(rows, row_pages, kv_heads, page_size, head_dim, dtype, threshold, config: Config):
    consumers, slots = config.consumers, config.slots
    block_n = min(config.block_n, page_size)
    blocks = page_size // WGMMA_ROWS
    tile, per_row, per_column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    num_items = rows * row_pages * kv_heads

    def iota(shape, axis):
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=tile)

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
            plgpu.set_max_registers(24, action="decrease")
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
                    for b in range(blocks):
                        part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                        k = plgpu.load(keys.at[part], layout=tile)
                        keys[part] = jnp.where(iota(k.shape, 0) < held - b * WGMMA_ROWS, k, jnp.zeros_like(k))
                        sums[part] = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), per_row)
                    plgpu.commit_smem()

                used_blocks = jnp.where(held > 0, blocks, 0)

                def norms(b, carry):
                    part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                    k = plgpu.load(keys.at[part], layout=tile).astype(jnp.float32)
                    inv[part] = 1.0 / jnp.maximum(jnp.sqrt((k * k).sum(axis=1)), SMALLEST_NORM)
                    return carry

                lax.fori_loop(0, used_blocks, norms, 0)

                def row_block(b, carry):
                    part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                    inv_row = plgpu.load(inv.at[part], layout=per_row)
                    limit = threshold / inv_row
                    total = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), per_row)
                    best = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -1, jnp.int32), per_row)
                    for j in range(page_size // block_n):
                        columns = pl.ds(j * block_n, block_n)

                        def multiply(acc, columns=columns):
                            plgpu.wgmma(acc, keys.at[part], keys.at[columns].transpose((1, 0)))
                            return acc[...]

                        g = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, block_n), jnp.float32))
                        inv_column = plgpu.load(inv.at[columns], layout=per_column)
                        g = g * lax.broadcast_in_dim(inv_column, g.shape, [1])
                        column = iota(g.shape, 1) + j * block_n

                        def off_diagonal(g, column=column):
                            return jnp.where(iota(g.shape, 0) + b * WGMMA_ROWS == column, 0.0, g)

                        g = lax.cond(lax.div(b * WGMMA_ROWS, block_n) == j, off_diagonal, lambda g: g, g)
                        total = total + g.sum(axis=1)
                        c = g * lax.broadcast_in_dim(inv_row, g.shape, [0])
                        key = lax.bitcast_convert_type(c + VALUE_OFFSET, jnp.int32)
                        key = key + (lax.shift_left(column, VALUE_BITS) - VALUE_OFFSET_BITS)
                        key = jnp.where(g > lax.broadcast_in_dim(limit, g.shape, [0]), key, -1)
                        best = jnp.maximum(best, key.max(axis=1))
                    sums[part] = total * inv_row
                    last_of[part] = lax.shift_right_arithmetic(best, VALUE_BITS)
                    value = (best & ((1 << VALUE_BITS) - 1)) + VALUE_OFFSET_BITS
                    value_of[part] = lax.bitcast_convert_type(value, jnp.float32) - VALUE_OFFSET
                    return carry

                lax.fori_loop(0, used_blocks, row_block, 0)
                plgpu.barrier_arrive(free.at[slot])

                def remove(b, carry):
                    part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)
                    total = plgpu.load(sums.at[part], layout=per_row)
                    shape = (WGMMA_ROWS, WGMMA_ROWS)
                    for j in range(blocks):
                        columns = pl.ds(j * WGMMA_ROWS, WGMMA_ROWS)
                        last = plgpu.load(last_of.at[columns], layout=per_column)
                        value = plgpu.load(value_of.at[columns], layout=per_column)
                        here = iota(shape, 0) + b * WGMMA_ROWS == lax.broadcast_in_dim(last, shape, [1])
                        total = total - jnp.where(here, lax.broadcast_in_dim(value, shape, [1]), 0.0).sum(axis=1)
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
