"""The pytrees that steps take and return: what the device owns (`CacheState`, `SeatState`) and what the host says (`*Batch`).

All layers share one pool per kind: layer l of page p lies at index l · num_pages + p, so that a kernel that works on pages
works on any group of layers, and an argument list holds four arrays instead of four per layer.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

NULL_PAGE = 0
"""Page that is never allocated; all padding points at it."""
NULL_SLOT = 0
"""Query slot of requests that have none, and of padding."""


@struct.dataclass
class CacheState:
    """Paged KV cache of all layers. Carried and donated by every step.

    `scores` (the global score F) is None unless the policy keeps a history; `window_queries` is None without compression.
    `positions` (the token position of each entry) is None unless evictions are recorded.
    """

    k_pages: Float[Array, "layers*pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "layers*pages kv_heads page_size head_dim"]
    scores: Float[Array, "layers*pages kv_heads page_size"] | None
    window_queries: Float[Array, "layers*slots window heads head_dim"] | None
    num_layers: int = struct.field(pytree_node=False)
    positions: Int[Array, "layers*pages kv_heads page_size"] | None = None

    @property
    def num_pages(self) -> int:
        """Pages of one layer, the null page included."""
        return self.k_pages.shape[0] // self.num_layers

    @property
    def num_slots(self) -> int:
        """Query slots of one layer, the null slot included."""
        return self.window_queries.shape[0] // self.num_layers


@struct.dataclass
class SeatState:
    """Per seat, what is born on the device. Carried and donated. Seat `max_num_seqs` (the last) takes padding.

    The arrays of `vocab` width are None until a request asks for a penalty, a bias or `min_tokens`.
    """

    last_token: Int[Array, " seats"]
    output_counts: Int[Array, "seats vocab"] | None = None
    prompt_mask: Bool[Array, "seats vocab"] | None = None
    bias: Float[Array, "seats vocab"] | None = None


@struct.dataclass
class CompressBatch:
    """Requests to compress, and where to. Padding rows have `budget` 0 and point at NULL_PAGE.

    Every source page is full: row r holds num_pages[r] · page_size entries in time order. `budget` counts entries kept
    (a multiple of page_size); `history_len` entries at the front carry a global score from the compression before (0: first).
    """

    page_ids: Int[Array, "rows pages"]
    num_pages: Int[Array, " rows"]
    target_ids: Int[Array, "rows target_pages"]
    budget: Int[Array, " rows"]
    history_len: Int[Array, " rows"]
    slots: Int[Array, " rows"]
    seeds: Int[Array, " rows"]


INT_FIELDS = ("cache_len", "position", "seat", "slot", "top_k", "seed")
FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
TOKEN_FIELDS = ("token", "position", "page_id", "offset", "slot", "window_row")


@struct.dataclass
class RowBatch:
    """Rows of one step, in a single int32 array, so that the host makes one transfer a step.

    Columns are INT_FIELDS, FLOAT_FIELDS (bit patterns), then the page table. `cache_len` counts the entries a row holds once
    this step has written its tokens; `position` is that of the row's last token; padding rows hold NULL_PAGE, `cache_len` 0
    and the last seat.
    """

    packed: Int[Array, "rows columns"]

    def ints(self, name: str) -> Int[Array, " rows"]:
        return self.packed[:, INT_FIELDS.index(name)]

    def floats(self, name: str) -> Float[Array, " rows"]:
        column = self.packed[:, len(INT_FIELDS) + FLOAT_FIELDS.index(name)]
        return jax.lax.bitcast_convert_type(column, jnp.float32)

    @property
    def page_ids(self) -> Int[Array, "rows max_pages"]:
        return self.packed[:, len(INT_FIELDS) + len(FLOAT_FIELDS) :]


@struct.dataclass
class PrefillBatch:
    """A ragged batch of new tokens: row r's are tokens query_start[r] : query_start[r + 1] of `tokens`.

    `tokens` has the columns TOKEN_FIELDS: where each token's K and V go, and where its query goes if it lies in the window
    of a page (NULL_SLOT otherwise). Rows that draw no token yet have the padding seat.
    """

    rows: RowBatch
    tokens: Int[Array, "tokens columns"]
    query_start: Int[Array, " rows+1"]

    def column(self, name: str) -> Int[Array, " tokens"]:
        return self.tokens[:, TOKEN_FIELDS.index(name)]


@struct.dataclass
class StepOutput:
    """What a step sends back to the host. The log probabilities are None unless a row asks for them."""

    tokens: Int[Array, " rows"]
    logprobs: "Logprobs | None" = None
    prompt_logprobs: "Logprobs | None" = None


@struct.dataclass
class Logprobs:
    """Log probabilities (nats) of drawn or given tokens: their own, their rank (1 is the most likely), the `num` best."""

    chosen: Float[Array, " rows"]
    rank: Int[Array, " rows"]
    top_ids: Int[Array, "rows num"]
    top: Float[Array, "rows num"]
