"""Sequences -> NumPy arrays of a bucket's shape. The only place that pads.

Reads each sequence as the scheduler left it when it planned the step: `cache_len` and `position` include the step's tokens.
"""

import numpy as np

from zipage_jax.request import Sequence
from zipage_jax.scheduler import CompressJob, PrefillChunk
from zipage_jax.state import (
    FLOAT_FIELDS,
    INT_FIELDS,
    NULL_PAGE,
    NULL_SLOT,
    TOKEN_FIELDS,
    CompressBatch,
    PrefillBatch,
    RowBatch,
)

NUM_FIELDS = len(INT_FIELDS) + len(FLOAT_FIELDS)


def decode_batch(sequences: list[Sequence], *, num_rows: int, max_pages: int, padding_seat: int) -> RowBatch:
    """One row a sequence, in order."""
    return RowBatch(packed=_rows(sequences, [True] * len(sequences), num_rows, max_pages, padding_seat))


def prefill_batch(
    chunks: list[PrefillChunk],
    *,
    num_tokens: int,
    num_rows: int,
    max_pages: int,
    padding_seat: int,
    page_size: int,
    window: int,
) -> PrefillBatch:
    """One row a chunk, in order; their tokens side by side, padding at the end."""
    tokens = np.zeros((num_tokens, len(TOKEN_FIELDS)), np.int32)
    query_start = np.zeros(num_rows + 1, np.int32)
    start = 0
    for row, chunk in enumerate(chunks):
        _fill_tokens(tokens[start : start + chunk.length], chunk, page_size, window)
        start += chunk.length
        query_start[row + 1] = start
    query_start[len(chunks) + 1 :] = start
    sequences = [chunk.seq for chunk in chunks]
    samples = [chunk.samples for chunk in chunks]
    rows = RowBatch(packed=_rows(sequences, samples, num_rows, max_pages, padding_seat))
    return PrefillBatch(rows=rows, tokens=tokens, query_start=query_start)


def compress_batch(
    jobs: list[CompressJob], *, num_rows: int, num_pages: int, num_targets: int, page_size: int
) -> CompressBatch:
    """One row a job: its full pages, and the pages that take what is kept."""
    batch = CompressBatch(
        page_ids=np.full((num_rows, num_pages), NULL_PAGE, np.int32),
        num_pages=np.zeros(num_rows, np.int32),
        target_ids=np.full((num_rows, num_targets), NULL_PAGE, np.int32),
        budget=np.zeros(num_rows, np.int32),
        history_len=np.zeros(num_rows, np.int32),
        slots=np.full(num_rows, NULL_SLOT, np.int32),
        seeds=np.zeros(num_rows, np.int32),
    )
    for row, job in enumerate(jobs):
        batch.page_ids[row, : len(job.source_page_ids)] = job.source_page_ids
        batch.num_pages[row] = len(job.source_page_ids)
        batch.target_ids[row, : job.budget_pages] = job.target_page_ids[: job.budget_pages]
        batch.budget[row] = job.budget_pages * page_size
        batch.history_len[row] = job.history_len
        batch.slots[row] = job.seq.query_slot
        # A compression's randomness (the `random` policy) depends on the request and on how often it compressed.
        batch.seeds[row] = (job.seq.seed + job.seq.stats.num_compressions) & 0x7FFFFFFF
    return batch


def _fill_tokens(out: np.ndarray, chunk: PrefillChunk, page_size: int, window: int) -> None:
    seq = chunk.seq
    entries = np.arange(seq.cache_len - chunk.length, seq.cache_len)
    page, offset = entries // page_size, entries % page_size
    window_row = offset - (page_size - window)
    # Every page has the same window rows, so only the last page of the chunk stores: one query a row.
    stores = (window_row >= 0) & (page == page[-1]) & (window > 0)
    columns = {
        "token": seq.all_ids[chunk.start : chunk.start + chunk.length],
        "position": np.arange(chunk.start, chunk.start + chunk.length),
        "page_id": np.asarray(seq.page_ids, np.int32)[page],
        "offset": offset,
        "slot": np.where(stores, seq.query_slot, NULL_SLOT),
        "window_row": np.where(stores, window_row, 0),
    }
    for i, name in enumerate(TOKEN_FIELDS):
        out[:, i] = columns[name]


def _rows(
    sequences: list[Sequence], samples: list[bool], num_rows: int, max_pages: int, padding_seat: int
) -> np.ndarray:
    packed = np.zeros((num_rows, NUM_FIELDS + max_pages), np.int32)
    packed[:, NUM_FIELDS:] = NULL_PAGE
    packed[:, INT_FIELDS.index("seat")] = padding_seat
    floats = packed[:, len(INT_FIELDS) : NUM_FIELDS].view(np.float32)
    for row, (seq, draws) in enumerate(zip(sequences, samples, strict=True)):
        params = seq.params
        packed[row, : len(INT_FIELDS)] = (
            seq.cache_len,
            seq.position,
            seq.seat if draws else padding_seat,
            seq.query_slot,
            max(params.top_k, 0),
            seq.seed,
        )
        floats[row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        packed[row, NUM_FIELDS : NUM_FIELDS + len(seq.page_ids)] = seq.page_ids
    return packed
