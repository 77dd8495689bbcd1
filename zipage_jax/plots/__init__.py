"""Figures of what the engine does, made from its own records. Need matplotlib: `uv sync --extra plots` (or `notebooks`).

Every function returns a `matplotlib.figure.Figure`, which is no part of pyplot's state: save it with `savefig`, or let a
notebook show it (`%matplotlib inline` once; a figure at the end of a cell is then drawn). `survival_html` needs nothing.
"""

from zipage_jax.plots.budgets import draw_budgets
from zipage_jax.plots.pages import PageView, draw_pages
from zipage_jax.plots.series import draw_curves, draw_series, draw_steps
from zipage_jax.plots.survival import Html, draw_survival, survival_html

__all__ = [
    "Html",
    "PageView",
    "draw_budgets",
    "draw_curves",
    "draw_pages",
    "draw_series",
    "draw_steps",
    "draw_survival",
    "survival_html",
]
