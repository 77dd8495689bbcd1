"""Attention scores of cached entries, as the queries of the last window see them.

p[h, u, t] = softmax over t of q[u, h] · k[t] · scale, where row u sees entries t ≤ cache_len − window + u;
A[t] = mean (or maximum) over u of the maximum of p over the query heads of a kv head. All in float32.
Source: arXiv 2603.08743, sec. 4.1 and app. C.

The Hopper kernel is persistent. Its work item is a (row, kv head): a producer warpgroup loads the keys by TMA, the consumers share
out the tiles. Pass 1 multiplies queries by keys and keeps a running maximum and sum of every query; pass 2 goes backwards, over
tiles still in shared memory and then in L2, and multiplies keys by queries, so that a group's heads are columns of one thread.
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

REDUCTIONS = ("mean", "max")
CHUNK_LOGITS = 1 << 24
"""Logits that the XLA form holds at a time (64 MiB), or those of one row if that is more."""
WGMMA_ROWS = 64
MASKED = -1e30
MAX_COLUMNS = 128
"""Query rows of one kv head (group times the window, padded) that wgmma takes as columns; with 256 the kernel spills."""
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 152}


@dataclass(frozen=True)
class Config:
    """Tile sizes of the Hopper kernel.

    Attributes:
        block_k: keys of a tile; below 128 wgmma waits for shared memory.
        consumers: warpgroups that multiply; tile t belongs to consumer t % consumers.
        slots: tiles in shared memory a consumer: what pass 2 need not load again.
        num_programs: persistent programs: one an SM.
    """

    block_k: int = 128
    consumers: int = 2
    slots: int = 3
    num_programs: int = 132


def window_scores(
    queries: Float[Array, "rows window heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows row_pages"],
    cache_len: Int[Array, " rows"],
    *,
    scale: float | None = None,
    reduce: str = "mean",
    implementation: str | None = None,
    config: Config | None = None,
) -> Float[Array, "rows kv_heads entries"]:
    """A of every entry, float32; entries past cache_len score 0, whatever their pages hold.

    The window is entries cache_len − window … cache_len − 1; entries = row_pages · page_size. `scale` is 1/√head_dim by default.
    `None` takes XLA for what the kernel cannot tile.

    Raises:
        ValueError: unknown `reduce`, heads that kv_heads does not divide, or shapes and dtypes that "pallas" cannot tile.
    """
    heads, head_dim = queries.shape[2:]
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce={reduce!r} is not one of {list(REDUCTIONS)}")
    if heads % k_pages.shape[1]:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={k_pages.shape[1]}")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    config = config or _choose(queries, k_pages)
    chosen = resolve("window_scores", implementation)
    problem = _problem(queries, k_pages, config)
    if implementation == "pallas" and problem:
        raise ValueError(problem)
    if chosen == "xla" or problem:
        return _reference(queries, k_pages, page_ids, cache_len, scale, reduce)
    return _hopper(queries, k_pages, page_ids, cache_len, scale, reduce, config)


def _choose(queries, k_pages) -> Config:
    """Fewer tiles in shared memory where the queries of a kv head take more than one wgmma tile of it."""
    columns = _columns(queries.shape[1], queries.shape[2] // k_pages.shape[1])
    return Config() if columns <= WGMMA_ROWS else Config(slots=2)


def _problem(queries, k_pages, config: Config) -> str | None:
    """Why the kernel cannot take these inputs."""
    window, heads, head_dim = queries.shape[1:]
    kv_heads, page_size = k_pages.shape[1:3]
    if queries.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != queries.dtype:
        return (
            f"queries are {queries.dtype} and pages {k_pages.dtype}, but 'pallas' takes bfloat16 or float16; use 'xla'"
        )
    if head_dim not in (64, 128):
        return f"head_dim={head_dim} must be 64 or 128 for 'pallas'; use 'xla'"
    if page_size % 8 or (page_size % config.block_k and config.block_k % page_size):
        return f"page_size={page_size} must divide {config.block_k} or be a multiple of it for 'pallas'; use 'xla'"
    if _columns(window, heads // kv_heads) > MAX_COLUMNS:
        return f"window={window} times {heads // kv_heads} heads a kv head exceed {MAX_COLUMNS} columns; use 'xla'"
    return None


def _columns(window: int, group: int) -> int:
    return -(-group * (-(-window // 8) * 8) // WGMMA_ROWS) * WGMMA_ROWS


def _reference(queries, k_pages, page_ids, cache_len, scale, reduce):
    _, window, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    entries = page_ids.shape[1] * page_size
    entry = jnp.arange(entries, dtype=jnp.int32)

    def one_row(arrays):
        q, ids, length = arrays
        keys = k_pages[ids].astype(q.dtype).transpose(1, 0, 2, 3).reshape(kv_heads, entries, head_dim)
        q = q.reshape(window, kv_heads, heads // kv_heads, head_dim)
        logits = jnp.einsum(
            "ukgd,ktd->kgut", q, keys, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
        )
        seen = entry[None, :] <= length - window + jnp.arange(window, dtype=jnp.int32)[:, None]
        logits = jnp.where(seen[None, None], logits * scale, -jnp.inf)
        # A window row before the first entry sees nothing: zeros, not NaN.
        highest = jnp.maximum(logits.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
        p = jnp.exp(logits - highest)
        p = p / jnp.maximum(p.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        p = p.max(axis=1)
        return p.mean(axis=1) if reduce == "mean" else p.max(axis=1)

    rows_at_once = max(1, CHUNK_LOGITS // (heads * window * entries))
    return lax.map(one_row, (queries, page_ids, cache_len), batch_size=min(rows_at_once, queries.shape[0]))


def _hopper(queries, k_pages, page_ids, cache_len, scale, reduce, config: Config):
    rows, window, heads, head_dim = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    row_pages = page_ids.shape[1]
    group = heads // kv_heads
    # A kv head's columns: head by head, each with its window rows padded to 8.
    q = queries.reshape(rows, window, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -window % 8), (0, 0)))
    q = q.reshape(rows, kv_heads, -1, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, _columns(window, group) - q.shape[2]), (0, 0)))
    kernel = _kernel(
        rows, row_pages, kv_heads, page_size, head_dim, queries.dtype, window, group, scale, reduce == "mean", config
    )
    return kernel(q, k_pages, page_ids, cache_len)[..., : row_pages * page_size]


@functools.cache
def _kernel(rows, row_pages, kv_heads, page_size, head_dim, dtype, window, group, scale, is_mean, config: Config):
    block_k, consumers, slots = config.block_k, config.consumers, config.slots
    head_columns = -(-window // 8) * 8
    columns = _columns(window, group)
    copies = max(1, block_k // page_size)
    sub_tiles = max(1, page_size // block_k)
    span = block_k // copies
    all_tiles = -(-row_pages * page_size // block_k)
    to_exp2 = scale * math.log2(math.e)
    tile, per_row, per_column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    i32 = jnp.int32

    def iota(shape, axis):
        return plgpu.broadcasted_iota(i32, shape, axis, layout=tile)

    def filled(value):
        return plgpu.layout_cast(jnp.full((WGMMA_ROWS,), value, jnp.float32), per_row)

    def body(q_ref, k_ref, ids_ref, len_ref, out_ref, q_smem, k_smem, stats_smem, out_smem, *barriers):
        q_full, q_free, full, free, stats_ready = barriers
        wg = lax.axis_index("wg")
        first = lax.axis_index("program")
        mine = lax.div(rows * kv_heads - first + config.num_programs - 1, i32(config.num_programs))

        def item(i):
            index = first + i * config.num_programs
            row = lax.div(index, i32(kv_heads))
            length = len_ref[row]
            return row, lax.rem(index, i32(kv_heads)), length, lax.div(length + block_k - 1, i32(block_k))

        def tiles_of(consumer, tiles):
            return lax.div(jnp.maximum(tiles - consumer + consumers - 1, 0), i32(consumers))

        def slot_of(i, tile_id):
            # Every other item fills a consumer's slots in the other direction: pass 2 frees them last to first.
            slot = lax.rem(lax.div(tile_id, i32(consumers)), i32(slots))
            slot = jnp.where(lax.rem(i, i32(2)) == 0, slot, slots - 1 - slot)
            return slot * consumers + lax.rem(tile_id, i32(consumers))

        @pl.when(wg == consumers)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")

            def one_item(i, used):
                row, head, _, tiles = item(i)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(q_free)

                plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem, q_full)

                def load(t, used):
                    slot = slot_of(i, t)

                    @pl.when((lax.shift_right_logical(used, slot) & 1) == 1)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for c in range(copies):
                        # A tile past the table's end reads the last page; its entries are masked.
                        page = jnp.minimum(t * copies + c, row_pages - 1) if copies > 1 else lax.div(t, i32(sub_tiles))
                        offset = 0 if copies > 1 else lax.rem(t, i32(sub_tiles)) * block_k
                        plgpu.copy_gmem_to_smem(
                            k_ref.at[ids_ref[row, page], head, pl.ds(offset, span)],
                            k_smem.at[slot, pl.ds(c * span, span)],
                            full.at[slot],
                        )
                    return used | lax.shift_left(i32(1), slot)

                used = lax.fori_loop(0, tiles, load, used)
                again = jnp.maximum(tiles - slots * consumers, 0)
                return lax.fori_loop(0, again, lambda k, used: load(again - 1 - k, used), used)

            used = lax.fori_loop(0, mine, one_item, i32(0))
            for slot in range(slots * consumers):

                @pl.when((lax.shift_right_logical(used, slot) & 1) == 1)
                def _(slot=slot):
                    plgpu.barrier_wait(free.at[slot])

            @pl.when(mine > 0)
            def _():
                plgpu.barrier_wait(q_free)

        @pl.when(wg < consumers)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS[consumers], action="increase")

            def one_item(i, carry):
                row, head, length, tiles = item(i)
                count = tiles_of(wg, tiles)
                plgpu.barrier_wait(q_full)

                def unseen(shape, axis):
                    """First entry that a query does not see."""
                    return lax.rem(iota(shape, axis), i32(head_columns)) + (length - window + 1)

                def statistics(o, carry):
                    t = o * consumers + wg
                    slot = slot_of(i, t)
                    plgpu.barrier_wait(full.at[slot])
                    out = []
                    for b, (m, l) in enumerate(carry):

                        def multiply(acc, b=b):
                            plgpu.wgmma(
                                acc, q_smem.at[pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)], k_smem.at[slot].transpose((1, 0))
                            )
                            return acc[...]

                        def mask(x):
                            entry = iota(x.shape, 1) + t * block_k
                            return jnp.where(entry < unseen(x.shape, 0), x, MASKED)

                        x = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, block_k), jnp.float32)) * to_exp2
                        x = lax.cond((t + 1) * block_k > length - window + 1, mask, lambda x: x, x)
                        m_new = jnp.maximum(m, x.max(axis=1))
                        p = jnp.exp2(x - lax.broadcast_in_dim(m_new, x.shape, [0]))
                        out.append((m_new, l * jnp.exp2(m - m_new) + p.sum(axis=1)))

                    @pl.when(o + slots < count)
                    def _():
                        plgpu.barrier_arrive(free.at[slot])

                    return tuple(out)

                start = tuple((filled(MASKED), filled(0.0)) for _ in range(columns // WGMMA_ROWS))
                for b, pair in enumerate(lax.fori_loop(0, count, statistics, start)):
                    for x, value in enumerate(pair):
                        stats_smem[wg, x, pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)] = value
                plgpu.barrier_arrive(stats_ready)
                plgpu.barrier_wait(stats_ready)
                maxima = [plgpu.load(stats_smem.at[c, 0], layout=per_column) for c in range(consumers)]
                totals = [plgpu.load(stats_smem.at[c, 1], layout=per_column) for c in range(consumers)]
                m = functools.reduce(jnp.maximum, maxima)
                log_sum = m + jnp.log2(sum(l * jnp.exp2(x - m) for x, l in zip(maxima, totals, strict=True)))

                def scores(k, carry):
                    t = (count - 1 - k) * consumers + wg
                    slot = slot_of(i, t)

                    @pl.when(k >= slots)
                    def _():
                        plgpu.barrier_wait(full.at[slot])

                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for b in range(block_k // WGMMA_ROWS):
                        part = pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)

                        def multiply(acc, part=part):
                            plgpu.wgmma(acc, k_smem.at[slot, part], q_smem.transpose((1, 0)))
                            return acc[...]

                        def mask(p, b=b):
                            entry = iota(p.shape, 0) + (t * block_k + b * WGMMA_ROWS)
                            return jnp.where(entry < unseen(p.shape, 1), p, 0.0)

                        x = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, columns), jnp.float32))
                        p = jnp.exp2(x * to_exp2 - lax.broadcast_in_dim(log_sum, x.shape, [1]))
                        p = lax.cond(t * block_k + (b + 1) * WGMMA_ROWS > length - window + 1, mask, lambda p: p, p)
                        heads = [p[:, g * head_columns : (g + 1) * head_columns] for g in range(group)]
                        best = functools.reduce(jnp.maximum, heads)
                        if head_columns != window:
                            best = jnp.where(iota(best.shape, 1) < window, best, 0.0)
                        out_smem[wg, part] = best.sum(axis=1) * (1.0 / window) if is_mean else best.max(axis=1)
                    plgpu.barrier_arrive(free.at[slot])
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[row, head, pl.ds(t * block_k, block_k)])
                    return carry

                lax.fori_loop(0, count, scores, 0)
                plgpu.barrier_arrive(q_free)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                end = tiles_of(wg, i32(all_tiles))

                @pl.when(end > count)
                def _nothing_held():
                    for b in range(block_k // WGMMA_ROWS):
                        out_smem[wg, pl.ds(b * WGMMA_ROWS, WGMMA_ROWS)] = filled(0.0)
                    plgpu.commit_smem()

                    def zero(o, carry):
                        t = o * consumers + wg
                        plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[row, head, pl.ds(t * block_k, block_k)])
                        return carry

                    lax.fori_loop(count, end, zero, 0)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                return carry

            lax.fori_loop(0, mine, one_item, 0)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, kv_heads, all_tiles * block_k), jnp.float32),
        scratch_types=[
            plgpu.SMEM((columns, head_dim), dtype),
            plgpu.SMEM((slots * consumers, block_k, head_dim), dtype),
            plgpu.SMEM((consumers, 2, columns), jnp.float32),
            plgpu.SMEM((consumers, block_k), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=consumers),
            plgpu.Barrier(num_arrivals=copies, num_barriers=slots * consumers),
            plgpu.Barrier(num_barriers=slots * consumers),
            plgpu.Barrier(num_arrivals=consumers),
        ],
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
