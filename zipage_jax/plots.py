"""Figures from recorded numbers. Needs the `plots` extra (matplotlib)."""

from pathlib import Path


def require_matplotlib():
    """matplotlib.pyplot with a backend that needs no screen; ImportError with the fix if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib; install it with `uv sync --extra plots`") from None
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


PANELS = (
    (("running", "waiting"), "requests"),
    (("tokens_per_s",), "tokens per second"),
    (("occupancy",), "pages in use (share)"),
    (("ms_per_step",), "ms per step"),
)


def plot_series(points: list[dict], path: Path) -> None:
    """Four panels over time, as the paper's Figures 7 and 19-25, written to `path`."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    times = [point["time_s"] for point in points]
    for axis, (names, label) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            axis.plot(times, [point[name] for point in points], label=name)
        axis.set_ylabel(label)
        if len(names) > 1:
            axis.legend()
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.savefig(path, dpi=120)
    plt.close(figure)
