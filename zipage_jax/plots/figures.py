"""An empty figure, or the error that says how to install matplotlib."""


def new_figure(width: float, height: float):
    """A `matplotlib.figure.Figure` of that size in inches, outside pyplot, laid out by its contents.

    ImportError with the command if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("figures need matplotlib; install it with `uv sync --extra plots`") from None
    return Figure(figsize=(width, height), layout="constrained")
