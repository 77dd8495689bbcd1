"""Decode attention: one query token a row over the row's pages.

out[r, h] = softmax(q[r, h] · Kᵀ · scale) V over entries 0 … cache_len[r] − 1, in float32.

The Hopper kernel is persistent: every SM runs the same number of streams, each a producer warpgroup that keeps tiles of K and V
in flight by TMA, across work items, and a consumer warpgroup with wgmma. Work items are (row, chunk of tiles, kv head), longest
first; rows longer than a chunk are merged by their log-sum-exp afterwards (split KV).
"""

import dataclasses
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

LOG2E = math.log2(math.e)
MASKED = -1e30
WGMMA_ROWS = 64
"""Query heads of a kv head are padded to this many rows in shared memory."""


@dataclass(frozen=True)
class Config:
    """Tile sizes of the Hopper kernel.

    Attributes:
        block_k: entries of a K or V tile.
        stages: tiles in flight a stream.
        streams: producer-consumer pairs a program; a second one hides the softmax of the first.
        max_chunk: tiles of the longest work item; longer rows are split.
        num_programs: persistent programs: one an SM.
        weights_in_smem: the softmax weights pass through shared memory, since interpret mode has no wgmma on registers.
    """

    block_k: int = 64
    stages: int = 2
    streams: int = 2
    max_chunk: int = 40
    num_programs: int = 132
    weights_in_smem: bool = False


DEFAULT = Config()
TUNING_CONFIGS = (
    DEFAULT,
    Config(streams=1, stages=5),
    Config(block_k=128, streams=1, stages=3),
)
"""What `pallas_kernels.bench --tune` compares."""


