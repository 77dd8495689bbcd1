"""Accuracy against budget, from `python -m zipage_jax.evals policies`."""

from zipage_jax.plots.figures import new_figure

PANELS = (("kl", "KL(full ‖ compressed), nats a token"), ("agreement", "same most likely token (share)"))


def draw_budgets(rows: list[dict]):
    """KL and agreement over the budget in entries, a line a policy.

    `rows` is what `zipage_jax.evals.policies.summarise` returns, or the "cells" of the command's JSON.
    """
    figure = new_figure(10, 4)
    axes = figure.subplots(1, 2)
    by_policy: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["budget"]):
        by_policy.setdefault(row["policy"], []).append(row)
    budgets = sorted({row["budget"] for row in rows})
    for axis, (key, label) in zip(axes, PANELS, strict=True):
        for policy, found in by_policy.items():
            axis.plot([row["budget"] for row in found], [row[key] for row in found], marker="o", label=policy)
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.set(xlabel="budget (entries)", ylabel=label)
    axes[0].set_yscale("log")
    axes[0].legend()
    return figure
