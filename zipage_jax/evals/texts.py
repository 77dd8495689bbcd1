"""Long English text that every Python ships: the language reference, as `pydoc` prints it."""

import hashlib
import pydoc_data.topics

import numpy as np

MAX_OVERLAP = 0.2
"""Topics of which more lines than this share were seen before are left out: some contain others."""


def documents(tokenizer, num: int, length: int) -> np.ndarray:
    """`num` documents of `length` token ids each, int32 [num length], from different places of the language reference.

    Each is a run of one topic; none overlaps another. Raises ValueError if there is less text.
    """
    seen: set[str] = set()
    runs = []
    for name, text in sorted(pydoc_data.topics.topics.items(), key=lambda item: (-len(item[1]), item[0])):
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) > 20}
        if len(lines & seen) > MAX_OVERLAP * len(lines):
            continue
        seen |= lines
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        runs += [
            (start // length, name, ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)
        ]
    if len(runs) < num:
        raise ValueError(
            f"{num} documents of {length} tokens were asked for, the text holds {len(runs)}; ask for fewer"
        )
    # The first run of every topic, then the second of every topic that has one, and so on.
    runs.sort(key=lambda run: run[:2])
    return np.asarray([ids for _, _, ids in runs[:num]], np.int32)


def fingerprint(ids: np.ndarray) -> str:
    """Short hash that tells whether two runs read the same tokens."""
    return hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()[:12]
