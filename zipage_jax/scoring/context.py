"""What a policy may look at: one compression call's rows, with everything expensive computed when it is asked for.

A row is one request in one layer. Every array is float32 and covers `entries` = pages · page_size entries in time order, of
which the first num_entries[row] exist.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.key_redundancy import key_redundancy
from pallas_kernels.window_scores import window_scores


@dataclass(frozen=True, eq=False)
class ScoreContext:
    """The rows of one compression call.

    Attributes:
        queries: window queries after RoPE; the last one is the newest entry's.
        k_pages, v_pages: the pools (all layers); page_ids point into them.
        page_ids: pages of each row, layer offset included.
        num_entries: entries a row holds: all of its pages are full. 0 for padding rows.
        budget: entries a row keeps.
        history: the stored history F of entries that survived the compression before, 0 elsewhere; None if nobody needs it.
        history_len: entries at the front that have a history; 0 at a request's first compression.
        layer: index of the row's layer.
        seed: the row's random seed; differs from one compression of a request to the next.
        entries_readable: whether `keys`, `values` and `group_logits` may be read.
    """

    queries: Float[Array, "rows window heads head_dim"]
    k_pages: Float[Array, "pool kv_heads page_size head_dim"]
    v_pages: Float[Array, "pool kv_heads page_size head_dim"]
    page_ids: Int[Array, "rows pages"]
    num_entries: Int[Array, " rows"]
    budget: Int[Array, " rows"]
    history: Float[Array, "rows kv_heads entries"] | None
    history_len: Int[Array, " rows"]
    layer: Int[Array, " rows"]
    seed: Int[Array, " rows"]
    entries_readable: bool = False
    implementation: str | None = None
    _computed: dict = field(default_factory=dict, repr=False)

    @property
    def window(self) -> int:
        """Entries at the end whose queries score; they are always kept."""
        return self.queries.shape[1]

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]

    @property
    def max_entries(self) -> int:
        """The width of every per-entry array."""
        return self.page_ids.shape[1] * self.page_size

    @cached_property
    def entry(self) -> Int[Array, "1 entries"]:
        """Index of each entry: its age rank within the row, 0 the oldest."""
        return jnp.arange(self.max_entries, dtype=jnp.int32)[None, :]

    @cached_property
    def valid(self) -> Bool[Array, "rows 1 entries"]:
        """Entries that exist."""
        return (self.entry < self.num_entries[:, None])[:, None, :]

    @cached_property
    def in_window(self) -> Bool[Array, "rows 1 entries"]:
        """The last `window` entries."""
        return self.valid & (self.entry >= (self.num_entries - self.window)[:, None])[:, None, :]

    @cached_property
    def has_history(self) -> Bool[Array, "rows 1 entries"]:
        """Entries that survived the compression before."""
        return (self.entry < self.history_len[:, None])[:, None, :]

    @property
    def is_first(self) -> Bool[Array, "rows 1 1"]:
        """Rows that compress for the first time."""
        return (self.history_len == 0)[:, None, None]

    def attention(self, reduce: str = "mean") -> Float[Array, "rows kv_heads entries"]:
        """Attention that the window pays to each entry: softmax(q kᵀ/√d) over all entries, causal inside the window,
        maximum over the query heads of a kv head, then mean or max over the window. 0 past num_entries."""
        return self._once(
            ("attention", reduce),
            lambda: window_scores(
                self.queries,
                self.k_pages,
                self.page_ids,
                self.num_entries,
                reduce=reduce,
                implementation=self.implementation,
            ),
        )

    def redundancy(self, mode: str = "lightning", threshold: float = 0.5) -> Float[Array, "rows kv_heads entries"]:
        """Sum of each key's cosine similarities to the others of its page ("lightning") or of the row ("flash"), where in
        each column the last similarity above `threshold` counts as 0. 0 past num_entries."""
        return self._once(
            ("redundancy", mode, threshold),
            lambda: key_redundancy(
                self.k_pages,
                self.page_ids,
                self.num_entries,
                mode=mode,
                threshold=threshold,
                implementation=self.implementation,
            ),
        )

    @cached_property
    def keys(self) -> Float[Array, "rows kv_heads entries head_dim"]:
        """Keys, rotated to their positions; 0 past num_entries."""
        return self._gather(self.k_pages, "keys")

    @cached_property
    def values(self) -> Float[Array, "rows kv_heads entries head_dim"]:
        """Values; 0 past num_entries."""
        return self._gather(self.v_pages, "values")

    @cached_property
    def group_logits(self) -> Float[Array, "rows kv_heads window entries"]:
        """max over the query heads of a kv head of q kᵀ/√d; -inf where a query may not look (later entries, padding)."""
        keys = self.keys
        rows, window, heads, head_dim = self.queries.shape
        kv_heads = keys.shape[1]
        queries = self.queries.astype(jnp.float32).reshape(rows, window, kv_heads, heads // kv_heads, head_dim)
        logits = jnp.einsum("rwkgd,rked->rkgwe", queries, keys, precision=jax.lax.Precision.HIGHEST)
        last = self.num_entries[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None, :]
        seen = self.entry[None] <= last[:, :, None]
        return jnp.where(seen[:, None], logits.max(axis=2) / math.sqrt(head_dim), -jnp.inf)

    def _gather(self, pool, name: str):
        if not self.entries_readable:
            raise ValueError(
                f"a policy reads context.{name} without saying so; add `needs: ClassVar = frozenset({{'entries'}})` to it"
            )
        rows, pages = self.page_ids.shape
        _, kv_heads, page_size, head_dim = pool.shape
        taken = pool[self.page_ids].astype(jnp.float32)
        taken = taken.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, pages * page_size, head_dim)
        return jnp.where(self.valid[..., None], taken, 0.0)

    def _once(self, key, compute):
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]


def masked_softmax(
    logits: Float[Array, "*lead entries"], mask: Bool[Array, "*lead entries"]
) -> Float[Array, "*lead entries"]:
    """softmax over the last axis where `mask` holds, 0 elsewhere (and everywhere, if it holds nowhere)."""
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0.0, total, 1.0)
