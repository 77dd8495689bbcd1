"""Qwen3 (dense): Llama's layer with an RMS norm over each head of q and k before RoPE, and a head_dim of its own."""

from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from models import weights
from models.common import Attend, ModelConfig, Params, embed, gated_mlp, linear, rms_norm, rotary, rotate, split_qkv


@struct.dataclass
class Layer:
    """Parameters of one layer."""

    attention_norm: Float[Array, " hidden"]
    qkv: Float[Array, "hidden kv_heads group+2 head_dim"]
    q_norm: Float[Array, " head_dim"]
    k_norm: Float[Array, " head_dim"]
    output: Float[Array, "heads*head_dim hidden"]
    mlp_norm: Float[Array, " hidden"]
    gate_up: Float[Array, "hidden 2 intermediate"]
    down: Float[Array, "intermediate hidden"]


def layer_weights(config: ModelConfig, prefix: str) -> Layer:
    """A `Layer` of `Weight`s: what a layer's parameters are and where a checkpoint keeps them."""
    hidden = config.hidden_size
    return Layer(
        attention_norm=weights.vector(f"{prefix}input_layernorm.weight", hidden),
        qkv=weights.qkv(config, f"{prefix}self_attn."),
        q_norm=weights.vector(f"{prefix}self_attn.q_norm.weight", config.head_dim),
        k_norm=weights.vector(f"{prefix}self_attn.k_norm.weight", config.head_dim),
        output=weights.projection(f"{prefix}self_attn.o_proj.weight", config.num_heads * config.head_dim, hidden),
        mlp_norm=weights.vector(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=weights.gate_up(config, f"{prefix}mlp."),
        down=weights.projection(f"{prefix}mlp.down_proj.weight", config.intermediate_size, hidden),
    )


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    cache: Any,
    attend: Attend,
) -> tuple[Float[Array, "tokens hidden"], Any]:
    """Hidden states before the final norm (`logits` applies it), and the cache as `attend` left it."""
    x, rotation, eps = embed(params, tokens), rotary(config, positions), config.rms_norm_eps
    for index, layer in enumerate(params.layers):
        q, k, v = split_qkv(linear(rms_norm(x, layer.attention_norm, eps), layer.qkv))
        q = rotate(rms_norm(q, layer.q_norm, eps), rotation)
        k = rotate(rms_norm(k, layer.k_norm, eps), rotation)
        cache, attended = attend(index, cache, q, k, v)
        x = x + linear(attended.reshape(x.shape[0], -1), layer.output)
        x = x + gated_mlp(rms_norm(x, layer.mlp_norm, eps), layer.gate_up, layer.down)
    return x, cache
