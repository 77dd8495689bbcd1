"""Prefill attention: a ragged batch of new tokens over their rows' pages, causal.

out[i] = softmax(q_i · Kᵀ · scale) V over entries 0 … cache_len − q_len + i of the row, in float32. The new tokens' own keys are
the last q_len entries, already written.

The Hopper kernel packs the query heads of a kv head and neighbouring tokens into the rows of a tile, so that a K or V tile is
loaded once for all of them. Blocks of tokens never span two rows: queries are gathered into blocks first, outputs back after.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve
from pallas_kernels.paged_attention import LOG2E, MASKED, WGMMA_ROWS, add_product, tiling_problem

QUERY_BLOCK = 64
"""Tokens that the reference handles at once: a block never spans two rows."""


@dataclass(frozen=True)
class Config:
    """Tile sizes of the Hopper kernel.

    Attributes:
        block_k: entries of a K or V tile.
        stages: tiles in flight.
        consumers: warpgroups that multiply, 64 query rows each, on the same tiles.
        weights_in_smem: the softmax weights pass through shared memory, since interpret mode has no wgmma on registers.
    """

    block_k: int = 128
    stages: int = 2
    consumers: int = 2
    weights_in_smem: bool = False


TUNING_CONFIGS = (Config(), Config(block_k=64, stages=4), Config(block_k=64, stages=4, consumers=3))
"""What `pallas_kernels.bench --tune` compares."""
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 152}
"""By warpgroups that multiply. A program that asks for more than its SM has waits forever."""


def prefill_attention(
    queries: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows max_pages"],
    query_start: Int[Array, " rows+1"],
    cache_len: Int[Array, " rows"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Attention of row r's tokens query_start[r] : query_start[r + 1]; tokens past the last row give zeros.

    Entries past cache_len are never seen; in the pages of a row they must be finite for "pallas" (0 · NaN is NaN).

    Raises:
        ValueError: "pallas" for shapes, dtypes or a device that the kernel cannot take, with those that work.
    """
    scale = 1.0 / math.sqrt(queries.shape[-1]) if scale is None else scale
    config = config or Config()
    problem = tiling_problem(queries, k_pages, config.block_k)
    if resolve("prefill_attention", implementation, problem=problem) == "xla":
        return _reference(queries, k_pages, v_pages, page_ids, query_start, cache_len, scale)
    return _hopper(queries, k_pages, v_pages, page_ids, query_start, cache_len, scale, config)


def _reference(queries, k_pages, v_pages, page_ids, query_start, cache_len, scale):
    """Blocks of one row's tokens in a loop of as many trips as there are blocks; each gathers its row's pages once."""
    tokens, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    block = min(QUERY_BLOCK, tokens)
    group = heads // kv_heads
    entries = page_ids.shape[1] * page_size
    precision = jax.lax.Precision.HIGHEST
    first_block = _first_block(query_start, block)
    padded = jnp.concatenate([queries, jnp.zeros((block, heads, head_dim), queries.dtype)])

    def gather(pool, row):
        pages = pool[jax.lax.dynamic_index_in_dim(page_ids, row, keepdims=False)]
        # Widened before the products: logits rounded to bfloat16 would lose what the softmax needs.
        return pages.transpose(1, 0, 2, 3).reshape(kv_heads, entries, head_dim).astype(jnp.float32)

    def one_block(i, out):
        row = jnp.searchsorted(first_block, i, side="right").astype(jnp.int32) - 1
        start = query_start[row] + (i - first_block[row]) * block
        q = jax.lax.dynamic_slice_in_dim(padded, start, block).reshape(block, kv_heads, group, head_dim)
        q = q.astype(jnp.float32)
        logits = jnp.einsum("tkgd,ksd->kgts", q, gather(k_pages, row), precision=precision)
        last = cache_len[row] - query_start[row + 1] + start + jnp.arange(block, dtype=jnp.int32)
        visible = jnp.arange(entries, dtype=jnp.int32)[None, :] <= last[:, None]
        logits = jnp.where(visible[None, None], logits * scale, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1, where=visible[None, None])
        live = jnp.arange(entries, dtype=jnp.int32)[None, :, None] < cache_len[row]
        values = jnp.where(live, gather(v_pages, row), 0)
        attended = jnp.einsum("kgts,ksd->tkgd", weights, values, precision=precision).astype(queries.dtype)
        token = start + jnp.arange(block, dtype=jnp.int32)
        token = jnp.where(token < query_start[row + 1], token, tokens)
        return out.at[token].set(attended.reshape(block, heads, head_dim), mode="drop")

    return jax.lax.fori_loop(0, first_block[-1], one_block, jnp.zeros_like(queries))


