"""The shapes that steps are compiled for. Few, so that start-up stays short; everything smaller is padded up to one."""

import bisect
from dataclasses import dataclass

from zipage_jax.config import EngineConfig

MAX_PREFILL_ROWS = 64
"""Requests in one prefill program; more take several (their last tokens share one product with the LM head)."""


@dataclass(frozen=True)
class Buckets:
    """Ascending sizes of each axis that varies from step to step.

    Attributes:
        decode_rows: requests in a decode step.
        prefill_tokens: new tokens in a prefill step.
        prefill_rows: requests in a prefill step.
        prefill_pages: width of a prefill's page table.
        table_pages: width of a decode step's page table. A kernel that stops at `cache_len` needs one, and one for the
            budget, where no row has to be split; a gather pays for the width.
        compress_rows: requests in a compression.
        compress_pages: pages a compressing request holds.
    """

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    prefill_pages: tuple[int, ...]
    table_pages: tuple[int, ...]
    compress_rows: tuple[int, ...]
    compress_pages: tuple[int, ...]


def choose_buckets(config: EngineConfig, *, max_model_len: int, gather: bool) -> Buckets:
    """Buckets for `config`; `gather` says that attention gathers whole page tables (the XLA reference)."""
    pages = -(-max_model_len // config.page_size)
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    prefill_rows = min(rows, MAX_PREFILL_ROWS)
    compression = config.compression
    compress_rows = min(compression.max_rows, rows) if compression else 1
    least_pages = min(compression.max_pages, pages) if compression else 1
    if config.batch_invariant:
        return Buckets((rows,), (tokens,), (1,), (pages,), (pages,), (compress_rows,), _powers(least_pages, pages, 4))
    widths = _powers(min(pages, -(-128 // config.page_size)), pages, 4) if gather else _table_pages(least_pages, pages)
    return Buckets(
        decode_rows=_powers(1, rows, 4) if gather else _decode_rows(rows),
        prefill_tokens=_powers(min(16, tokens), tokens, 4) if gather else _powers(min(512, tokens), tokens, 4),
        prefill_rows=_powers(1, prefill_rows, 8) if gather else (prefill_rows,),
        prefill_pages=widths if gather else widths[-1:],
        table_pages=widths,
        compress_rows=_powers(1, compress_rows, 8),
        compress_pages=_powers(least_pages, pages, 2 if gather else 4),
    )


def bucket(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `size`; ValueError past the largest."""
    i = bisect.bisect_left(sizes, size)
    if i == len(sizes):
        raise ValueError(f"size {size} is past the largest bucket {sizes[-1]}")
    return sizes[i]


def _decode_rows(rows: int) -> tuple[int, ...]:
    """Halves of the largest, then one small size: a weight product's time hardly depends on its rows below 64."""
    return tuple(sorted({rows, max(rows // 2, min(rows, 16)), min(rows, 16)}))


def _table_pages(budgeted: int, pages: int) -> tuple[int, ...]:
    """N_max, which most requests hold with a budget, and the longest."""
    return (budgeted, pages) if 1 < budgeted < pages else (pages,)


def _powers(least: int, most: int, factor: int) -> tuple[int, ...]:
    """least, least·factor, … below `most`, then `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= factor
    return (*sizes, most)