def paged_attention(
    queries: Float[Array, "rows heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows max_pages"],
    cache_len: Int[Array, " rows"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """Attention output of one token a row; rows with cache_len 0 give zeros.

    Entries past cache_len are never seen; in the pages of a row they must be finite for "pallas" (0 · NaN is NaN).

    Raises:
        ValueError: "pallas" for shapes, dtypes or a device that the kernel cannot take, with those that work.
    """
    scale = 1.0 / math.sqrt(queries.shape[-1]) if scale is None else scale
    config = config or choose(queries, k_pages, page_ids)
    problem = tiling_problem(queries, k_pages, config.block_k)
    if resolve("paged_attention", implementation, problem=problem) == "xla":
        return _reference(queries, k_pages, v_pages, page_ids, cache_len, scale)
    return _hopper(queries, k_pages, v_pages, page_ids, cache_len, scale, config)


def choose(queries, k_pages, page_ids, base: Config = DEFAULT, items_per_stream: int = 2) -> Config:
    """`base` with chunks short enough that full rows make some work items a stream, long enough to be worth a merge."""
    tiles = -(-page_ids.shape[1] * k_pages.shape[2] // base.block_k)
    items = items_per_stream * base.num_programs * base.streams
    chunk = -(-queries.shape[0] * k_pages.shape[1] * tiles // items)
    return dataclasses.replace(base, max_chunk=min(max(chunk, 4), base.max_chunk))


def tiling_problem(queries, k_pages, block_k: int) -> str | None:
    """Why the Hopper attention kernels cannot take these shapes or dtypes, with what works; None if they can."""
    heads, head_dim = queries.shape[1:]
    kv_heads, page_size = k_pages.shape[1:3]
    if queries.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != queries.dtype:
        return f"queries {queries.dtype} and pages {k_pages.dtype} must both be bfloat16 or float16 for 'pallas'; use 'xla'"
    if head_dim not in (64, 128, 256):
        return f"head_dim={head_dim} must be 64, 128 or 256 for 'pallas'; use 'xla'"
    if heads % kv_heads or heads // kv_heads > WGMMA_ROWS:
        return f"heads={heads} must be a multiple of kv_heads={kv_heads}, at most {WGMMA_ROWS} times as many"
    if page_size % 8 or (page_size % block_k and block_k % page_size):
        return f"page_size={page_size} must divide {block_k} (and be a multiple of 8) or be a multiple of it"
    return None


def _reference(queries, k_pages, v_pages, page_ids, cache_len, scale):
    rows, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    entries = page_ids.shape[1] * page_size
    precision = lax.Precision.HIGHEST

    def gather(pool):
        # Widened before the products: logits rounded to bfloat16 would lose what the softmax needs.
        pages = pool[page_ids].transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, entries, head_dim)
        return pages.astype(jnp.float32)

    live = jnp.arange(entries, dtype=jnp.int32)[None, :] < cache_len[:, None]
    q = queries.reshape(rows, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    logits = jnp.einsum("rkgd,rksd->rkgs", q, gather(k_pages), precision=precision) * scale
    logits = jnp.where(live[:, None, None], logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1, where=live[:, None, None])
    # Entries past cache_len may hold anything here, NaN included.
    values = jnp.where(live[:, None, :, None], gather(v_pages), 0)
    out = jnp.einsum("rkgs,rksd->rkgd", weights, values, precision=precision)
    return out.reshape(rows, heads, head_dim).astype(queries.dtype)


def work_list(
    cache_len: Int[Array, " rows"], max_chunks: int, config: Config
) -> tuple[Int[Array, "items 3"], Int[Array, " 1"]]:
    """((row, chunk, tiles) of every work item, the longest first if rows are split, and how many). The same for all layers."""
    rows = cache_len.shape[0]
    tiles = -(-cache_len // config.block_k)
    if max_chunks == 1:
        row = jnp.arange(rows, dtype=jnp.int32)
        return jnp.stack([row, jnp.zeros_like(row), tiles], axis=1), jnp.full(1, rows, jnp.int32)
    chunk = jnp.arange(max_chunks, dtype=jnp.int32) * config.max_chunk
    size = jnp.clip(tiles[:, None] - chunk[None, :], 0, config.max_chunk).reshape(-1)
    order = jnp.argsort(-size).astype(jnp.int32)
    items = jnp.stack([order // max_chunks, order % max_chunks, size[order]], axis=1)
    return items, jnp.sum(size > 0, dtype=jnp.int32)[None]


def _hopper(queries, k_pages, v_pages, page_ids, cache_len, scale, config: Config):
    rows, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group = heads // kv_heads
    max_chunks = -(-page_ids.shape[1] * page_size // (config.block_k * config.max_chunk))
    items, num_items = work_list(cache_len, max_chunks, config)
    kernel = _kernel(rows, kv_heads, group, head_dim, page_size, max_chunks, queries.dtype, scale, config)
    out, lse = kernel(
        queries.reshape(rows, kv_heads, group, head_dim), k_pages, v_pages, page_ids, cache_len, items, num_items
    )
    out = _merge_chunks(out, lse[..., :group], cache_len, config) if max_chunks > 1 else out[:, 0]
    return out.reshape(rows, heads, head_dim)


def _merge_chunks(out, lse, cache_len, config: Config):
    """Σ_c 2^(lse_c − max) out_c / Σ_c 2^(lse_c − max) over a row's chunks; unused chunks hold anything."""
    chunk_start = jnp.arange(out.shape[1], dtype=jnp.int32) * (config.max_chunk * config.block_k)
    used = (chunk_start[None, :] < cache_len[:, None])[:, :, None, None]
    lse = jnp.where(used, lse, -jnp.inf)
    weights = jnp.exp2(lse - jnp.maximum(lse.max(axis=1, keepdims=True), MASKED))
    weights = weights / jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
    parts = jnp.where(used[..., None], out.astype(jnp.float32), 0.0)
    return jnp.sum(weights[..., None] * parts, axis=1).astype(out.dtype)


def add_product(acc, weights, values, weights_smem=None):
    """acc + weights · values with wgmma; weights from registers, or by way of `weights_smem` if that is given."""
    if weights_smem is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))
    weights_smem[...] = weights
    plgpu.commit_smem()

    def multiply(ref):
        plgpu.wgmma(ref, weights_smem, values)
        return ref[...]

    return acc + pl.run_scoped(multiply, plgpu.ACC(acc.shape, jnp.float32))


@functools.cache
def _kernel(rows, kv_heads, group, head_dim, page_size, max_chunks, dtype, scale, config: Config):
    block_k, stages, streams = config.block_k, config.stages, config.streams
    copies = max(1, block_k // page_size)
    sub_tiles = max(1, page_size // block_k)
    span = block_k // copies

    def body(q_ref, k_ref, v_ref, table_ref, len_ref, items_ref, count_ref, out_ref, lse_ref, *scratch):
        q_smem, io_smem, k_smem, v_smem, lse_smem, q_bar, k_bar, v_bar, k_free, v_free, *w_smem = scratch
        wg = lax.axis_index("wg")
        stream = lax.div(wg, jnp.int32(2))
        first = lax.axis_index("program") * streams + stream
        num_work = count_ref[0] * kv_heads
        step = jnp.int32(config.num_programs * streams)
        mine = lax.div(num_work - first + step - 1, step)

        def item(i):
            work = first + i * step
            index = lax.div(work, jnp.int32(kv_heads))
            head = lax.rem(work, jnp.int32(kv_heads))
            return items_ref[index, 0], items_ref[index, 1], items_ref[index, 2], head

        @pl.when(lax.rem(wg, jnp.int32(2)) == 1)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")

            def one_item(i, done):
                row, chunk, tiles, head = item(i)
                start = chunk * config.max_chunk

                def one_tile(t, carry):
                    slot = lax.rem(done + t, jnp.int32(stages))
                    tile = start + t
                    if copies == 1:
                        pages = [table_ref[row, lax.div(tile, jnp.int32(sub_tiles))]]
                        offset = lax.rem(tile, jnp.int32(sub_tiles)) * block_k
                    else:
                        # A tile past the table's end reads the last page; its entries are masked.
                        last = table_ref.shape[1] - 1
                        pages = [table_ref[row, jnp.minimum(tile * copies + c, last)] for c in range(copies)]
                        offset = 0

                    def load(pool, smem, bar, free):
                        @pl.when(done + t >= stages)
                        def _():
                            plgpu.barrier_wait(free.at[stream * stages + slot])

                        for c, page in enumerate(pages):
                            plgpu.copy_gmem_to_smem(
                                pool.at[page, head, pl.ds(offset, span)],
                                smem.at[stream, slot, pl.ds(c * span, span)],
                                bar.at[stream * stages + slot],
                            )

                    load(k_ref, k_smem, k_bar, k_free)
                    load(v_ref, v_smem, v_bar, v_free)
                    return carry

                lax.fori_loop(0, tiles, one_tile, 0)
                return done + tiles

            total = lax.fori_loop(0, mine, one_item, jnp.int32(0))
            # A barrier must not end with a phase that nobody has seen.
            for slot in range(stages):

                @pl.when(total > slot)
                def _(slot=slot):
                    plgpu.barrier_wait(k_free.at[stream * stages + slot])
                    plgpu.barrier_wait(v_free.at[stream * stages + slot])

        @pl.when(lax.rem(wg, jnp.int32(2)) == 0)
        def _consume():
            plgpu.set_max_registers(232 if streams == 1 else 208, action="increase")
            # Queries come and outputs go through a plain buffer, whose first `group` rows alone are copied; wgmma reads a
            # swizzled one. The rows in between stay zero.
            q_tile, io_tile = q_smem.at[stream], io_smem.at[stream]
            io_tile[...] = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, head_dim), dtype), plgpu.Layout.WGMMA)
            plgpu.commit_smem()

            def one_item(i, done):
                row, chunk, tiles, head = item(i)
                length = len_ref[row] - chunk * (config.max_chunk * block_k)
                plgpu.copy_gmem_to_smem(q_ref.at[row, head], io_tile.at[pl.ds(0, group)], q_bar.at[stream])
                plgpu.barrier_wait(q_bar.at[stream])
                q_tile[...] = plgpu.load(io_tile, layout=plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                m = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), MASKED, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
                l = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), 0.0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
                acc = plgpu.layout_cast(jnp.full((WGMMA_ROWS, head_dim), 0.0, jnp.float32), plgpu.Layout.WGMMA)

                def one_tile(t, carry):
                    acc, m, l = carry
                    slot = lax.rem(done + t, jnp.int32(stages))
                    plgpu.barrier_wait(k_bar.at[stream * stages + slot])

                    def qk(ref):
                        plgpu.wgmma(ref, q_tile, k_smem.at[stream, slot].transpose((1, 0)))
                        return ref[...]

                    s = pl.run_scoped(qk, plgpu.ACC((WGMMA_ROWS, block_k), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[stream * stages + slot])
                    ids = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, block_k), 1, layout=plgpu.Layout.WGMMA)
                    s = jnp.where(ids + t * block_k < length, s * (scale * LOG2E), MASKED)
                    m_new = jnp.maximum(m, s.max(axis=1))
                    alpha = jnp.exp2(m - m_new)
                    p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
                    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                    l = l * alpha + p.sum(axis=1)
                    plgpu.barrier_wait(v_bar.at[stream * stages + slot])
                    acc = add_product(acc, p.astype(dtype), v_smem.at[stream, slot], *(w.at[stream] for w in w_smem))
                    plgpu.barrier_arrive(v_free.at[stream * stages + slot])
                    return acc, m_new, l

                acc, m, l = lax.fori_loop(0, tiles, one_tile, (acc, m, l))
                # A row without entries has l = 0 and gives zeros.
                inverse = 1.0 / jnp.maximum(l, 1e-30)
                io_tile[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(dtype)
                if max_chunks > 1:
                    lse_smem.at[stream][...] = m + jnp.log2(l)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(io_tile.at[pl.ds(0, group)], out_ref.at[row, chunk, head])
                if max_chunks > 1:
                    plgpu.copy_smem_to_gmem(lse_smem.at[stream], lse_ref.at[row, chunk, head])
                plgpu.wait_smem_to_gmem(0)
                return done + tiles

            lax.fori_loop(0, mine, one_item, jnp.int32(0))

    # A tile's barrier waits for each of its copies.
    arrivals = (copies, copies, 1, 1)
    barriers = [plgpu.Barrier(num_arrivals=n, num_barriers=streams * stages) for n in arrivals]
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, max_chunks, kv_heads, group, head_dim), dtype),
            jax.ShapeDtypeStruct((rows, max_chunks, kv_heads, WGMMA_ROWS), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((streams, WGMMA_ROWS, head_dim), dtype),
            plgpu.SMEM((streams, WGMMA_ROWS, head_dim), dtype),
            plgpu.SMEM((streams, stages, block_k, head_dim), dtype),
            plgpu.SMEM((streams, stages, block_k, head_dim), dtype),
            plgpu.SMEM((streams, WGMMA_ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=streams),
            *barriers,
            *([plgpu.SMEM((streams, WGMMA_ROWS, block_k), dtype)] if config.weights_in_smem else []),
        ],
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=2 * streams,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
