"""What parameters a model has: shapes, the checkpoint tensors each is made of, and along which axis it is sharded.

A model file describes its parameters once, as a tree of `Weight`s; abstract shapes, random weights, loading and
shardings all follow from it. Tensor names are those of Hugging Face checkpoints, where a projection is [out, in].
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter.

    `tensors` are the names and shapes of its sources; `arrange(shape, *sources)` makes an array of `shape` from them.
    `shard_axis` is the axis that tensor parallelism splits (None: replicated). `init` is "one" or "normal".
    """

    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    arrange: Callable[..., Array]
    shard_axis: int | None = None
    init: str = "normal"


def vector(name: str, size: int) -> Weight:
    """A norm's weight."""
    return Weight((size,), ((name, (size,)),), _keep, init="one")


def table(name: str, rows: int, columns: int, *, shard_axis: int | None = None) -> Weight:
    """An array kept as the checkpoint has it: embedding and head, [vocab, hidden]."""
    return Weight((rows, columns), ((name, (rows, columns)),), _keep, shard_axis)


def projection(name: str, inputs: int, outputs: int) -> Weight:
    """A projection back to the hidden size, [in, out]."""
    return Weight((inputs, outputs), ((name, (outputs, inputs)),), _transpose, shard_axis=0)


def qkv(config: ModelConfig, prefix: str) -> Weight:
    """The fused q, k and v projections, [hidden, kv_heads, group + 2, head_dim] (see models.common)."""
    tensors = tuple((f"{prefix}{n}_proj.weight", (size, config.hidden_size)) for n, size in _qkv_sizes(config))
    return Weight((config.hidden_size, *_qkv_shape(config)), tensors, _fuse_qkv, shard_axis=1)


def qkv_bias(config: ModelConfig, prefix: str) -> Weight:
    """The fused biases of q, k and v, [kv_heads, group + 2, head_dim]."""
    tensors = tuple((f"{prefix}{n}_proj.bias", (size,)) for n, size in _qkv_sizes(config))
    return Weight(_qkv_shape(config), tensors, _fuse_qkv, shard_axis=0)


def gate_up(config: ModelConfig, prefix: str) -> Weight:
    """The fused gate and up projections, [hidden, 2, intermediate]."""
    source = (config.intermediate_size, config.hidden_size)
    tensors = ((f"{prefix}gate_proj.weight", source), (f"{prefix}up_proj.weight", source))
    return Weight((config.hidden_size, 2, config.intermediate_size), tensors, _fuse_gate_up, shard_axis=2)


@functools.partial(jax.jit, static_argnames=("arrange", "shape", "dtype"))
def build(arrange: Callable[..., Array], shape: tuple[int, ...], dtype: jnp.dtype, *sources: Array) -> Array:
    """The parameter of `shape` and `dtype` made of its sources; runs where they are."""
    return arrange(shape, *sources).astype(dtype)


def _qkv_sizes(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    kv_size = config.num_kv_heads * config.head_dim
    return ("q", config.num_heads * config.head_dim), ("k", kv_size), ("v", kv_size)


def _qkv_shape(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, config.head_dim


def _keep(shape: tuple[int, ...], source: Array) -> Array:
    return source.reshape(shape)


def _transpose(shape: tuple[int, ...], source: Array) -> Array:
    return source.T.reshape(shape)


def _fuse_qkv(shape: tuple[int, ...], *sources: Array) -> Array:
    kv_heads, _, head_dim = shape[-3:]
    heads = [source.reshape(kv_heads, -1, head_dim, *source.shape[1:]) for source in sources]
    fused = jnp.concatenate(heads, axis=1)
    return fused if fused.ndim == len(shape) == 3 else jnp.moveaxis(fused, -1, 0)


def _fuse_gate_up(shape: tuple[int, ...], gate: Array, up: Array) -> Array:
    return jnp.stack([gate.T, up.T], axis=1)
