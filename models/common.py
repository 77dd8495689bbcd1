"""What the model files share: norms, rotary positions, projections, the gated MLP, the parameters around the layers.

Weights are [in, *out]: the first axis is contracted and `linear` keeps the others, so that one GEMM makes q, k and v
(or gate and up) and tensor parallelism shards a whole axis:

* `qkv` [hidden, kv_heads, group + 2, head_dim]: for every kv head its `group` = heads / kv_heads query heads, then its
  key head, then its value head. Sharding axis 1 gives each device whole kv-head groups.
* `gate_up` [hidden, 2, intermediate]: gate, then up. Shard axis 2.
* `output` [heads · head_dim, hidden] and `down` [intermediate, hidden]: shard axis 0 (a sum over devices follows).

Everything pointwise (norms, rotation, activation) is computed in float32 and rounded to the model's dtype once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from models.config import ModelConfig, RopeConfig

__all__ = [
    "Attend",
    "ModelConfig",
    "Params",
    "RopeConfig",
    "embed",
    "gated_mlp",
    "linear",
    "logits",
    "rms_norm",
    "rotary",
    "rotate",
    "split_qkv",
]

Attend = Callable[[int, Any, Array, Array, Array], tuple[Any, Array]]
"""attend(layer, cache, q, k, v) -> (cache, out).

q and out are [tokens heads head_dim], k and v [tokens kv_heads head_dim]; q and k come after norm and
rotation. Who stores them, and which tokens see which, is the caller's business.
"""

Rotation = tuple[Float[Array, "tokens 1 head_dim/2"], Float[Array, "tokens 1 head_dim/2"]]
"""Cosines and sines, float32."""


@struct.dataclass
class Params:
    """Parameters of a model. `layers` are the model file's own `Layer`s; `head` is None if the embedding is tied."""

    embedding: Float[Array, "vocab hidden"]
    layers: tuple[Any, ...]
    norm: Float[Array, " hidden"]
    head: Float[Array, "vocab hidden"] | None


def linear(x: Float[Array, "tokens in"], weight: Float[Array, "in *out"]) -> Float[Array, "tokens *out"]:
    """x @ weight. float32 operands are multiplied in full float32 on every backend."""
    return jnp.tensordot(x, weight, axes=1, precision=_precision(x))


def rms_norm(x: Float[Array, "*axes size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "*axes size"]:
    """x / √(mean(x²) + eps) · weight over the last axis, in float32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (wide * scale * weight).astype(x.dtype)


def rotary(config: ModelConfig, positions: Int[Array, " tokens"]) -> Rotation:
    """Cosines and sines of the rotary position embedding; the same for every layer."""
    # In float64 on the host: an error of the frequency grows with the position.
    frequencies = config.rope.theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if config.rope.divisors is not None:
        frequencies = frequencies / np.asarray(config.rope.divisors)
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies, jnp.float32)[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "tokens heads head_dim"], rotation: Rotation) -> Float[Array, "tokens heads head_dim"]:
    """x with pair (i, i + head_dim/2) of every head turned by the token's angle i (the "half-split" convention)."""
    cos, sin = rotation
    # Both halves side by side on an axis of their own: the partner is a flip, which fuses; slices and a concatenation do not.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    sign = jnp.array([-1.0, 1.0], jnp.float32).reshape(1, 1, 2, 1)
    turned = halves * cos[:, :, None] + jnp.flip(halves, axis=2) * (sign * sin[:, :, None])
    return turned.astype(x.dtype).reshape(x.shape)


def split_qkv(
    qkv: Float[Array, "tokens kv_heads group+2 head_dim"],
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """Queries, keys and values of the fused projection; query head h belongs to kv head h // group."""
    tokens, _, _, head_dim = qkv.shape
    return qkv[:, :, :-2].reshape(tokens, -1, head_dim), qkv[:, :, -2], qkv[:, :, -1]


def gated_mlp(
    x: Float[Array, "tokens hidden"],
    gate_up: Float[Array, "hidden 2 intermediate"],
    down: Float[Array, "intermediate hidden"],
) -> Float[Array, "tokens hidden"]:
    """(silu(x @ gate) · (x @ up)) @ down."""
    both = linear(x, gate_up).astype(jnp.float32)
    return linear((jax.nn.silu(both[:, 0]) * both[:, 1]).astype(x.dtype), down)


def embed(params: Params, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
    """Embeddings of token ids, which must lie in the vocabulary."""
    return jnp.take(params.embedding, tokens, axis=0, mode="clip")


def logits(params: Params, config: ModelConfig, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "tokens vocab"]:
    """float32 logits of what `forward` returned: the final norm, then the head (or the tied embedding)."""
    table = params.embedding if params.head is None else params.head
    x = rms_norm(hidden, params.norm, config.rms_norm_eps)
    return jax.lax.dot_general(
        x, table, (((1,), (1,)), ((), ())), precision=_precision(x), preferred_element_type=jnp.float32
    )


def _precision(x: Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
