"""Inputs for the attention ops' tests: poisoned pools, so that reading what is nobody's shows."""

import numpy as np

from pallas_kernels.cases import page_table


def pools(rng, lens, kv_heads, page_size, head_dim, dtype, tail=np.nan):
    """(k_pages, v_pages, page_ids, cache_len): NaN in pages that no row owns, `tail` past the end of a row's last page.

    Page 0 pads the tables and is finite, as the engine keeps it.
    """
    page_ids, total = page_table(lens, page_size, seed=int(rng.integers(1000)), spare=3)
    shape = (total, kv_heads, page_size, head_dim)
    k, v = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    owned = {0}
    for row, n in enumerate(lens):
        num = -(-n // page_size)
        owned.update(page_ids[row, :num].tolist())
        if n % page_size:
            k[page_ids[row, num - 1], :, n % page_size :] = tail
            v[page_ids[row, num - 1], :, n % page_size :] = tail
    for page in set(range(total)) - owned:
        k[page], v[page] = np.nan, np.nan
    return k, v, page_ids, np.asarray(lens, np.int32)


def renamed(rng, k, v, page_ids):
    """The same rows under other page ids; page 0 stays."""
    name = np.concatenate([[0], rng.permutation(len(k) - 1) + 1]).astype(np.int32)
    out_k, out_v = np.empty_like(k), np.empty_like(v)
    out_k[name], out_v[name] = k, v
    return out_k, out_v, name[page_ids]


def close(got, want, tolerance):
    """Near the oracle, which zeros and a shuffled oracle are not."""
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() < tolerance
    assert np.abs(want).max() > 4 * tolerance
    if len(want) > 1:
        assert np.abs(np.roll(want, 1, axis=0) - want).max() > 4 * tolerance
