"""Sampling in float64 NumPy, one row at a time, by sorting nothing and sharing nothing with the code under test."""

import numpy as np


def penalised(logits, counts, prompt_mask, bias, *, presence=0.0, frequency=0.0, repetition=1.0):
    """Logits after bias, repetition, frequency and presence penalties, in vLLM's order."""
    out = logits.astype(np.float64) + bias
    for token in range(out.size):
        if prompt_mask[token] or counts[token]:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= frequency * counts[token]
        out[token] -= presence * (counts[token] > 0)
    return out


def probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probability of each token: temperature, then min_p, top_k and top_p, equal logits kept or dropped together."""
    logits = logits.astype(np.float64)
    if temperature < 1e-5:
        return np.eye(logits.size)[int(np.argmax(logits))]
    mass = np.exp((logits - logits.max()) / temperature)
    kept = mass >= min_p
    if 0 < top_k < logits.size:
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p < 1.0:
        left = np.where(kept, mass, 0.0)
        above = np.array([left[logits > logit].sum() for logit in logits])
        kept &= above < top_p * left.sum()
    left = np.where(kept, mass, 0.0)
    return left / left.sum()


def logprobs(logits, token, num):
    """(log probability, rank, best ids, their log probabilities) of one row."""
    logits = logits.astype(np.float64)
    top = logits.max()
    normalised = logits - top - np.log(np.exp(logits - top).sum())
    best = sorted(range(logits.size), key=lambda i: (-logits[i], i))[:num]
    return normalised[token], 1 + int((logits > logits[token]).sum()), best, normalised[best]
