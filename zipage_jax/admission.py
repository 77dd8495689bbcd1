"""What a request may need at most: its budget in pages, its longest length, whether it can ever run. Pure arithmetic.

Lengths that matter to a sequence with budget B (pages) and N_max = B + 1: it compresses whenever it holds `compress_len`
entries and has another token to write. That is N_max pages, or all pages of a longer prompt; with `compress_during_prefill` a
prompt is cut into segments, so that it never holds more than B pages and one prefill chunk. Its results then differ: what is
kept of the first segments is chosen by their own last queries, and later prompt tokens attend only to that. The length depends
on the prompt and the configuration alone, never on the neighbours. Source: arXiv 2603.08743, sec. 4.1 and 4.3; segments are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zipage_jax.request import Sequence

if TYPE_CHECKING:
    from zipage_jax.config import EngineConfig


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def budget_in_pages(seq: Sequence, asked_len: int, config: EngineConfig) -> int | None:
    """Pages that `seq` keeps in a compression, None for full KV; ValueError for a budget that cannot work.

    `asked_len`: the tokens, prompt and output, of which its budget may be a share.
    """
    compression, budget = config.compression, seq.params.kv_budget
    if budget == "full" or (compression is None and budget is None):
        return None
    if compression is None:
        raise ValueError(f"kv_budget={budget!r} needs an engine with compression; give EngineConfig(compression=...)")
    if budget is None:
        return compression.budget_pages
    entries = budget
    if isinstance(budget, float):
        entries = int(budget * asked_len)
    least = compression.window + compression.sink_len
    if entries <= least:
        raise ValueError(
            f"kv_budget={budget!r} keeps {entries} entries; it must be more than window + sink_len = {least}"
        )
    return ceil_div(entries, config.page_size)


@dataclass(frozen=True)
class Limits:
    """What the pool and the configuration allow. `usable_pages`: all but the null page; `num_slots`: M."""

    config: EngineConfig
    usable_pages: int
    num_slots: int
    max_model_len: int

    def __post_init__(self):
        compression = self.config.compression
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len} must hold a prompt token and an output token")
        if compression is None:
            return
        if compression.max_pages > self.usable_pages:
            raise ValueError(
                f"budget_pages={compression.budget_pages} needs N_max = {compression.max_pages} pages, the pool has "
                f"{self.usable_pages} beside the null page; lower budget_pages or raise num_pages"
            )
        if self.num_slots < 1:
            raise ValueError(f"num_query_slots={self.num_slots} must be at least 1 to compress")

    def accept(self, seq: Sequence) -> None:
        """Set what `seq` may need at most; ValueError with the numbers if it can never run."""
        size, usable = self.config.page_size, self.usable_pages
        if seq.num_prompt == 0:
            raise ValueError("the prompt is empty; give at least one token")
        if seq.num_prompt >= self.max_model_len:
            raise ValueError(
                f"the prompt has {seq.num_prompt} tokens, max_model_len={self.max_model_len} leaves no room for an output; "
                "shorten it or raise max_model_len"
            )
        most = seq.params.max_tokens
        asked_len = self.max_model_len if most is None else seq.num_prompt + most
        seq.budget_pages = budget = budget_in_pages(seq, asked_len, self.config)
        seq.max_len = min(asked_len, self.max_model_len)
        seq.compress_len = 0 if budget is None else self.next_compress_len(seq)
        compresses = budget is not None and seq.max_len - 1 > seq.compress_len
        if compresses and budget + 1 > usable:
            raise ValueError(
                f"the request's budget of {budget} pages needs {budget + 1}, the pool has {usable} beside the null page; "
                "lower kv_budget or raise num_pages"
            )
        prefill = ceil_div(min(seq.num_prompt, seq.compress_len) if compresses else seq.num_prompt, size)
        if prefill > usable:
            raise ValueError(
                f"the prompt of {seq.num_prompt} tokens needs {prefill} pages of {size}, the pool has {usable} beside the "
                "null page; shorten it or raise num_pages"
            )
        if not compresses:
            # Grown to this length it fills the pool: it ends there instead of waiting for a page that cannot come.
            seq.max_len = min(seq.max_len, usable * size + 1)
        seq.wants_slot = compresses or (budget is not None and self.config.scheduling == "constrained")
        seq.slot_pages = ceil_div(seq.max_len - 1, size)
        if compresses:
            during_prefill = self.config.compression.compress_during_prefill
            seq.slot_pages = seq.compress_len // size if during_prefill else budget + 1

    def next_compress_len(self, seq: Sequence) -> int:
        """Entries at which `seq`, as it is now, compresses next. `cache_len` is 0 or just after a compression."""
        size, budget = self.config.page_size, seq.budget_pages
        held = seq.cache_len // size
        pages = max(budget + 1, held + ceil_div(max(0, seq.num_prompt - seq.num_written), size))
        if self.config.compression.compress_during_prefill:
            segment = budget + self.config.max_num_batched_tokens // size
            pages = min(pages, max(budget + 1, min(segment, self.usable_pages)))
        return pages * size

    def compresses(self, seq: Sequence) -> bool:
        """Whether `seq` will need an entry past `compress_len` if nothing stops it before."""
        return seq.budget_pages is not None and seq.max_len - 1 > seq.compress_len + seq.num_evicted

    def max_hits(self, seq: Sequence) -> int:
        """Full pages that a prefix hit may cover: the last token is computed, and so are the window's queries."""
        hits = (seq.prefill_len - 1) // self.config.page_size
        if self.compresses(seq):
            hits = min(hits, seq.compress_len // self.config.page_size - 1)
        return hits

    def prefill_pages(self, seq: Sequence) -> int:
        """Pages for prefilling all known tokens of `seq`, or the part before its next compression."""
        entries = seq.prefill_len - seq.num_evicted
        if self.compresses(seq):
            entries = min(entries, seq.compress_len)
        return ceil_div(entries, self.config.page_size)

    def slot_len(self, seq: Sequence) -> int:
        """Entries that `seq` may hold without a query slot: those past it are scored by the next compression's window."""
        return seq.compress_len - self.config.compression.window

    def is_due(self, seq: Sequence) -> bool:
        """Whether `seq` has to compress before it can write its next token."""
        return seq.cache_len == seq.compress_len and self.compresses(seq)
