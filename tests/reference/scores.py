"""NumPy oracle of every score and of selection and compaction: float64, one request, one layer, all kv heads.

Plain and slow on purpose: everything is materialised. Imports nothing of the project.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Row:
    """One request in one layer: `entries` cached entries in time order, the last `window` of which gave the queries."""

    queries: np.ndarray  # window heads head_dim
    keys: np.ndarray  # kv_heads entries head_dim
    values: np.ndarray  # kv_heads entries head_dim
    page_size: int
    budget: int
    history: np.ndarray | None = None  # kv_heads history_len
    seed: int = 0
    layer: int = 0

    @property
    def window(self) -> int:
        return self.queries.shape[0]

    @property
    def entries(self) -> int:
        return self.keys.shape[1]

    @property
    def is_first(self) -> bool:
        return self.history is None or self.history.shape[1] == 0


def softmax(logits: np.ndarray) -> np.ndarray:
    peak = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(peak), peak, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def logits(row: Row) -> np.ndarray:
    """kv_heads group window entries; -inf where a query of the window may not look."""
    window, heads, head_dim = row.queries.shape
    kv_heads, entries, _ = row.keys.shape
    group = heads // kv_heads
    out = np.empty((kv_heads, group, window, entries))
    for head in range(heads):
        q = row.queries[:, head].astype(np.float64)
        k = row.keys[head // group].astype(np.float64)
        out[head // group, head % group] = q @ k.T / np.sqrt(head_dim)
    for u in range(window):
        out[:, :, u, entries - window + u + 1 :] = -np.inf
    return out


def attention(row: Row, reduce: str = "mean") -> np.ndarray:
    weights = softmax(logits(row)).max(axis=1)
    return weights.mean(axis=1) if reduce == "mean" else weights.max(axis=1)


def attention_of_max_logits(row: Row) -> np.ndarray:
    """R-KV: group maximum, softmax over the entries before the window, mean over the window."""
    merged = logits(row).max(axis=1)
    merged[:, :, row.entries - row.window :] = -np.inf
    return softmax(merged).mean(axis=1)


def global_score(row: Row, fresh: np.ndarray, decay: float, combine: str = "max") -> np.ndarray:
    out = fresh.copy()
    if not row.is_first:
        n = row.history.shape[1]
        past = decay * row.history.astype(np.float64)
        out[:, :n] = np.maximum(out[:, :n], past) if combine == "max" else out[:, :n] + past
    return out


def max_pool(scores: np.ndarray, kernel: int) -> np.ndarray:
    half = kernel // 2
    n = scores.shape[-1]
    return np.stack([scores[..., max(t - half, 0) : t + half + 1].max(axis=-1) for t in range(n)], axis=-1)


def pool_before_window(row: Row, scores: np.ndarray, kernel: int) -> np.ndarray:
    """Pooling in which the window's own scores take no part."""
    hidden = scores.copy()
    hidden[:, row.entries - row.window :] = -np.inf
    pooled = max_pool(hidden, kernel)
    return np.where(np.isneginf(pooled), scores, pooled)


def cosines(keys: np.ndarray) -> np.ndarray:
    """Cosine similarities of one head's keys, 0 on the diagonal."""
    keys = keys.astype(np.float64)
    unit = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-6)
    out = unit @ unit.T
    np.fill_diagonal(out, 0.0)
    return out


def redundancy_sums(keys: np.ndarray, threshold: float) -> np.ndarray:
    """Row sums of one head's similarities, after the last one above the threshold of each column is set to 0."""
    c = cosines(keys)
    for n in range(c.shape[1]):
        above = np.flatnonzero(c[:, n] > threshold)
        if above.size:
            c[above[-1], n] = 0.0
    return c.sum(axis=1)


def redundancy(row: Row, mode: str, temperature: float, threshold: float = 0.5) -> np.ndarray:
    span = row.page_size if mode == "lightning" else row.entries
    sums = np.empty(row.keys.shape[:2])
    for head in range(row.keys.shape[0]):
        for start in range(0, row.entries, span):
            block = slice(start, start + span)
            sums[head, block] = redundancy_sums(row.keys[head, block], threshold)
    return softmax(sums / (temperature * span))


def is_ambiguous(row: Row, threshold: float = 0.5, margin: float = 1e-5) -> bool:
    """Whether a pair of keys lies so close to the threshold that rounding decides."""
    return any((np.abs(cosines(keys) - threshold) < margin).any() for keys in row.keys)


