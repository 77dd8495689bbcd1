"""The pytrees that steps take and return: what the device owns (`CacheState`, `SeatState`) and what the host says (`*Batch`).

All layers share one pool per kind: layer l of page p lies at index l · num_pages + p, so that a kernel that works on pages
works on any group of layers, and an argument list holds four arrays instead of four per layer.
"""

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
    """

    k_pages: Float[Array, "layers*pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "layers*pages kv_heads page_size head_dim"]
    scores: Float[Array, "layers*pages kv_heads page_size"] | None
    window_queries: Float[Array, "layers*slots window heads head_dim"] | None
    num_layers: int = struct.field(pytree_node=False)

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
