"""The models' numbers against a NumPy oracle and Hugging Face's own; configurations; random weights."""

import dataclasses
import functools
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.config import from_hf, llama3_divisors
from models.registry import param_weights
from tests.goldens.make_transformers_goldens import CASES, POSITIONS, SEED, TOKENS
from tests.reference import tiny_models, transformer


def dense_attend(layer, cache, q, k, v):
    """Causal attention within one sequence that starts at its first token."""
    tokens, heads, head_dim = q.shape
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision=precision).astype(jnp.float32) / np.float32(np.sqrt(head_dim))
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool))[None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return cache, jnp.einsum("hqk,khd->qhd", weights, v, precision=precision)


def dense_logits(model: models.LoadedModel, tokens, positions=None) -> np.ndarray:
    """Logits of every token of one sequence, by a dense forward pass."""
    positions = np.arange(len(tokens)) if positions is None else positions
    return np.asarray(_dense_logits(model.params, model.config, np.int32(tokens), np.int32(positions)))


@functools.partial(jax.jit, static_argnums=1)
def _dense_logits(params, config, tokens, positions):
    hidden, _ = models.forward(params, config, tokens, positions, (), dense_attend)
    return models.logits(params, config, hidden)


def load_tiny(path: Path, kind: str, dtype="float32", seed=SEED, **changes):
    """A tiny checkpoint written to `path` and loaded from there, with its config and tensors."""
    config = tiny_models.config(kind, **changes)
    tensors = tiny_models.tensors(config, seed)
    return models.load(tiny_models.write(path, config, tensors), dtype), config, tensors


@pytest.mark.parametrize("case", CASES)
def test_logits_match_the_oracle_and_transformers(case, tmp_path):
    kind, changes = CASES[case]
    model, config, tensors = load_tiny(tmp_path, kind, **changes)
    got = dense_logits(model, TOKENS, POSITIONS)
    assert got.dtype == np.float32
    expected = transformer.logits(config, tensors, TOKENS, POSITIONS)
    np.testing.assert_allclose(got, expected, atol=2e-5 * expected.std())
    golden = np.load(Path(__file__).parent / "goldens" / "transformers_tiny.npz")[case]
    np.testing.assert_allclose(got, golden, atol=2e-5 * expected.std())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_on_a_gpu(case, tmp_path):
    test_logits_match_the_oracle_and_transformers(case, tmp_path)


@pytest.mark.gpu
def test_random_weights_are_made_on_the_device():
    def host_bytes():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    models.random_model("tiny-qwen3")
    before, start = host_bytes(), time.perf_counter()
    model = models.random_model("qwen3-8b", "bfloat16")
    jax.block_until_ready(model.params)
    assert time.perf_counter() - start < 30
    assert host_bytes() - before < 2e9  # of 16.4e9


@pytest.mark.parametrize("kind", models.MODELS)
def test_bfloat16_stays_close_to_the_oracle(kind, tmp_path):
    model, config, tensors = load_tiny(tmp_path, kind, dtype="bfloat16")
    rounded = {name: tensor.astype(jnp.bfloat16).astype(np.float64) for name, tensor in tensors.items()}
    got, expected = dense_logits(model, TOKENS), transformer.logits(config, rounded, TOKENS)
    assert got.dtype == np.float32  # the head's sums are not rounded to bfloat16
    assert np.sqrt(np.mean((got - expected) ** 2)) < 0.03 * expected.std()


@pytest.mark.parametrize("kind", models.MODELS)
def test_every_parameter_moves_the_logits(kind, tmp_path):
    model, _, _ = load_tiny(tmp_path, kind, num_hidden_layers=1)
    before = dense_logits(model, TOKENS)
    leaves, structure = jax.tree.flatten(model.params)
    for index, leaf in enumerate(leaves):
        changed = jax.tree.unflatten(structure, [*leaves[:index], leaf * 1.5, *leaves[index + 1 :]])
        after = dense_logits(dataclasses.replace(model, params=changed), TOKENS)
        # A bias on k alone changes nothing, but a fused one holds q's and v's too.
        assert np.abs(after - before).max() > 1e-3, index


def test_cache_passes_through_the_layers_in_order():
    config = models.SHAPES["tiny-llama"]
    seen = []

    def attend(layer, cache, q, k, v):
        seen.append((layer, cache, q.shape, k.shape, v.shape))
        return cache + 1, q

    def run(params, tokens):
        hidden, cache = models.forward(params, config, tokens, tokens, 0, attend)
        assert cache == 2
        return hidden

    hidden = jax.eval_shape(run, models.abstract_params(config, "bfloat16"), jax.ShapeDtypeStruct((3,), jnp.int32))
    assert (hidden.shape, hidden.dtype) == ((3, 64), jnp.bfloat16)
    assert seen == [(i, i, (3, 4, 16), (3, 2, 16), (3, 2, 16)) for i in range(2)]


def test_new_spelling_of_rope_is_read():
    old = tiny_models.config("llama", rope_scaling=tiny_models.LLAMA3_ROPE)
    new = tiny_models.config(
        "llama", rope_theta=None, rope_parameters=tiny_models.LLAMA3_ROPE | {"rope_theta": 10000.0}
    )
    assert from_hf(old) == from_hf(new)
    plain = tiny_models.config("qwen3", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert from_hf(plain).rope == models.RopeConfig(1e6)
    ancient = tiny_models.LLAMA3_ROPE | {"type": "llama3"}
    del ancient["rope_type"]
    assert from_hf(tiny_models.config("llama", rope_scaling=ancient)) == from_hf(old)


def test_llama3_divisors_keep_short_and_stretch_long_wavelengths():
    divisors = llama3_divisors(5e5, 128, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    assert sorted(divisors) == list(divisors)
    assert 0 < sum(1.0 < divisor < 8.0 for divisor in divisors) < 12
    assert models.SHAPES["ds-r1-distill-llama-8b"].rope.divisors == divisors


def test_end_of_sequence_ids_come_from_both_files():
    config = tiny_models.config("llama", eos_token_id=[5, 6])
    assert from_hf(config, {"eos_token_id": [6, 7]}).eos_token_ids == (5, 6, 7)
    assert from_hf(config, {"eos_token_id": 9}).eos_token_ids == (5, 6, 9)
    assert from_hf(tiny_models.config("llama", eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "unknown architecture: GptOssForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "unknown architecture: mamba"),
        ({"architectures": None, "model_type": None}, "unknown architecture: none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "RoPE type 'linear'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "RoPE type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "contradict"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_theta": None}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, "sliding_window=128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        from_hf(tiny_models.config("llama", **changes))


def test_unused_sliding_windows_are_no_reason_to_refuse():
    from_hf(tiny_models.config("qwen2", use_sliding_window=False, sliding_window=128, max_window_layers=1))
    from_hf(tiny_models.config("qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=2))
    from_hf(tiny_models.config("qwen3", layer_types=["full_attention"] * 2, sliding_window=None))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_random_models_run_and_follow_their_seed(name):
    model = models.random_model(name, "float32", seed=3)
    abstract = models.abstract_params(model.config, "float32")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), model.params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )
    again, other = models.random_model(model.config, "float32", seed=3), models.random_model(name, "float32", seed=4)
    for first, second, third in zip(*map(jax.tree.leaves, (model.params, again.params, other.params)), strict=True):
        np.testing.assert_array_equal(first, second)
        if first.ndim > 1:
            assert 0.015 < np.std(first) < 0.025
            assert not np.array_equal(first, third)
    assert not np.array_equal(model.params.layers[0].qkv, model.params.layers[1].qkv)
    assert np.isfinite(dense_logits(model, TOKENS)).all()
    assert model.tokenizer is None


def test_named_shapes_have_the_parameters_of_their_models():
    billions = {
        "qwen3-0.6b": 0.596,
        "qwen3-8b": 8.19,
        "qwen3-14b": 14.77,
        "qwen3-32b": 32.76,
        "ds-r1-distill-llama-8b": 8.03,
    }
    for name, expected in billions.items():
        leaves = jax.tree.leaves(models.abstract_params(models.SHAPES[name], "bfloat16"))
        assert sum(leaf.size for leaf in leaves) / 1e9 == pytest.approx(expected, abs=0.005)
    with pytest.raises(ValueError, match=r"unknown model shape 'qwen3-9b'; known: qwen3-0\.6b"):
        models.random_model("qwen3-9b")


@pytest.mark.parametrize("name", ["qwen3-8b", "tiny-qwen2"])
def test_checkpoint_names_are_used_once(name):
    leaves = jax.tree.leaves(param_weights(models.SHAPES[name]))
    names = [source for leaf in leaves for source, _ in leaf.tensors]
    assert len(names) == len(set(names))


def test_import_is_light_and_silent():
    code = """
import sys
import time
import models
heavy = {"torch", "transformers", "gguf", "orbax", "huggingface_hub", "zipage_jax", "pallas_kernels"} & set(sys.modules)
assert not heavy, heavy
"""
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (0, "")
