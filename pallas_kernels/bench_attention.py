"""The attention ops' part of `python -m pallas_kernels.bench`: decode, prefill and the writes into pages, beside their peers.

Each op is timed as a chain inside one program (the output is the next call's queries, or the pools go round), so that neither
the host nor what all layers share, such as the decode kernel's work list, is counted.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention as decode
from pallas_kernels import prefill_attention as prefill
from pallas_kernels.bench_timing import Case, Ceilings, Peer, config_name
from pallas_kernels.cases import (
    DECODE_CASES,
    DECODE_SHAPE_CASES,
    MODEL_SHAPES,
    PREFILL_CASES,
    DecodeCase,
    PrefillCase,
    decode_inputs,
    prefill_inputs,
)
from pallas_kernels.write_pages import write_pages, write_window_queries

CHECKED_ROWS = 16
"""Rows of a decode case that are compared with the float32 reference."""


def cases(op: str, ceilings: Ceilings, tune: bool) -> list[tuple[str, Callable[[], Case]]]:
    """(name, what builds it) of the op's cases; built one after the other, since each takes gigabytes."""
    if op == "paged_attention":
        shapes = DECODE_CASES if tune else DECODE_CASES + DECODE_SHAPE_CASES
        return [(case.name, functools.partial(decode_case, case, ceilings, tune)) for case in shapes]
    if op == "prefill_attention":
        return [(case.name, functools.partial(prefill_case, case, ceilings, tune)) for case in PREFILL_CASES]
    return [(f"{tokens} tokens", functools.partial(write_case, tokens, ceilings)) for tokens in (512, 16384)]


def tolerance(dtype) -> float:
    """Of attention outputs, relative to the largest: a few roundings of the weights and of the output."""
    return 4 * float(jnp.finfo(dtype).eps)


def decode_case(case: DecodeCase, ceilings: Ceilings, tune: bool) -> Case:
    inputs = decode_inputs(case)
    heads, kv_heads, head_dim = MODEL_SHAPES[case.model]
    itemsize = inputs[1].dtype.itemsize
    num_bytes = 2 * sum(case.lens) * kv_heads * head_dim * itemsize + 2 * len(case.lens) * heads * head_dim * itemsize
    functions = {("pallas", ""): functools.partial(decode.paged_attention, implementation="pallas")}
    if tune:
        for base in decode.TUNING_CONFIGS:
            for items in (1, 2, 4):
                config = decode.choose(*inputs[:2], inputs[3], base, items)
                run = functools.partial(decode.paged_attention, implementation="pallas", config=config)
                functions["pallas", config_name(config)] = run
    elif case.must_reach is not None:
        functions["xla", ""] = functools.partial(decode.paged_attention, implementation="xla")
        functions |= _shipped(case, inputs) | _dense_decode(case)
    return Case(
        "paged_attention",
        case.name,
        num_bytes / ceilings.read_bytes_per_s * 1e6,
        functions,
        inputs,
        tolerance(inputs[0].dtype),
        reference=_decode_reference,
        must_reach=case.must_reach,
    )


def _decode_reference(queries, k_pages, v_pages, page_ids, cache_len):
    """(rows, their outputs in float32): only these rows' pages are widened."""
    rows = np.unique(np.linspace(0, len(cache_len) - 1, CHECKED_ROWS).astype(int))
    ids = page_ids[rows]
    small = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    pools = (pool[ids.reshape(-1)].astype(jnp.float32) for pool in (k_pages, v_pages))
    wide = queries[rows].astype(jnp.float32)
    return rows, decode.paged_attention(wide, *pools, small, cache_len[rows], implementation="xla")


