"""`python -m zipage_jax.evals policies`: how far each policy's predictions are from full KV, by budget.

Teacher-forced over long text: mean KL(full ‖ compressed) in nats and how often both think the same token most likely, over
the tokens that follow each document's first compression. Every policy is compared with `random` document by document (paired
bootstrap). The last line is one JSON object.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

import models
from zipage_jax.config import CompressionConfig
from zipage_jax.evals.teacher import divergence, full_pass
from zipage_jax.evals.texts import documents, fingerprint
from zipage_jax.scoring import PRESETS, resolve_policy

BASELINE = "random"
RESAMPLES = 10_000


@dataclass(frozen=True)
class Arguments:
    """Divergence of policies from full KV on long text.

    Attributes:
        model: a model source.
        policies: presets; all that evict by default.
        budgets: entries kept by a compression, multiples of page_size.
        page_size: entries of a page, and tokens between two compressions.
        window: queries that score.
        sink_len: first entries always kept.
        docs: documents.
        tokens: tokens scored per document and budget, a multiple of page_size.
        seed: of the random policy and of the bootstrap.
        one_width: pad page tables to the largest budget: programs are shared by all budgets, small budgets compute more.
        implementation: of the compression's kernels; None takes the device's default.
        cells: file of finished cells (one JSON line each); cells of an earlier run with the same settings are reused.
        output_json: write the result here too.
    """

    model: str = "smollm2"
    policies: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    budgets: tuple[int, ...] = (64, 128, 256, 512)
    page_size: int = 16
    window: int = 16
    sink_len: int = 0
    docs: int = 20
    tokens: int = 1024
    dtype: str = "float32"
    seed: int = 0
    one_width: bool = False
    implementation: str | None = "xla"
    cells: Path | None = None
    output_json: Path | None = None


@dataclass(frozen=True)
class Cell:
    """One policy at one budget: means per document."""

    policy: str
    budget: int
    kl: list[float]
    agreement: list[float]
    seconds: float


def main(argv: list[str]) -> None:
    arguments = tyro.cli(Arguments, args=argv)
    cells, facts = measure(arguments)
    result = {**facts, "cells": summarise(cells, arguments.seed)}
    print(table(result["cells"]))
    text = json.dumps(result)
    if arguments.output_json is not None:
        arguments.output_json.write_text(text + "\n")
    print(text)


def measure(arguments: Arguments) -> tuple[list[Cell], dict]:
    """All cells, and what they were measured with."""
    names = arguments.policies or tuple(name for name, policy in PRESETS.items() if policy.evicts)
    for name in names:
        resolve_policy(name)
    for name, value in (("tokens", arguments.tokens), *(("budgets", budget) for budget in arguments.budgets)):
        if value < 1 or value % arguments.page_size:
            raise ValueError(f"{name}: {value} must be a positive multiple of page_size={arguments.page_size}")
    loaded = models.load(arguments.model, arguments.dtype)
    kept = max(arguments.budgets) + arguments.page_size
    ids = documents(loaded.tokenizer, arguments.docs, kept + arguments.tokens)
    settings = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "page_size": arguments.page_size,
        "window": arguments.window,
        "sink_len": arguments.sink_len,
        "docs": arguments.docs,
        "tokens_per_cell": arguments.docs * arguments.tokens,
        "text": fingerprint(ids),
        "seed": arguments.seed,
    }
    done = _finished(arguments.cells, settings)
    cells, full = [], None
    for budget in arguments.budgets:
        for name in names:
            if (name, budget) not in done:
                with jax.default_matmul_precision("highest"):
                    full = full or full_pass(loaded, ids, kept)
                    done[name, budget] = _measure_cell(loaded, full, name, budget, arguments)
                _append(arguments.cells, settings, done[name, budget])
                _report(done[name, budget])
            cells.append(done[name, budget])
    device = jax.devices()[0]
    return cells, {**settings, "device": device.device_kind, "jax": jax.__version__}


def _measure_cell(loaded, full, name: str, budget: int, arguments: Arguments) -> Cell:
    config = CompressionConfig(
        budget_pages=budget // arguments.page_size,
        window=arguments.window,
        policy=name,
        sink_len=arguments.sink_len,
    )
    config.check(arguments.page_size)
    start = time.perf_counter()
    found = divergence(
        loaded,
        full,
        config,
        page_size=arguments.page_size,
        num_tokens=arguments.tokens,
        table_pages=max(arguments.budgets) // arguments.page_size + 1 if arguments.one_width else None,
        seed=arguments.seed,
        implementation=arguments.implementation,
    )
    seconds = time.perf_counter() - start
    return Cell(name, budget, found.kl.mean(axis=1).tolist(), found.agrees.mean(axis=1).tolist(), seconds)


def summarise(cells: list[Cell], seed: int) -> list[dict]:
    """Mean KL and agreement of each cell, and the 95 % interval of its KL minus that of `random` at the same budget."""
    baseline = {cell.budget: np.asarray(cell.kl) for cell in cells if cell.policy == BASELINE}
    rows = []
    for cell in cells:
        row = {
            "policy": cell.policy,
            "budget": cell.budget,
            "kl": round(float(np.mean(cell.kl)), 5),
            "agreement": round(float(np.mean(cell.agreement)), 4),
            "seconds": round(cell.seconds, 1),
        }
        if cell.policy != BASELINE and cell.budget in baseline:
            low, high = paired_interval(np.asarray(cell.kl) - baseline[cell.budget], seed)
            row |= {"kl_minus_random": [round(low, 5), round(high, 5)], "beats_random": high < 0.0}
        rows.append(row)
    return rows


def paired_interval(differences: np.ndarray, seed: int, share: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of per-document differences."""
    rng = np.random.default_rng(seed)
    means = differences[rng.integers(0, differences.size, size=(RESAMPLES, differences.size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def table(rows: list[dict]) -> str:
    """Markdown: a line a policy, a column a budget; * marks an interval against `random` that lies below 0."""
    budgets = sorted({row["budget"] for row in rows})
    by_policy: dict[str, dict[int, dict]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], {})[row["budget"]] = row

    def entry(row: dict | None) -> str:
        if row is None:
            return "–"
        mark = "*" if row.get("beats_random") else ""
        return f"{row['kl']:.4f}{mark} / {100 * row['agreement']:.1f} %"

    lines = [
        "| policy | " + " | ".join(f"budget {budget}" for budget in budgets) + " |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    lines += [
        f"| {policy} | " + " | ".join(entry(found.get(budget)) for budget in budgets) + " |"
        for policy, found in by_policy.items()
    ]
    return "\n".join(lines)


def _finished(path: Path | None, settings: dict) -> dict[tuple[str, int], Cell]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    cells = [Cell(**line["cell"]) for line in lines if line["settings"] == settings]
    return {(cell.policy, cell.budget): cell for cell in cells}


def _append(path: Path | None, settings: dict, cell: Cell) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"settings": settings, "cell": vars(cell)}) + "\n")


def _report(cell: Cell) -> None:
    print(
        f"{cell.policy} at {cell.budget}: KL {np.mean(cell.kl):.4f}, agreement {np.mean(cell.agreement):.3f} "
        f"({cell.seconds:.0f} s)",
        file=sys.stderr,
        flush=True,
    )
