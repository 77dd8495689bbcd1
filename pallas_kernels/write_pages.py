"""Writing new tokens into pages, and their queries into query slots, in place.

XLA's scatter writes a donated pool in place (no copy, asserted by tests), so there is no kernel to beat it with.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import resolve


def write_pages(
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    page_ids: Int[Array, " tokens"],
    offsets: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "pages kv_heads page_size head_dim"],
    Float[Array, "pages kv_heads page_size head_dim"],
]:
    """The pools with token i at entry offsets[i] of page page_ids[i].

    No two tokens may share an entry, save on a null page, where any of them may win. In place when the pools are donated.
    """
    resolve("write_pages", implementation, ("xla", "pallas"))
    k_pages = k_pages.at[page_ids, :, offsets].set(keys, mode="drop", unique_indices=True)
    v_pages = v_pages.at[page_ids, :, offsets].set(values, mode="drop", unique_indices=True)
    return k_pages, v_pages


def write_window_queries(
    window_queries: Float[Array, "slots window heads head_dim"],
    queries: Float[Array, "tokens heads head_dim"],
    slots: Int[Array, " tokens"],
    window_rows: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> Float[Array, "slots window heads head_dim"]:
    """`window_queries` with token i's queries in row window_rows[i] of slot slots[i]; a null slot takes what nobody keeps."""
    resolve("write_window_queries", implementation, ("xla", "pallas"))
    return window_queries.at[slots, window_rows].set(queries, mode="drop", unique_indices=True)
