"""A request's page table with what its pages hold, before and after a compression. As arXiv 2603.08743, Fig. 1 and 3."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from numpy import ndarray

from zipage_jax.plots.figures import new_figure

KEPT, EVICTED, WINDOW, EMPTY = "#9ecae1", "#dddddd", "#fdae6b", "#ffffff"


@dataclass(frozen=True)
class PageView:
    """One request in one layer and kv head: its pages in time order and the token positions of the entries in them.

    `positions` come from `zipage_jax.evictions.alive_positions`, `page_ids` from the page table.
    """

    page_ids: tuple[int, ...]
    positions: Int[ndarray, " cache_len"]
    page_size: int

    def __post_init__(self):
        if len(self.positions) > len(self.page_ids) * self.page_size:
            raise ValueError(
                f"{len(self.positions)} entries do not fit {len(self.page_ids)} pages of {self.page_size}; give all page_ids"
            )


def draw_pages(before: PageView, after: PageView | None = None, *, window: int = 0):
    """Pages as rows of cells with token positions; with `after`, what is evicted is grey.

    The last `window` entries of the full table, whose queries score the others, are orange.
    """
    views = {"before": before, "after": after} if after is not None else {"page table": before}
    width = max(len(view.page_ids) for view in views.values()) * (before.page_size + 1)
    figure = new_figure(min(16.0, 1.5 + 0.32 * width), 1.1 * len(views) + 0.2)
    alive = set(before.positions.tolist() if after is None else after.positions.tolist())
    observers = set(before.positions[len(before.positions) - window :].tolist())
    for axis, (title, view) in zip(figure.subplots(len(views), 1, squeeze=False)[:, 0], views.items(), strict=True):
        _draw_row(axis, view, alive, observers)
        axis.set(xlim=(-0.2, width), ylim=(-0.1, 1.8), aspect="equal")
        axis.set_title(title, loc="left", fontsize=10)
        axis.axis("off")
    return figure


def _draw_row(axis, view: PageView, alive: set[int], observers: set[int]) -> None:
    for index, page_id in enumerate(view.page_ids):
        left = index * (view.page_size + 1)
        axis.text(left + view.page_size / 2, 1.2, f"page {page_id}", ha="center", fontsize=8)
        for offset in range(view.page_size):
            entry = index * view.page_size + offset
            position = int(view.positions[entry]) if entry < len(view.positions) else None
            colour = _colour(position, alive, observers)
            axis.add_patch(_cell(left + offset, colour))
            if position is not None:
                axis.text(left + offset + 0.5, 0.5, str(position), ha="center", va="center", fontsize=7)


def _colour(position: int | None, alive: set[int], observers: set[int]) -> str:
    if position is None:
        return EMPTY
    if position in observers:
        return WINDOW
    return KEPT if position in alive else EVICTED


def _cell(left: float, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((left, 0), 1, 1, facecolor=colour, edgecolor="#555555", linewidth=0.6)
