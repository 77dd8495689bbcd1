"""Moving kept entries together: the j-th kept entry of a row becomes entry j of the row's target pages, in place.

pool[target_ids[r, j // page_size], h, j % page_size] = pool[page_ids[r, i // page_size], h, i % page_size], i = kept[r, h, j],
all reads before all writes of a row. Source: arXiv 2603.08743, sec. 4.2 and app. C.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import resolve


def compact_pages(
    pools: tuple[Shaped[Array, "pages kv_heads page_size ..."], ...],
    page_ids: Int[Array, "rows row_pages"],
    kept: Int[Array, "rows kv_heads max_budget"],
    target_ids: Int[Array, "rows targets"],
    *,
    implementation: str | None = None,
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
    resolve("compact_pages", implementation, ("xla",))
    return _reference(pools, page_ids, kept, target_ids)


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
