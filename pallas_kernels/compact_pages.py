"""Moving kept entries together: the j-th kept entry of a row becomes entry j of the row's target pages, in place.

pool[target_ids[r, j // page_size], h, j % page_size] = pool[page_ids[r, i // page_size], h, i % page_size], i = kept[r, h, j],
all reads before all writes of a row. Source: arXiv 2603.08743, sec. 4.2 and app. C.

The Hopper kernel writes the pools in place. One program owns a (row, kv head) and goes through its targets in order, a tile of
entries at a time: read the tile into registers, wait for all threads, write it. Entries move to lower positions, so this is right
where no target overwrites a later source page; a second, smaller grid takes the other rows, all of whose entries go
through a staging buffer. Threads copy 16 bytes each: wgmma has no use here, and a TMA copy of one entry costs more than it moves.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm
from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import resolve

THREADS = 128


@dataclass(frozen=True)
class Config:
    """Sizes of the Hopper kernel.

    Attributes:
        tile: entries that a program moves at a time, in registers; divides page_size or is cut down to it.
        staging_programs: programs, each with a staging buffer for max_budget entries, for rows that cannot go in order.
    """

    tile: int = 64
    staging_programs: int = 132


def compact_pages(
    pools: tuple[Shaped[Array, "pages kv_heads page_size ..."], ...],
    page_ids: Int[Array, "rows row_pages"],
    kept: Int[Array, "rows kv_heads max_budget"],
    target_ids: Int[Array, "rows targets"],
    *,
    implementation: str | None = None,
    config: Config | None = None,
) -> tuple[Shaped[Array, "pages kv_heads page_size ..."], ...]:
    """The pools with every kept entry at its target; all other entries keep their bits. In place when the pools are donated.

    max_budget = targets · page_size. kept ascends; a value of row_pages · page_size marks a position that keeps nothing, and
    nothing is written there. A row's targets may be its own source pages in any order; no page is the target of two rows, or of
    one row and a source of another (null pages apart, where nothing may be written).

    Raises:
        ValueError: target pages that do not hold exactly max_budget entries, or pools of different page counts or sizes.
    """
    leading = {pool.shape[:3] for pool in pools}
    if len(leading) != 1:
        raise ValueError(f"pools must agree in [pages, kv_heads, page_size], not {sorted(leading)}")
    page_size = pools[0].shape[2]
    if target_ids.shape[1] * page_size != kept.shape[2]:
        raise ValueError(
            f"{target_ids.shape[1]} targets of {page_size} entries cannot hold exactly {kept.shape[2]} kept ones"
        )
    if resolve("compact_pages", implementation) == "xla":
        return _reference(pools, page_ids, kept, target_ids)
    return _hopper(pools, page_ids, kept, target_ids, config or Config())


def _reference(pools, page_ids, kept, target_ids):
    num_pages, kv_heads, page_size = pools[0].shape[:3]
    entries = page_ids.shape[1] * page_size
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    position = jnp.arange(kept.shape[2], dtype=jnp.int32)[None, None, :]
    source = jnp.minimum(kept, entries - 1)
    source_page = jnp.take_along_axis(page_ids[:, None, :], source // page_size, axis=2)
    # One past the last page: dropped by the scatter.
    target_page = jnp.where(kept < entries, jnp.repeat(target_ids, page_size, axis=1)[:, None, :], num_pages)
    moved = []
    for pool in pools:
        # The barrier makes XLA write the pool in place; without it the scatter gets a copy of the pool to work on.
        taken = lax.optimization_barrier(pool[source_page, head, source % page_size])
        moved.append(pool.at[target_page, head, position % page_size].set(taken, mode="drop", unique_indices=True))
    return tuple(moved)


def goes_in_order(
    page_ids: Int[Array, "rows row_pages"], target_ids: Int[Array, "rows targets"], used: Int[Array, "rows targets"]
) -> Int[Array, " rows"]:
    """1 for rows none of whose used targets is one of their own later source pages."""
    later = (
        jnp.arange(page_ids.shape[1], dtype=jnp.int32)[None, :]
        > jnp.arange(target_ids.shape[1], dtype=jnp.int32)[:, None]
    )
    overwritten = (target_ids[:, :, None] == page_ids[:, None, :]) & used[:, :, None] & later[None]
    return jnp.logical_not(overwritten.any(axis=(1, 2))).astype(jnp.int32)


def _hopper(pools, page_ids, kept, target_ids, config: Config):
    rows, kv_heads, max_budget = kept.shape
    page_size = pools[0].shape[2]
    entries = page_ids.shape[1] * page_size
    used = kept[:, 0, ::page_size] < entries
    in_order = goes_in_order(page_ids, target_ids, used)
    shapes = tuple((pool.shape[3:], pool.dtype) for pool in pools)
    refs = [jax.new_ref(pool) for pool in pools]
    for staged in (False, True):
        kernel = _kernel(
            shapes,
            rows,
            page_ids.shape[1],
            kv_heads,
            page_size,
            max_budget,
            math.gcd(config.tile, page_size),
            config.staging_programs if staged else 0,
        )
        kernel(*refs, page_ids, kept, target_ids, in_order)
    return tuple(jax.freeze(ref) for ref in refs)


@functools.cache
def _kernel(shapes, rows, row_pages, kv_heads, page_size, max_budget, tile, staging_programs):
    """Copies the rows that go in order, or with staging programs the others."""
    num_pools, entries, targets = len(shapes), row_pages * page_size, max_budget // page_size
    row_bytes = [math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes]
    vector_bytes = [math.gcd(n, 16) for n in row_bytes]

    def emit(_, *refs):
        i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
        add, mul, div, rem = arith.addi, arith.muli, arith.divui, arith.remui
        pointers = [mgpu.memref_ptr(ref) for ref in refs]
        pools, (ids, kept, target_ids, in_order), staging = (
            pointers[:num_pools],
            pointers[num_pools : num_pools + 4],
            pointers[num_pools + 4 :],
        )

        def const(value):
            return arith.constant(i32, ir.IntegerAttr.get(i32, value))

        def wide(x):
            return arith.extui(i64, x)

        def less(a, b):
            return arith.cmpi(arith.CmpIPredicate.ult, a, b)

        def at(pointer, entry, p, byte):
            offset = add(mul(entry, wide(const(row_bytes[p]))), wide(byte))
            return mgpu.getelementptr(pointer, [offset], i8)

        def load_i32(pointer, index):
            return llvm.load(i32, mgpu.getelementptr(pointer, [wide(index)], i32), alignment=4)

        def vector_type(p):
            n = vector_bytes[p]
            return ir.VectorType.get((n // 4,), i32) if n > 4 else ir.IntegerType.get_signless(8 * n)

        thread = rem(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), const(THREADS))
        program = arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))

        def pieces(p):
            """(entry in the tile, byte in the entry, whether this thread has one) of each of a thread's vectors."""
            per_entry = row_bytes[p] // vector_bytes[p]
            for start in range(0, tile * per_entry, THREADS):
                piece = add(thread, const(start))
                has = None
                if start + THREADS > tile * per_entry:
                    has = less(piece, const(tile * per_entry))
                    piece = arith.select(has, piece, const(0))
                yield div(piece, const(per_entry)), mul(rem(piece, const(per_entry)), const(vector_bytes[p])), has

        def one_item(item):
            row, head = div(item, const(kv_heads)), rem(item, const(kv_heads))
            first_kept = mul(item, const(max_budget))

            def pool_entry(page, offset):
                tile_of_page = add(mul(wide(page), wide(const(kv_heads))), wide(head))
                return add(mul(tile_of_page, wide(const(page_size))), wide(offset))

            def staged_entry(j):
                return add(mul(wide(program), wide(const(max_budget))), wide(j))

            def move(t, from_staging, to_staging):
                start = mul(t, const(tile))
                page = load_i32(target_ids, add(mul(row, const(targets)), div(start, const(page_size))))
                target = pool_entry(page, rem(start, const(page_size)))
                known, taken = {}, []

                def source(k, p, entry):
                    key = k, row_bytes[p] // vector_bytes[p]
                    if key not in known:
                        i = load_i32(kept, add(first_kept, add(start, entry)))
                        is_kept = less(i, const(entries))
                        i = arith.minui(i, const(entries - 1))
                        source_page = load_i32(ids, add(mul(row, const(row_pages)), div(i, const(page_size))))
                        known[key] = pool_entry(source_page, rem(i, const(page_size))), is_kept
                    return known[key]

                for p in range(num_pools):
                    for k, (entry, byte, has) in enumerate(pieces(p)):
                        place, writes = source(k, p, entry)
                        writes = writes if has is None else arith.andi(writes, has)
                        if from_staging:
                            place = staged_entry(add(start, entry))
                        pointer = at((staging if from_staging else pools)[p], place, p, byte)
                        taken.append(
                            (p, entry, byte, writes, llvm.load(vector_type(p), pointer, alignment=vector_bytes[p]))
                        )
                mgpu.warpgroup_barrier()
                for p, entry, byte, writes, value in taken:
                    place = staged_entry(add(start, entry)) if to_staging else add(target, wide(entry))
                    with mgpu.when(writes):
                        llvm.store(
                            value, at((staging if to_staging else pools)[p], place, p, byte), alignment=vector_bytes[p]
                        )

            def all_tiles(from_staging, to_staging):
                @mgpu.fori(const(max_budget // tile), [])
                def _(t, _carry):
                    with mgpu.when(less(load_i32(kept, add(first_kept, mul(t, const(tile)))), const(entries))):
                        move(t, from_staging, to_staging)
                    return []

            is_mine = arith.cmpi(arith.CmpIPredicate.eq, load_i32(in_order, row), const(0 if staging_programs else 1))
            with mgpu.when(is_mine):
                all_tiles(from_staging=False, to_staging=bool(staging_programs))
                if staging_programs:
                    mgpu.warpgroup_barrier()
                    all_tiles(from_staging=True, to_staging=False)
                    mgpu.warpgroup_barrier()

        if not staging_programs:
            one_item(program)
            return
        rest = arith.subi(const(rows * kv_heads + staging_programs - 1), program)

        @mgpu.fori(div(rest, const(staging_programs)), [])
        def _(i, _carry):
            one_item(add(program, mul(i, const(staging_programs))))
            return []

    def body(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)

    staging = tuple(jax.ShapeDtypeStruct((staging_programs, max_budget, *shape), dtype) for shape, dtype in shapes)
    return plgpu.kernel(
        body,
        out_type=staging if staging_programs else (),
        grid=(staging_programs or rows * kv_heads,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