def _first_block(query_start: Int[Array, " rows+1"], block: int) -> Int[Array, " rows+1"]:
    """Index of each row's first block of `block` tokens; the last entry counts the blocks."""
    blocks = -(-(query_start[1:] - query_start[:-1]) // block)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(blocks, dtype=jnp.int32)])


def _hopper(queries, k_pages, v_pages, page_ids, query_start, cache_len, scale, config: Config):
    tokens, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    rows, group = page_ids.shape[0], heads // kv_heads
    tile_rows = config.consumers * WGMMA_ROWS
    block = tile_rows // group
    num_blocks = -(-tokens // block) + rows
    first_block = _first_block(query_start, block)

    index = jnp.arange(num_blocks, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(first_block, index, side="right").astype(jnp.int32) - 1, 0, rows - 1)
    start = query_start[row] + (index - first_block[row]) * block
    count = jnp.where(index < first_block[-1], jnp.clip(query_start[row + 1] - start, 0, block), 0)
    first_visible = cache_len[row] - query_start[row + 1] + start + 1
    blocks = jnp.stack([row, count, first_visible], axis=1)

    token = jnp.minimum(start[:, None] + jnp.arange(block, dtype=jnp.int32)[None, :], tokens - 1)
    q = queries[token].reshape(num_blocks, block, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(num_blocks, kv_heads, block * group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, tile_rows - block * group), (0, 0)))
    kernel = _kernel(num_blocks, kv_heads, group, head_dim, page_size, queries.dtype, scale, config)
    out = kernel(q, k_pages, v_pages, page_ids, blocks)

    out = out[:, :, : block * group].reshape(num_blocks, kv_heads, block, group, head_dim)
    index = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(query_start, index, side="right").astype(jnp.int32) - 1, 0, rows - 1)
    inside = index - query_start[row]
    out = out[first_block[row] + inside // block, :, inside % block].reshape(tokens, heads, head_dim)
    return jnp.where((index < query_start[-1])[:, None, None], out, 0)


@functools.cache
def _kernel(num_blocks, kv_heads, group, head_dim, page_size, dtype, scale, config: Config):
    block_k, stages, consumers = config.block_k, config.stages, config.consumers
    copies = max(1, block_k // page_size)
    sub_tiles = max(1, page_size // block_k)
    span = block_k // copies
    tile_rows = consumers * WGMMA_ROWS

    def body(q_ref, k_ref, v_ref, table_ref, blocks_ref, out_ref, *scratch):
        q_smem, k_smem, v_smem, q_bar, k_bar, v_bar, k_free, v_free, *w_smem = scratch
        # The last blocks of a row see most: start with them.
        block = num_blocks - 1 - lax.axis_index("block")
        head = lax.axis_index("head")
        wg = lax.axis_index("wg")
        row, count, first_visible = (blocks_ref[block, c] for c in range(3))
        tiles = jnp.where(count > 0, lax.div(first_visible + count - 1 + block_k - 1, jnp.int32(block_k)), 0)

        @pl.when(wg == consumers)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")

            def one_tile(t, carry):
                slot = lax.rem(t, jnp.int32(stages))
                if copies == 1:
                    pages = [table_ref[row, lax.div(t, jnp.int32(sub_tiles))]]
                    offset = lax.rem(t, jnp.int32(sub_tiles)) * block_k
                else:
                    # A tile past the table's end reads the last page; its entries are masked.
                    last = table_ref.shape[1] - 1
                    pages = [table_ref[row, jnp.minimum(t * copies + c, last)] for c in range(copies)]
                    offset = 0

                def load(pool, smem, bar, free):
                    @pl.when(t >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for c, page in enumerate(pages):
                        plgpu.copy_gmem_to_smem(
                            pool.at[page, head, pl.ds(offset, span)], smem.at[slot, pl.ds(c * span, span)], bar.at[slot]
                        )

                load(k_ref, k_smem, k_bar, k_free)
                load(v_ref, v_smem, v_bar, v_free)
                return carry

            lax.fori_loop(0, tiles, one_tile, 0)
            # A barrier must not end with a phase that nobody has seen.
            for slot in range(stages):

                @pl.when(tiles > slot)
                def _(slot=slot):
                    plgpu.barrier_wait(k_free.at[slot])
                    plgpu.barrier_wait(v_free.at[slot])

        @pl.when((wg < consumers) & (count > 0))
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS[consumers], action="increase")
            q_tile = q_smem.at[wg]
            rows_of = pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[block, head, rows_of], q_tile, q_bar.at[wg])
            plgpu.barrier_wait(q_bar.at[wg])
            m = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), MASKED, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            l = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), 0.0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            acc = plgpu.layout_cast(jnp.full((WGMMA_ROWS, head_dim), 0.0, jnp.float32), plgpu.Layout.WGMMA)

            def one_tile(t, carry, *, masked: bool):
                acc, m, l = carry
                slot = lax.rem(t, jnp.int32(stages))
                plgpu.barrier_wait(k_bar.at[slot])

                def qk(ref):
                    plgpu.wgmma(ref, q_tile, k_smem.at[slot].transpose((1, 0)))
                    return ref[...]

                s = pl.run_scoped(qk, plgpu.ACC((WGMMA_ROWS, block_k), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                s = s * (scale * LOG2E)
                if masked:
                    shape = (WGMMA_ROWS, block_k)
                    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                    entries = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                    # Row i is token i // group and sees the entries below first_visible + i // group. Without a division:
                    # group · entry + group - 1 < group · first_visible + i.
                    limit = first_visible * group - (group - 1) + wg * WGMMA_ROWS - t * (block_k * group)
                    s = jnp.where(entries * group < rows + limit, s, MASKED)
                m_new = jnp.maximum(m, s.max(axis=1))
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                l = l * alpha + p.sum(axis=1)
                plgpu.barrier_wait(v_bar.at[slot])
                acc = add_product(acc, p.astype(dtype), v_smem.at[slot], *(w.at[wg] for w in w_smem))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, m_new, l

            # Tiles that even the block's first token sees whole need no mask.
            whole = lax.div(first_visible, jnp.int32(block_k))
            carry = lax.fori_loop(0, whole, functools.partial(one_tile, masked=False), (acc, m, l))
            acc, m, l = lax.fori_loop(whole, tiles, functools.partial(one_tile, masked=True), carry)
            inverse = 1.0 / jnp.maximum(l, 1e-30)
            q_tile[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out_ref.at[block, head, rows_of])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_blocks, kv_heads, tile_rows, head_dim), dtype),
        scratch_types=[
            plgpu.SMEM((consumers, WGMMA_ROWS, head_dim), dtype),
            plgpu.SMEM((stages, block_k, head_dim), dtype),
            plgpu.SMEM((stages, block_k, head_dim), dtype),
            plgpu.Barrier(num_barriers=consumers),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            *([plgpu.SMEM((consumers, WGMMA_ROWS, block_k), dtype)] if config.weights_in_smem else []),
        ],
        grid=(num_blocks, kv_heads),
        grid_names=("block", "head"),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
