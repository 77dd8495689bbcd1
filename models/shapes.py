"""Named model shapes, for random weights: the models of the paper, and tiny ones for tests."""

from models.config import ModelConfig, RopeConfig, llama3_divisors

_QWEN3_EOS = (151645, 151643)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        tie_word_embeddings=tied,
        attention_bias=False,
        qk_norm=True,
        max_position_embeddings=40960,
        eos_token_ids=_QWEN3_EOS,
        bos_token_id=151643,
    )


def _tiny(architecture: str, *, head_dim: int = 16) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e4),
        tie_word_embeddings=True,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        max_position_embeddings=4096,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "ds-r1-distill-llama-8b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            5e5,
            llama3_divisors(5e5, 128, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192),
        ),
        tie_word_embeddings=False,
        attention_bias=False,
        qk_norm=False,
        max_position_embeddings=131072,
        eos_token_ids=(128001,),
        bos_token_id=128000,
    ),
    "tiny-llama": _tiny("llama"),
    "tiny-qwen2": _tiny("qwen2"),
    "tiny-qwen3": _tiny("qwen3", head_dim=32),
}
"""Name -> configuration."""


def shape(name: str) -> ModelConfig:
    """The configuration of that name. Raises ValueError with the known names."""
    if name not in SHAPES:
        raise ValueError(f"unknown model shape {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]
