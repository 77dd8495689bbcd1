"""What compression left of a sequence: heat maps over layers and heads, and the text itself."""

import html
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from zipage_jax.evictions import kept_share_by_page
from zipage_jax.plots.figures import new_figure


def draw_survival(
    alive: Mapping[str, Int[np.ndarray, "layers kv_heads cache_len"]], num_tokens: int, *, bin_size: int = 1
):
    """A heat map for each name (a policy, say): share of the tokens of each bin that every layer and head still holds.

    Rows are layer by layer the kv heads; columns are positions in bins of `bin_size` tokens; `num_tokens` were written.
    """
    figure = new_figure(5 * len(alive) + 1, 4)
    axes = figure.subplots(1, len(alive), squeeze=False)[0]
    for axis, (name, positions) in zip(axes, alive.items(), strict=True):
        layers, kv_heads, _ = positions.shape
        share = kept_share_by_page(positions, num_tokens, bin_size).reshape(layers * kv_heads, -1)
        extent = (0, share.shape[1] * bin_size, layers, 0)
        image = axis.imshow(share, vmin=0, vmax=1, aspect="auto", interpolation="nearest", cmap="Blues", extent=extent)
        axis.set(title=name, xlabel="token position")
    axes[0].set_ylabel(f"layer ({kv_heads} kv heads each)")
    figure.colorbar(image, ax=axes, label="share alive")
    return figure


class Html(str):
    """A text that a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        return str(self)


def survival_html(tokens: Sequence[str], alive: Int[np.ndarray, "layers kv_heads cache_len"]) -> Html:
    """The tokens' texts, each the darker the more layers and heads still hold it; its share is its tooltip.

    `tokens` are all that were written, in order; ValueError if fewer than what is alive.
    """
    share = alive_share(alive, len(tokens))
    spans = [
        f'<span style="background: rgba(66, 146, 198, {value:.2f})" title="{value:.0%}">{html.escape(token)}</span>'
        for token, value in zip(tokens, share, strict=True)
    ]
    return Html(f'<div style="white-space: pre-wrap; line-height: 1.6">{"".join(spans)}</div>')


def alive_share(
    alive: Int[np.ndarray, "layers kv_heads cache_len"], num_tokens: int
) -> Float[np.ndarray, " num_tokens"]:
    """Share of the layers and heads that hold each position."""
    counts = np.bincount(alive.reshape(-1), minlength=num_tokens)
    if counts.size > num_tokens:
        raise ValueError(
            f"position {counts.size - 1} is alive, but only {num_tokens} tokens are given; give all of them"
        )
    return counts / (alive.shape[0] * alive.shape[1])
