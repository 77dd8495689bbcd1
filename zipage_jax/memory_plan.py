"""Memory plan: how many pages and query slots fit. Arithmetic on numbers of the model; knows no device. No jax.

m_kv bytes a page and m_q bytes a query slot, over all layers; with N_max pages a compressed request,
M = ⌊avail / (N_max · m_kv + m_q)⌋ slots and N_total = ⌊(avail − M · m_q) / m_kv⌋ pages. The null page and the null slot take
their share first, so that M requests can hold N_max pages each at once. `avail` is what is left after weights, the largest
step's activations and the compression's workspace. Source: arXiv 2603.08743, sec. 4.2, eq. (1) and (2).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """`num_pages` counts the null page, `num_slots` (M) does not count the null slot; bytes are over all layers."""

    num_pages: int
    num_slots: int
    page_bytes: int
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all pages and slots, the null ones included."""
        return self.num_pages * self.page_bytes + (self.num_slots + bool(self.slot_bytes)) * self.slot_bytes

    def __str__(self) -> str:
        return (
            f"{self.num_pages} pages of {self.page_bytes / 2**20:.2f} MiB and {self.num_slots} query slots of "
            f"{self.slot_bytes / 2**20:.2f} MiB: {self.total_bytes / 2**30:.2f} GiB"
        )


def page_bytes(
    *,
    num_layers: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    score_itemsize: int = 0,
    position_itemsize: int = 0,
    scale_itemsize: int = 0,
) -> int:
    """m_kv: bytes of one page over all layers.

    An entry has K and V of `itemsize`, and, each 0 if absent, a global score, its position, two scales of a quantised cache.
    """
    entry = 2 * head_dim * itemsize + score_itemsize + position_itemsize + 2 * scale_itemsize
    return num_layers * page_size * num_kv_heads * entry


def slot_bytes(*, num_layers: int, window: int, num_heads: int, head_dim: int, itemsize: int) -> int:
    """m_q: bytes of one query slot over all layers."""
    return num_layers * window * num_heads * head_dim * itemsize


def plan_memory(
    avail_bytes: int | None,
    *,
    page_bytes: int,
    slot_bytes: int = 0,
    max_pages: int | None = None,
    max_num_seqs: int,
    num_pages: int | None = None,
    num_slots: int | None = None,
) -> MemoryPlan:
    """Pages and slots that `avail_bytes` hold, or the given numbers if they fit.

    Args:
        avail_bytes: for pages and slots; None does not limit (then `num_pages` must be given).
        page_bytes: m_kv.
        slot_bytes: m_q, 0 without compression.
        max_pages: N_max of the engine's budget, None without compression.
        max_num_seqs: seats; more slots than that are of no use.
        num_pages: pages wanted, the null page included.
        num_slots: slots wanted.

    Raises:
        ValueError: what is wanted does not fit, or not even one request does.
    """
    if num_pages is None and avail_bytes is None:
        raise ValueError("neither num_pages nor kv_cache_bytes is known; give one of them")
    if max_pages is None:
        slots, slot_bytes = 0, 0
    else:
        if num_slots is not None:
            slots = num_slots
        elif num_pages is not None:
            slots = (num_pages - 1) // max_pages
        else:
            slots = (avail_bytes - page_bytes - slot_bytes) // (max_pages * page_bytes + slot_bytes)
        slots = min(slots, max_num_seqs)
    null_slot = slot_bytes if max_pages is not None else 0
    if num_pages is None:
        num_pages = (avail_bytes - slots * slot_bytes - null_slot) // page_bytes
    plan = MemoryPlan(num_pages, slots, page_bytes, slot_bytes)
    least = 1 + (max_pages or 1)
    if num_pages < least or (max_pages is not None and slots < 1):
        held = f"num_pages={num_pages}" if avail_bytes is None else f"{max(avail_bytes, 0) / 2**20:.1f} MiB"
        raise ValueError(
            f"{held} cannot hold one request: it needs {least} pages of {page_bytes / 2**20:.2f} MiB (the null page and "
            f"N_max={max_pages or 1}) and {slot_bytes / 2**20:.2f} MiB for queries; lower budget_pages, page_size or the "
            "weights' share, or give the cache more memory"
        )
    if avail_bytes is not None and plan.total_bytes > avail_bytes:
        raise ValueError(
            f"{plan} are more than the {avail_bytes / 2**30:.2f} GiB at hand; lower num_pages or num_query_slots"
        )
    return plan
