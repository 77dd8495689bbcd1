"""What compression left: which token positions are alive, per layer and kv head. Needs `record_evictions=True`."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from zipage_jax.state import CacheState


def alive_positions(
    cache: CacheState, page_ids: Sequence[int], cache_len: int
) -> Int[np.ndarray, "layers kv_heads cache_len"]:
    """Token positions of the `cache_len` entries in a request's pages, ascending, in every layer and head.

    Waits for the device. ValueError if the cache does not record positions.
    """
    if cache.positions is None:
        raise ValueError("the cache holds no positions; build the engine with CompressionConfig(record_evictions=True)")
    layers = np.arange(cache.num_layers)[:, None] * cache.num_pages
    taken = np.asarray(cache.positions[layers + np.asarray(page_ids, np.int32)[None]])
    taken = np.moveaxis(taken, 1, 2)  # layers kv_heads pages page_size
    return taken.reshape(*taken.shape[:2], -1)[..., :cache_len]


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
