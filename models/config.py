"""Model configurations, and how they are read from a Hugging Face `config.json`.

Both spellings are understood: `rope_theta` + `rope_scaling` (before transformers 5) and `rope_parameters` (since).
What we do not compute is refused by name here, so that no checkpoint loads and then answers wrongly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Hugging Face class name -> our name of the architecture (a key of `models.MODELS`)."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: pair i of a head turns by position · theta^(−2i/head_dim) / divisors[i].

    `divisors` has head_dim/2 entries; None means 1 everywhere. It is how Llama 3's scaling is held (see
    `llama3_divisors`) and how GGUF files store it.
    """

    theta: float
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Everything that a forward pass needs to know beside the weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    qk_norm: bool  # RMS norm over head_dim of q and k, before RoPE
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES.values():
            raise ValueError(f"architecture {self.architecture!r} is unknown; known: {sorted(ARCHITECTURES.values())}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE turns pairs")
        if self.rope.divisors is not None and len(self.rope.divisors) != self.head_dim // 2:
            raise ValueError(f"{len(self.rope.divisors)} RoPE divisors for {self.head_dim // 2} pairs of a head")


def llama3_divisors(
    theta: float, head_dim: int, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> tuple[float, ...]:
    """RoPE divisors of Llama 3.1: `factor` for long wavelengths, 1 for short ones, a blend of frequencies between.

    With λ_i = 2π · theta^(2i/head_dim): λ < original_length / high_freq_factor keeps its frequency,
    λ > original_length / low_freq_factor is divided by `factor`, and in between the frequency is
    (1 − s)/factor + s times the original, s = (original_length/λ − low) / (high − low).
    Source: Llama 3.1 reference code (`apply_scaling`), as in Hugging Face's rope_type "llama3".
    """
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original_length / high_freq_factor:
            divisors.append(1.0)
        elif wavelength > original_length / low_freq_factor:
            divisors.append(float(factor))
        else:
            blend = (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            divisors.append(1.0 / ((1 - blend) / factor + blend))
    return tuple(divisors)


def from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face `config.json`, old or new spelling.

    End-of-sequence ids are those of both files, config.json's first.

    Raises:
        ValueError: an unknown architecture or RoPE type, a sliding window in use, or another feature that we do not
            compute; a missing key.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    hidden_size, num_heads = _get(config, "hidden_size"), _get(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    eos_token_ids = _ids(config.get("eos_token_id"))
    if generation_config:
        eos_token_ids += tuple(i for i in _ids(generation_config.get("eos_token_id")) if i not in eos_token_ids)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_get(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_get(config, "intermediate_size"),
        num_layers=_get(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=float(_get(config, "rms_norm_eps")),
        rope=_rope(config, head_dim),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        max_position_embeddings=_get(config, "max_position_embeddings"),
        eos_token_ids=eos_token_ids,
        bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
    )


def _get(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key!r}")
    return config[key]


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and config.get("model_type") in ARCHITECTURES.values():
        return config["model_type"]
    named = ", ".join(names) or config.get("model_type") or "none named"
    raise ValueError(f"unknown architecture: {named}; known: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    layer_types = config.get("layer_types")
    if layer_types is None:
        windowed = config.get("use_sliding_window") and config.get("sliding_window") is not None
        first_windowed = config.get("max_window_layers", 0)
        if windowed and first_windowed < _get(config, "num_hidden_layers"):
            raise ValueError(
                f"sliding-window attention (sliding_window={config['sliding_window']} from layer {first_windowed} on) "
                "is not supported; only full attention is"
            )
    elif unknown := sorted(set(layer_types) - {"full_attention"}):
        raise ValueError(
            f"layer_types {unknown} are not supported (sliding windows and the like); only full_attention is"
        )
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported; only 'silu' is")
    if architecture != "qwen2" and config.get("attention_bias"):
        raise ValueError(f"attention_bias=true is not supported for {architecture}")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias=true is not supported")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed method")
        raise ValueError(f"a quantised checkpoint ({method}) is not supported; use bf16, fp16, fp32 or a GGUF file")


def _without_theta(rope: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"rope_type" if key == "type" else key: value for key, value in rope.items()}
    return {key: value for key, value in renamed.items() if key != "rope_theta"}


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in new.values()):
        raise ValueError(f"rope_parameters per layer type ({sorted(new)}) are not supported")
    scaling = new or old
    thetas = {spelling["rope_theta"] for spelling in (config, old, new) if spelling.get("rope_theta") is not None}
    if not thetas:
        raise ValueError("config.json has neither 'rope_theta' nor 'rope_parameters' with a 'rope_theta'")
    if len(thetas) > 1 or (new and old and _without_theta(new) != _without_theta(old)):
        raise ValueError(f"the two spellings of RoPE contradict each other: {sorted(thetas)}, {old}, {new}")
    theta = thetas.pop()
    rotary_share = new.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if rotary_share != 1.0:
        raise ValueError(f"partial_rotary_factor={rotary_share} is not supported; RoPE must turn the whole head")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "default":
        return RopeConfig(float(theta))
    if rope_type != "llama3":
        raise ValueError(f"RoPE type {rope_type!r} is not supported; known: 'default', 'llama3'")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in scaling]:
        raise ValueError(f"RoPE type 'llama3' needs {missing}")
    divisors = llama3_divisors(
        theta,
        head_dim,
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_length=scaling["original_max_position_embeddings"],
    )
    return RopeConfig(float(theta), divisors)
