"""NumPy oracle of Llama, Qwen2 and Qwen3: dense causal attention over one sequence, from Hugging Face configs and tensors."""

import math

import numpy as np


def logits(config: dict, tensors: dict[str, np.ndarray], tokens, positions=None, dtype=np.float64) -> np.ndarray:
    """Logits [tokens vocab] of every token of one sequence; token i sees tokens 0..i, `positions` only turn q and k."""
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    eps = config["rms_norm_eps"]
    angles = positions[:, None].astype(dtype) * frequencies(config, head_dim).astype(dtype)
    visible = np.tril(np.ones((len(tokens), len(tokens)), bool))

    def project(x, name):
        out = x @ tensors[f"{name}.weight"].T
        return out + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else out

    def split(x, count, norm):
        x = x.reshape(len(tokens), count, head_dim)
        return rms_norm(x, tensors[norm], eps) if norm in tensors else x

    x = tensors["model.embed_tokens.weight"][np.asarray(tokens)]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        normed = rms_norm(x, tensors[layer + "input_layernorm.weight"], eps)
        attention = layer + "self_attn."
        q = turn(split(project(normed, attention + "q_proj"), heads, attention + "q_norm.weight"), angles)
        k = turn(split(project(normed, attention + "k_proj"), kv_heads, attention + "k_norm.weight"), angles)
        v = project(normed, attention + "v_proj").reshape(len(tokens), kv_heads, head_dim)
        out = np.empty_like(q)
        for head in range(heads):
            group = head // (heads // kv_heads)
            weights = softmax(np.where(visible, q[:, head] @ k[:, group].T / math.sqrt(head_dim), -np.inf))
            out[:, head] = weights @ v[:, group]
        x = x + project(out.reshape(len(tokens), -1), attention + "o_proj")
        normed = rms_norm(x, tensors[layer + "post_attention_layernorm.weight"], eps)
        gate, up = project(normed, layer + "mlp.gate_proj"), project(normed, layer + "mlp.up_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * up, layer + "mlp.down_proj")
    head = tensors["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    return rms_norm(x, tensors["model.norm.weight"], eps) @ head.T


def frequencies(config: dict, head_dim: int) -> np.ndarray:
    """Radians per position of every pair of a head, with Llama 3's scaling where the config has it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.get("rope_type", "default") == "default":
        return plain
    turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)  # over the original context
    share = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1)
    return share * plain + (1 - share) * plain / rope["factor"]


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def turn(x, angles):
    """x [tokens heads head_dim] with its pairs (i, i + head_dim/2) turned by angles [tokens head_dim/2]."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
