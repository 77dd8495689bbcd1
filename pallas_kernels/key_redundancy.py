"""How much each cached key repeats the others: summed cosine similarities, the newest of near-duplicates spared.

k̂ = k / max(‖k‖, 1e-6); C[m, n] = k̂_m · k̂_n with a zero diagonal; in each column n the last m with C[m, n] > threshold is set
to 0; r[m] = Σ_n C[m, n]. `lightning` knows C only inside a page, `flash` over all entries of the row, tile by tile.
Source: arXiv 2603.08743, app. C.5 and C.7 (after R-KV, arXiv 2505.24133).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve
from pallas_kernels.key_redundancy_flash import FlashConfig, flash_redundancy
from pallas_kernels.key_redundancy_lightning import SMALLEST_NORM, LightningConfig, lightning_redundancy

MODES = ("lightning", "flash")
CHUNK_SIMILARITIES = 1 << 24
"""Elements of C, or keys, that the XLA form holds at a time (64 MiB), or those of one row if that is more."""


def key_redundancy(
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows row_pages"],
    cache_len: Int[Array, " rows"],
    *,
    mode: str = "lightning",
    threshold: float = 0.5,
    implementation: str | None = None,
    config: LightningConfig | FlashConfig | None = None,
) -> Float[Array, "rows kv_heads entries"]:
    """r of every entry, float32, before any softmax; 0 past cache_len, whatever the pages hold there.

    entries = row_pages · page_size. Memory beyond the result: O(entries · page_size) for `flash`. `None` takes XLA for what the
    kernels cannot tile. Near-duplicates whose C differs from the threshold by rounding may fall on either side of it.

    Raises:
        ValueError: unknown `mode`; pages that "pallas" cannot tile.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {list(MODES)}")
    chosen = resolve("key_redundancy", implementation)
    problem = _problem(k_pages)
    if implementation == "pallas" and problem:
        raise ValueError(problem)
    if chosen == "xla" or problem:
        return _reference(k_pages, page_ids, cache_len, mode, threshold)
    if mode == "lightning":
        return lightning_redundancy(k_pages, page_ids, cache_len, threshold, config or LightningConfig())
    return flash_redundancy(k_pages, page_ids, cache_len, threshold, config or FlashConfig())


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

    tiles = page_size * page_size * (row_pages if mode == "lightning" else 1)
    held = kv_heads * max(tiles, row_pages * page_size * k_pages.shape[3])
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