def _shipped(case: DecodeCase, inputs) -> dict:
    """JAX's own paged attention, on its own layout of the same pools, with as many splits as divide the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as shipped

    _, k_pages, v_pages, page_ids, cache_len = inputs

    def make():
        return jnp.swapaxes(k_pages, 0, 1), jnp.swapaxes(v_pages, 0, 1), page_ids, cache_len

    def run(splits, q, *rest):
        scaled = (q * (1.0 / math.sqrt(q.shape[-1]))).astype(q.dtype)
        return shipped(scaled, *rest, pages_per_compute_block=1, k_splits=splits)

    splits = [n for n in (1, 3, 5, 8, 16, 32) if page_ids.shape[1] % n == 0]
    return {("shipped", f"k_splits={n}"): Peer(functools.partial(run, n), make) for n in splits}


def _dense(rows, length, model, dtype):
    """K and V [rows, length, kv_heads, head_dim] of noise."""
    _, kv_heads, head_dim = MODEL_SHAPES[model]
    shape = (rows, length, kv_heads, head_dim)
    return tuple(jax.random.normal(key, shape, jnp.dtype(dtype)) for key in jax.random.split(jax.random.key(5)))


def _dense_decode(case: DecodeCase) -> dict:
    """cuDNN on a dense cache of one length: no pages, so a bound rather than a rival."""
    if len(set(case.lens)) > 1:
        return {}

    def run(q, k, v):
        return jax.nn.dot_product_attention(q[:, None], k, v, implementation="cudnn")[:, 0]

    make = functools.partial(_dense, len(case.lens), case.lens[0], case.model, case.dtype)
    return {("cudnn dense", ""): Peer(run, make, comparable=False)}


def prefill_case(case: PrefillCase, ceilings: Ceilings, tune: bool) -> Case:
    inputs = prefill_inputs(case)
    heads, _, head_dim = MODEL_SHAPES[case.model]
    pairs = sum(q * p + q * (q + 1) / 2 for q, p in zip(case.query_lens, case.prefix_lens, strict=True))
    functions = {("pallas", ""): functools.partial(prefill.prefill_attention, implementation="pallas")}
    if tune:
        for config in prefill.TUNING_CONFIGS:
            run = functools.partial(prefill.prefill_attention, implementation="pallas", config=config)
            functions["pallas", config_name(config)] = run
    functions["cudnn dense", ""] = _dense_prefill(case)
    return Case(
        "prefill_attention",
        case.name,
        4 * heads * head_dim * pairs / ceilings.flops_per_s * 1e6,
        functions,
        inputs,
        tolerance(inputs[0].dtype),
        reference=_prefill_reference,
    )


def _prefill_reference(queries, k_pages, v_pages, page_ids, query_start, cache_len):
    """(tokens of the last row, their outputs in float32)."""
    first, end = int(query_start[-2]), int(query_start[-1])
    tokens = np.arange(max(first, end - 256), end)
    ids = page_ids[-1]
    pools = (pool[ids].astype(jnp.float32) for pool in (k_pages, v_pages))
    start = jnp.asarray([0, len(tokens)], jnp.int32)
    table = jnp.arange(ids.size, dtype=jnp.int32)[None]
    wide = queries[tokens].astype(jnp.float32)
    return tokens, prefill.prefill_attention(wide, *pools, table, start, cache_len[-1:], implementation="xla")


def _dense_prefill(case: PrefillCase) -> Peer:
    """cuDNN on a dense batch; its mask is aligned to the first key, so a prefix is a second call without a mask.

    Merging the two calls is left out, in its favour.
    """
    rows, length, prefix = len(case.query_lens), case.query_lens[0], case.prefix_lens[0]
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")

    def run(queries, *dense):
        q = queries.reshape(rows, length, *queries.shape[1:])
        out = attend(q, *dense[:2], is_causal=True)
        if prefix:
            out = out + attend(q, *dense[2:])
        return out.reshape(queries.shape)

    def make():
        new = _dense(rows, length, case.model, case.dtype)
        return new + _dense(rows, prefix, case.model, case.dtype) if prefix else new

    return Peer(run, make, comparable=False)


def write_case(tokens: int, ceilings: Ceilings) -> Case:
    """K, V and window queries of `tokens` tokens: in place, so that the time is that of the tokens' bytes."""
    case = dataclasses.replace(DECODE_CASES[0], lens=(max(tokens // 64, 256),) * 64)
    heads, kv_heads, head_dim = MODEL_SHAPES[case.model]
    queries, k_pages, v_pages, *_ = decode_inputs(case)
    window, slots = 16, 64
    rng = np.random.default_rng(0)
    flat = rng.choice(np.arange(case.page_size, k_pages.shape[0] * case.page_size), tokens, replace=False)
    page_ids, offsets = (jnp.asarray(x, jnp.int32) for x in np.divmod(flat, case.page_size))
    kept = jnp.arange(tokens, dtype=jnp.int32)
    slot, row = jnp.where(kept < slots * window, kept // window, slots), kept % window
    stored = jnp.zeros((slots + 1, window, heads, head_dim), queries.dtype)
    keys = jax.random.normal(jax.random.key(3), (2, tokens, kv_heads, head_dim), queries.dtype)
    new_queries = jax.random.normal(jax.random.key(4), (tokens, heads, head_dim), queries.dtype)

    def write(state, keys, values, new_queries, page_ids, offsets, slot, row):
        pools = write_pages(*state[:2], keys, values, page_ids, offsets)
        return *pools, write_window_queries(state[2], new_queries, slot, row)

    num_bytes = 2 * (keys.nbytes + min(tokens, slots * window) * heads * head_dim * 2)
    inputs = (k_pages, v_pages, stored), keys[0], keys[1], new_queries, page_ids, offsets, slot, row
    return Case(
        "write_pages",
        f"{tokens} tokens",
        num_bytes / ceilings.copy_bytes_per_s * 1e6,
        {("xla", ""): write},
        inputs,
        0.0,
        in_place=True,
    )
