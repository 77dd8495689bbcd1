"""What ran over time: requests, throughput, occupancy. As in arXiv 2603.08743, Fig. 7 and 19-25."""

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zipage_jax.metrics import StepRecord
from zipage_jax.plots.figures import new_figure

if TYPE_CHECKING:
    from zipage_jax.bench.simulate import Curves

CURVE_POINTS = 1_000
PANELS = (
    (("running", "waiting"), "requests"),
    (("tokens_per_s",), "tokens per second"),
    (("occupancy",), "pages in use (share)"),
    (("ms_per_step",), "ms per step"),
)


def draw_series(points: list[dict]):
    """Four panels over `time_s`: requests, tokens per second, occupancy, ms per step. A point is a dict of these numbers."""
    figure = new_figure(10, 6)
    axes = figure.subplots(2, 2, sharex=True)
    times = [point["time_s"] for point in points]
    for axis, (names, label) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            axis.plot(times, [point[name] for point in points], label=name)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        if len(names) > 1:
            axis.legend()
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    return figure


def draw_steps(records: Iterable[StepRecord], num_pages: int, *, steps: int = 8):
    """`draw_series` of an engine's own records (`llm.metrics.recent`), means over groups of `steps`.

    `num_pages` is the pool's (`llm.metrics.num_pages`). Tokens per second count decoded tokens.
    """
    points = []
    for group in itertools.batched(records, steps):
        seconds = sum(record.total_s for record in group)
        points.append(
            {
                "time_s": group[-1].time_s,
                "running": group[-1].running,
                "waiting": group[-1].waiting,
                "occupancy": group[-1].pages_used / num_pages,
                "tokens_per_s": sum(record.decode_rows for record in group) / max(seconds, 1e-9),
                "ms_per_step": 1e3 * seconds / len(group),
            }
        )
    return draw_series(points)


def draw_curves(curves: "Mapping[str, Mapping[str, Curves]]"):
    """Running, waiting, page occupancy and tokens per second of simulations: a column a workload, a line a variant."""
    figure = new_figure(5 * len(curves), 12)
    axes = figure.subplots(4, len(curves), squeeze=False)
    for column, (workload, variants) in enumerate(curves.items()):
        for variant, c in variants.items():
            stride = max(1, len(c.time_s) // CURVE_POINTS)
            time_s = c.time_s[::stride]
            # Tokens of the steps that ended between two points, over the time between them.
            totals = [sum(c.tokens[i + 1 : i + 1 + stride]) for i in range(0, len(c.tokens), stride)]
            spans = [b - a for a, b in itertools.pairwise(time_s)]
            rates = [total / span if span else 0.0 for total, span in zip(totals, spans, strict=False)]
            percent = [100 * share for share in c.occupancy[::stride]]
            for row, values in enumerate((c.running[::stride], c.waiting[::stride], percent, rates)):
                axes[row][column].plot(time_s[: len(values)], values, label=variant, linewidth=1)
        axes[0][column].set_title(workload)
        axes[3][column].set_xlabel("seconds")
    for row, label in enumerate(("running requests", "waiting requests", "pages held (%)", "tokens / s")):
        axes[row][0].set_ylabel(label)
    axes[0][0].legend()
    return figure
