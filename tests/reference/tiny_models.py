"""Tiny Hugging Face checkpoints with random weights: configs, tensors and directories. NumPy and safetensors only."""

import json
from pathlib import Path

import numpy as np

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config(kind: str, **changes) -> dict:
    """A config.json in the old spelling; `changes` replace keys (None removes one)."""
    base = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "qwen3":
        base["head_dim"] = 12
    return {key: value for key, value in (base | changes).items() if value is not None}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of the checkpoint that goes with a config."""
    hidden, intermediate, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    result = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            result[f"{layer}{norm}.weight"] = (hidden,)
        for name, size in sizes.items():
            result[f"{layer}self_attn.{name}_proj.weight"] = (size, hidden)
            if config["model_type"] == "qwen2":
                result[f"{layer}self_attn.{name}_proj.bias"] = (size,)
        result[f"{layer}self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if config["model_type"] == "qwen3":
            result[f"{layer}self_attn.q_norm.weight"] = result[f"{layer}self_attn.k_norm.weight"] = (head_dim,)
        for name in ("gate", "up"):
            result[f"{layer}mlp.{name}_proj.weight"] = (intermediate, hidden)
        result[f"{layer}mlp.down_proj.weight"] = (hidden, intermediate)
    return result


def tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors, such that every part of the model moves the logits."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, shape in sorted(shapes(config).items()):
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            result[name] = 1 + np.float32(0.3) * noise
        elif name.endswith("bias"):
            result[name] = np.float32(0.5) * noise
        else:
            scale = 1.0 if "embed" in name else shape[-1] ** -0.5
            result[name] = np.float32(scale) * noise
    return result


def write(
    path: Path, config: dict, tensors: dict[str, np.ndarray], *, shards: int = 1, generation_config: dict | None = None
) -> Path:
    """Writes a checkpoint directory: config.json and one safetensors file, or several with their index."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
