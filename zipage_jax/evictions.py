"""What compression left: which token positions are alive, per layer and kv head. Needs `record_evictions=True`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from zipage_jax.request import RequestOutput, SamplingParams, Status
from zipage_jax.state import CacheState

if TYPE_CHECKING:
    from zipage_jax.llm import LLM, Prompt


@dataclass(frozen=True)
class Survivors:
    """A request at its last decode step: the tokens written so far, its pages, and the positions alive in them."""

    output: RequestOutput
    token_ids: list[int]
    page_ids: tuple[int, ...]
    alive: Int[np.ndarray, "layers kv_heads cache_len"]


def generate_survivors(llm: LLM, prompt: Prompt, params: SamplingParams) -> Survivors:
    """Run one request to its end, and look at its cache before it is freed.

    Waits for the device after every step, so that it is slower than `generate`. ValueError without `record_evictions`, for
    `n` above 1, and for a request that ends before it decodes.
    """
    if params.n != 1:
        raise ValueError(f"n={params.n} must be 1: one sample is followed")
    check_recorded(llm.engine.runner.cache)
    requests = llm.submit(prompt, params)
    try:
        (request,) = requests
        (seq,) = request.sequences
        found = None
        while not request.finished:
            llm.engine.step()
            if seq.status is Status.DECODE:
                alive = alive_positions(llm.engine.runner.cache, seq.page_ids, seq.cache_len)
                found = (seq.num_written, tuple(seq.page_ids), alive)
        if found is None:
            raise ValueError("the request ended before it decoded; raise max_tokens")
        num_written, page_ids, alive = found
        return Survivors(request.output(), seq.all_ids[:num_written], page_ids, alive)
    finally:
        llm.forget(requests)


def alive_positions(
    cache: CacheState, page_ids: Sequence[int], cache_len: int
) -> Int[np.ndarray, "layers kv_heads cache_len"]:
    """Token positions of the `cache_len` entries in a request's pages, ascending, in every layer and head.

    Waits for the device. ValueError if the cache does not record positions.
    """
    check_recorded(cache)
    layers = np.arange(cache.num_layers)[:, None] * cache.num_pages
    taken = np.asarray(cache.positions[layers + np.asarray(page_ids, np.int32)[None]])
    taken = np.moveaxis(taken, 1, 2)  # layers kv_heads pages page_size
    return taken.reshape(*taken.shape[:2], -1)[..., :cache_len]


def check_recorded(cache: CacheState) -> None:
    """ValueError if the cache does not record positions."""
    if cache.positions is None:
        raise ValueError("the cache holds no positions; build the engine with CompressionConfig(record_evictions=True)")


def kept_share_by_page(
    alive: Int[np.ndarray, "layers kv_heads cache_len"], num_tokens: int, page_size: int
) -> Float[np.ndarray, "layers kv_heads pages"]:
    """Share of the tokens of each original page (page p: positions p·page_size …) that are alive; page 0 is the oldest.

    `num_tokens` is the number of tokens written so far; the last page may be shorter.
    """
    pages = -(-num_tokens // page_size)
    size = np.minimum(num_tokens - np.arange(pages) * page_size, page_size)
    counts = np.zeros((*alive.shape[:2], pages))
    layer, head = np.indices(alive.shape[:2])
    np.add.at(counts, (layer[..., None], head[..., None], alive // page_size), 1)
    return counts / size