def max_norm(scores: np.ndarray) -> np.ndarray:
    peak = scores.max(axis=-1, keepdims=True)
    return scores / np.where(peak > 0, peak, 1.0)


def key_diff(row: Row) -> np.ndarray:
    keys = row.keys.astype(np.float64)
    unit = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-6)
    anchor = unit.sum(axis=1, keepdims=True)
    anchor = anchor / np.maximum(np.linalg.norm(anchor, axis=-1, keepdims=True), 1e-6)
    return -(unit * anchor).sum(axis=-1)


def random(row: Row) -> np.ndarray:
    def mix(x: int) -> int:
        x = (x + 0x9E3779B9) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ (x >> 16)

    out = np.empty(row.keys.shape[:2])
    for head in range(out.shape[0]):
        stream = mix(mix(mix(row.seed & 0xFFFFFFFF) ^ row.layer) ^ head)
        out[head] = [(mix(stream ^ t) >> 8) * 2.0**-24 for t in range(row.entries)]
    return out


PROTECTED = float(np.finfo(np.float32).max)


def guard(row: Row, scores: np.ndarray, share: float) -> np.ndarray:
    """The ⌊share·entries⌋ entries of largest ‖v‖, later ones first among equals, raised above all others."""
    count = int(np.floor(np.float32(share) * np.float32(row.entries)))
    out = scores.copy()
    norms = np.sqrt((row.values.astype(np.float32) ** 2).sum(axis=-1))
    for head in range(out.shape[0]):
        order = sorted(range(row.entries), key=lambda t: (norms[head, t], t), reverse=True)
        out[head, order[:count]] = PROTECTED
    return out


def keep_recent(row: Row, scores: np.ndarray, share: float) -> np.ndarray:
    out = scores.copy()
    out[:, row.entries - int(np.floor(share * row.budget)) :] = PROTECTED
    return out


def keep_first(scores: np.ndarray, num: int) -> np.ndarray:
    out = scores.copy()
    out[:, :num] = PROTECTED
    return out


def zipage(row: Row, mode: str, *, decay=0.8, kernel=5, temperature=0.4, weight=0.2):
    history = global_score(row, attention(row), decay)
    pooled = max_pool(history, kernel) if row.is_first else history
    return weight * pooled - (1 - weight) * redundancy(row, mode, temperature), history


def g_kv(row: Row):
    history = global_score(row, max_norm(attention(row)), 0.8)
    return 0.1 * history - 0.9 * max_norm(redundancy(row, "flash", 1.0)), history


def h2o(row: Row):
    history = global_score(row, attention(row), 1.0, "sum")
    return keep_recent(row, history, 0.5), history


def r_kv(row: Row):
    pooled = pool_before_window(row, attention_of_max_logits(row), 7)
    return 0.1 * pooled - 0.9 * redundancy(row, "flash", 1.0), None


def recency(row: Row) -> np.ndarray:
    return np.broadcast_to(np.arange(row.entries, dtype=np.float64), row.keys.shape[:2]).copy()


# name -> (scores, history to store or None)
PRESETS = {
    "zipage": lambda row: zipage(row, "lightning"),
    "zipage-flash": lambda row: zipage(row, "flash"),
    "attention": lambda row: (attention(row), None),
    "snapkv": lambda row: (pool_before_window(row, attention(row), 7), None),
    "morphkv": lambda row: (attention(row, "max"), None),
    "r-kv": r_kv,
    "g-kv": g_kv,
    "h2o": h2o,
    "streaming-llm": lambda row: (keep_first(recency(row), 4), None),
    "key-diff": lambda row: (key_diff(row), None),
    "random": lambda row: (random(row), None),
}


def protect(row: Row, scores: np.ndarray, sink_len: int = 0) -> np.ndarray:
    out = scores.copy()
    out[:, row.entries - row.window :] = np.inf
    out[:, :sink_len] = np.inf
    return out


def select(scores: np.ndarray, budget: int) -> np.ndarray:
    """kv_heads budget: indices of the best entries, ascending; among equals the later entry is better."""
    order = [sorted(range(scores.shape[1]), key=lambda t: (head[t], t), reverse=True)[:budget] for head in scores]
    return np.sort(np.asarray(order, np.int64).reshape(scores.shape[0], budget), axis=-1)
