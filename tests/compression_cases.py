"""Random compression jobs: a paged cache in JAX arrays, and the same requests as oracle rows."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tests.reference import scores as oracle
from zipage_jax.state import CacheState, CompressBatch

KINDS = ("white", "correlated", "duplicate", "zero", "huge")


@dataclass
class Case:
    """`rows[layer][r]` is the oracle's view of request r; `cache` and `batch` are ours. Pages nobody uses hold NaN."""

    cache: CacheState
    batch: CompressBatch
    rows: list[list[oracle.Row]]
    page_size: int

    def targets(self, r: int, layer: int = 0) -> np.ndarray:
        """Pages of request r's kept entries, in order."""
        ids = np.asarray(self.batch.target_ids)[r, : self.rows[0][r].budget // self.page_size]
        return ids + layer * self.cache.num_pages


def make_keys(rng, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Keys [kv_heads entries head_dim]. White noise never crosses the redundancy threshold; the other kinds do."""
    kv_heads, entries, head_dim = shape
    keys = rng.normal(size=shape)
    if kind == "correlated":
        keys = 0.5 * keys + 2.0 * rng.normal(size=(kv_heads, 1, head_dim)) * rng.integers(0, 2, size=(1, entries, 1))
    elif kind == "duplicate":
        keys = keys[:, rng.integers(0, max(entries // 4, 1), size=entries)]
    elif kind == "zero":
        keys = keys * (rng.random(size=(kv_heads, entries, 1)) < 0.5)
    elif kind == "huge":
        keys = keys * 1e3
    return keys.astype(np.float32)


def make_case(
    seed: int,
    *,
    pages: tuple[int, ...] = (3, 4),
    budget_pages: int | tuple[int, ...] = 2,
    compressed: tuple[bool, ...] = (False, True),
    layers: int = 2,
    page_size: int = 16,
    window: int = 8,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    kind: str = "correlated",
    fresh_targets: bool = False,
    padding_rows: int = 1,
    padding_pages: int = 1,
    permutation: int = 0,
    history: bool = True,
    positions: bool = False,
    dtype=np.float32,
) -> Case:
    """Requests of `pages[r]` full pages that keep `budget_pages`; `compressed[r]` says whether r has compressed before.

    `permutation` renames pages and slots and nothing else. Targets are the request's own first pages in mixed order, or fresh.
    """
    budgets = (budget_pages,) * len(pages) if isinstance(budget_pages, int) else budget_pages
    compressed = compressed[: len(pages)] + (False,) * (len(pages) - len(compressed))
    rng, names = np.random.default_rng(seed), np.random.default_rng((seed, permutation, 1))
    num_pages, num_slots = 1 + sum(pages) + sum(budgets) + 2, 2 + len(pages)
    ids = 1 + names.permutation(num_pages - 1)
    sources = np.split(ids[: sum(pages)], np.cumsum(pages)[:-1])
    spare = np.split(ids[sum(pages) : sum(pages) + sum(budgets)], np.cumsum(budgets)[:-1])
    targets = [spare[r] if fresh_targets else names.permutation(sources[r])[: budgets[r]] for r in range(len(pages))]
    slots = 1 + names.permutation(num_slots - 1)[: len(pages)]

    shape = (layers * num_pages, kv_heads, page_size)
    k_pages, v_pages = np.full((*shape, head_dim), np.nan, dtype), np.full((*shape, head_dim), np.nan, dtype)
    scores, places = np.full(shape, np.nan, np.float32), np.full(shape, -1, np.int32)
    for pool in (k_pages, v_pages, scores):
        pool[::num_pages] = 0.5  # the null page of each layer holds something finite
    queries = np.zeros((layers * num_slots, window, kv_heads * group, head_dim), dtype)
    rows = []
    for layer in range(layers):
        rows.append([])
        for r, n in enumerate(pages):
            entries = n * page_size
            keys = make_keys(rng, kind, (kv_heads, entries, head_dim)).astype(dtype)
            values = rng.normal(size=(kv_heads, entries, head_dim)).astype(dtype)
            q = rng.normal(size=(window, kv_heads * group, head_dim)).astype(dtype)
            known = budgets[r] * page_size if compressed[r] else 0
            past = np.abs(rng.normal(size=(kv_heads, entries))).astype(np.float32) / entries
            at = layer * num_pages + sources[r]
            k_pages[at] = _paged(keys, page_size)
            v_pages[at] = _paged(values, page_size)
            scores[at] = _paged(past, page_size)
            places[at] = _paged(np.broadcast_to(np.arange(entries) * 3 + layer, (kv_heads, entries)), page_size)
            queries[layer * num_slots + slots[r]] = q
            row = oracle.Row(q, keys, values, page_size, budgets[r] * page_size, past[:, :known], seed + r, layer)
            rows[-1].append(row)

    total, width, most = len(pages) + padding_rows, max(pages) + padding_pages, max(budgets)
    batch = CompressBatch(
        page_ids=_padded([list(s) for s in sources], total, width),
        num_pages=_padded(pages, total),
        target_ids=_padded([list(t) for t in targets], total, most),
        budget=_padded([b * page_size for b in budgets], total),
        history_len=_padded([b * page_size if c else 0 for b, c in zip(budgets, compressed, strict=True)], total),
        slots=_padded(slots, total),
        seeds=_padded([seed + r for r in range(len(pages))], total),
    )
    cache = CacheState(
        k_pages=jnp.asarray(k_pages),
        v_pages=jnp.asarray(v_pages),
        scores=jnp.asarray(scores) if history else None,
        window_queries=jnp.asarray(queries),
        num_layers=layers,
        positions=jnp.asarray(places) if positions else None,
    )
    return Case(cache, batch, rows, page_size)


def read_entries(pool, page_ids) -> np.ndarray:
    """kv_heads entries ...: the contents of some pages, in order."""
    taken = np.asarray(pool)[np.asarray(page_ids)]
    taken = np.moveaxis(taken, 1, 0)
    return taken.reshape(taken.shape[0], -1, *taken.shape[3:])


def _paged(x: np.ndarray, page_size: int) -> np.ndarray:
    kv_heads, entries = x.shape[:2]
    return np.moveaxis(x.reshape(kv_heads, entries // page_size, page_size, *x.shape[2:]), 0, 1)


def _padded(values, rows: int, width: int | None = None) -> np.ndarray:
    out = np.zeros((rows,) if width is None else (rows, width), np.int32)
    for r, value in enumerate(values):
        if width is None:
            out[r] = value
        else:
            out[r, : len(value)] = value
    return out
