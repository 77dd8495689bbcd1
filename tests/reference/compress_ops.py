"""NumPy oracles of the four compression ops: float64, everything materialised. Imports nothing of the project."""

import numpy as np


def gather(pool, page_ids):
    """kv_heads entries ...: one row's entries in time order."""
    taken = np.asarray(pool)[page_ids]
    taken = np.swapaxes(taken, 0, 1)
    return taken.reshape(taken.shape[0], -1, *taken.shape[3:])


def window_scores(queries, k_pages, page_ids, cache_len, scale, reduce):
    rows, window, heads, _ = queries.shape
    kv_heads, page_size = k_pages.shape[1:3]
    out = np.zeros((rows, kv_heads, page_ids.shape[1] * page_size))
    for r in range(rows):
        n = int(cache_len[r])
        keys = gather(k_pages, page_ids[r])[:, :n].astype(np.float64)
        best = np.zeros((window, kv_heads, n))
        for h in range(heads):
            for u in range(window):
                seen = n - window + u + 1
                if seen <= 0:
                    continue
                logits = keys[h // (heads // kv_heads), :seen] @ queries[r, u, h].astype(np.float64) * scale
                p = np.exp(logits - logits.max())
                group = best[u, h // (heads // kv_heads), :seen]
                np.maximum(group, p / p.sum(), out=group)
        out[r, :, :n] = best.mean(axis=0) if reduce == "mean" else best.max(axis=0)
    return out


def redundancy(keys, threshold):
    """r of entries [n head_dim] that all see each other."""
    unit = keys.astype(np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=-1, keepdims=True), 1e-6)
    c = unit @ unit.T
    np.fill_diagonal(c, 0.0)
    for n in range(c.shape[1]):
        above = np.flatnonzero(c[:, n] > threshold)
        if above.size:
            c[above[-1], n] = 0.0
    return c.sum(axis=1)


def key_redundancy(k_pages, page_ids, cache_len, mode, threshold):
    kv_heads, page_size = k_pages.shape[1:3]
    out = np.zeros((page_ids.shape[0], kv_heads, page_ids.shape[1] * page_size))
    for r, ids in enumerate(page_ids):
        n = int(cache_len[r])
        keys = gather(k_pages, ids)
        step = page_size if mode == "lightning" else max(n, 1)
        for h in range(kv_heads):
            for start in range(0, n, step):
                stop = min(start + step, n)
                out[r, h, start:stop] = redundancy(keys[h, start:stop], threshold)
    return out


def select_entries(scores, budget, max_budget):
    rows, kv_heads, entries = scores.shape
    out = np.full((rows, kv_heads, max_budget), entries, np.int32)
    for r in range(rows):
        for h in range(kv_heads):
            # lexsort: last key first; best score first, then the later entry.
            order = np.lexsort((-np.arange(entries), -scores[r, h]))
            out[r, h, : budget[r]] = np.sort(order[: budget[r]])
    return out


def compact_pages(pools, page_ids, kept, target_ids):
    moved = []
    for pool in pools:
        pool = np.asarray(pool)
        page_size = pool.shape[2]
        out = pool.copy()
        for r in range(kept.shape[0]):
            for h in range(kept.shape[1]):
                for j, i in enumerate(kept[r, h]):
                    if i < page_ids.shape[1] * page_size:
                        source = pool[page_ids[r, i // page_size], h, i % page_size]
                        out[target_ids[r, j // page_size], h, j % page_size] = source
        moved.append(out)
    return tuple(moved)
