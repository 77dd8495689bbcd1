"""Loading Hugging Face directories and converted checkpoints: every tensor exactly once, errors by name, little memory."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tyro
from safetensors.numpy import load_file, save_file

import models
from models.convert import convert
from tests.reference import tiny_models

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write(path: Path, kind: str = "llama", *, shards: int = 1, dtype=np.float32, **changes) -> dict[str, np.ndarray]:
    """Writes a tiny checkpoint; returns its tensors."""
    config = tiny_models.config(kind, **changes)
    tensors = {name: tensor.astype(dtype) for name, tensor in tiny_models.tensors(config).items()}
    tiny_models.write(path, config, tensors, shards=shards, generation_config={"eos_token_id": [2, 3], "top_k": 20})
    return tensors


def assert_equal(first: models.Params, second: models.Params) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def rewrite(path: Path, change) -> None:
    """Applies `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE)


def write_tokenizer(path: Path) -> None:
    """A word-level tokenizer as Hugging Face stores one, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "hello": 1, "world": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = {"tokenizer_class": "LlamaTokenizerFast", "unk_token": "<unk>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", models.MODELS)
def test_fused_weights_hold_the_checkpoint_by_kv_head(kind, tmp_path):
    tensors = write(tmp_path, kind)
    model = models.load(tmp_path, "float32")
    config, layer, prefix = model.config, model.params.layers[1], "model.layers.1."
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim

    def head(name, index):
        return slice(index * head_dim, (index + 1) * head_dim), f"{prefix}self_attn.{name}_proj"

    columns = [[head("q", kv * group + i) for i in range(group)] + [head("k", kv), head("v", kv)] for kv in range(2)]
    for kv, heads in enumerate(columns):
        for column, (rows, name) in enumerate(heads):
            np.testing.assert_array_equal(layer.qkv[:, kv, column], tensors[f"{name}.weight"][rows].T)
            if kind == "qwen2":
                np.testing.assert_array_equal(layer.qkv_bias[kv, column], tensors[f"{name}.bias"][rows])
    for index, name in enumerate(("gate", "up")):
        np.testing.assert_array_equal(layer.gate_up[:, index], tensors[f"{prefix}mlp.{name}_proj.weight"].T)
    np.testing.assert_array_equal(layer.down, tensors[f"{prefix}mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(layer.output, tensors[f"{prefix}self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(model.params.head, tensors["lm_head.weight"])


def test_equal_sizes_do_not_confuse_the_fused_layout(tmp_path):
    tensors = write(
        tmp_path, hidden_size=4, num_attention_heads=8, num_key_value_heads=4, head_dim=4, intermediate_size=4
    )
    layer = models.load(tmp_path, "float32").params.layers[0]
    assert layer.qkv.shape == (4, 4, 4, 4)
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(layer.qkv[:, 1, 0], query[8:12].T)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("shards", [1, 3])
def test_stored_dtypes_and_shards_load_alike(dtype, shards, tmp_path):
    write(tmp_path / "stored", "qwen2", shards=shards, dtype=dtype)
    write(tmp_path / "single", "qwen2", dtype=dtype)
    stored = models.load(tmp_path / "stored", dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(stored.params)} == {np.dtype(dtype)}
    assert_equal(stored.params, models.load(tmp_path / "single", dtype).params)
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), models.load(tmp_path / "single", "float32").params)
    assert_equal(models.load(tmp_path / "stored", "bfloat16").params, cast)
    assert stored.generation_config == {"eos_token_id": [2, 3], "top_k": 20}
    assert stored.config.eos_token_ids == (2, 3)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    write(tmp_path, tie_word_embeddings=True)
    tied = models.load(tmp_path, "float32").params
    assert tied.head is None
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.copy()}))
    assert_equal(models.load(tmp_path, "float32").params, tied)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks 1 tensor\(s\): model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), r"lacks 1 tensor\(s\): lm_head\.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.ones(8)}),
            r"1 unexpected tensor\(s\): model\.layers\.0\.self_attn\.q_norm\.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            r"model\.norm\.weight has shape \(31,\); the configuration says \(32,\)",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), r"model\.norm\.weight is I8"),
    ],
)
def test_wrong_tensors_are_named(change, message, tmp_path):
    write(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)


def test_old_rotary_buffers_are_ignored(tmp_path):
    write(tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    rewrite(tmp_path, lambda tensors: tensors.update(buffer))
    models.load(tmp_path)


def test_wrong_shards_are_named(tmp_path):
    write(tmp_path, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / INDEX).read_text())
    moved = next(name for name, shard in index["weight_map"].items() if shard == first.name)

    index["weight_map"][moved] = second.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"says that {moved} is in {second.name}; it is not"):
        models.load(tmp_path)
    tensors = load_file(second)
    save_file(tensors | {moved: load_file(first)[moved]}, second)
    with pytest.raises(ValueError, match=f"{moved} is stored twice, in {first.name} and {second.name}"):
        models.load(tmp_path)
    second.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=rf"{second.name} is no readable safetensors file"):
        models.load(tmp_path)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks the shard {second.name}"):
        models.load(tmp_path)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model at '/nowhere/at/all'"):
        models.load("/nowhere/at/all")
    with pytest.raises(ValueError, match=r"no model directory: it has no config\.json"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.config("llama")))
    with pytest.raises(FileNotFoundError, match="only safetensors are read"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.config("llama", architectures=["BertModel"])))
    with pytest.raises(ValueError, match=f"{tmp_path}: unknown architecture: BertModel"):
        models.load(tmp_path)


@pytest.mark.parametrize(("source", "error"), [("", FileNotFoundError), (None, TypeError), (5, TypeError)])
def test_what_names_no_model_is_refused(source, error):
    with pytest.raises(error, match=f"model.* {source!r}"):
        models.load(source)


def test_hub_ids_go_through_the_cache(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match="'nobody/no-such-model' is neither a local path nor in the Hugging Face cache"
    ):
        models.load("nobody/no-such-model")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **_: str(tmp_path))
    assert models.load("owner/name").config.vocab_size == 96


@pytest.mark.parametrize("kind", models.MODELS)
def test_a_converted_checkpoint_is_the_same_model(kind, tmp_path, capsys):
    write(tmp_path / "hf", kind, tie_word_embeddings=kind == "qwen3", rope_scaling=tiny_models.LLAMA3_ROPE)
    write_tokenizer(tmp_path / "hf")
    original = models.load(tmp_path / "hf", "float32")
    out = tmp_path / "converted"
    tyro.cli(convert, args=[str(tmp_path / "hf"), str(out), "--dtype", "float32"])
    assert "wrote" in capsys.readouterr().out
    restored = models.load(out, "float32")
    assert restored.config == original.config
    assert restored.generation_config == original.generation_config
    assert_equal(restored.params, original.params)
    for model in (original, restored):
        assert model.tokenizer("hello world")["input_ids"] == [1, 2]
        assert model.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), original.params)
    assert_equal(models.load(out, "bfloat16").params, cast)


def test_unfit_checkpoints_are_refused(tmp_path):
    write(tmp_path / "hf")
    out = tmp_path / "converted"
    convert(str(tmp_path / "hf"), out)
    with pytest.raises(FileExistsError, match="not an empty directory"):
        convert(str(tmp_path / "hf"), out)
    description = json.loads((out / "zipage_model.json").read_text())
    (out / "zipage_model.json").write_text(json.dumps(description | {"format": 0}))
    with pytest.raises(ValueError, match="format 0, known: 1; convert the model again"):
        models.load(out)
    description["config"]["num_experts"] = 8
    (out / "zipage_model.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="num_experts"):
        models.load(out)


def test_shardings_that_do_not_divide_are_refused():
    mesh = jax.sharding.AbstractMesh((3,), ("tensor",))
    with pytest.raises(ValueError, match=r"q_proj.*does not split over 3 devices"):
        models.param_shardings(models.SHAPES["tiny-llama"], mesh, "tensor")


def run_python(code: str, *arguments: object, **environment: str) -> str:
    """Standard output of a fresh interpreter; its standard error must stay empty."""
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])} | environment
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout


def test_models_load_onto_a_mesh(tmp_path):
    write(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    code = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import models
from models.convert import convert

source, out = map(Path, sys.argv[1:])
plain = models.load(source, "float32")
places = models.param_shardings(plain.config, jax.make_mesh((2,), ("tensor",)), "tensor")
convert(str(source), out, "float32")
drawn = models.random_params(plain.config, "float32", 0, places)
loaded = [models.load(path, "float32", shardings=places).params for path in (source, out)]
for params in (*loaded, drawn):
    jax.tree.map(lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim) or sys.exit("not placed"), params, places)
    if params is not drawn:
        jax.tree.map(np.testing.assert_array_equal, params, plain.params)
shard = drawn.layers[0].qkv.addressable_shards[1].data
assert shard.shape == (32, 1, 4, 12), shard.shape
"""
    run_python(code, tmp_path / "hf", tmp_path / "converted")


def test_transformers_is_quiet_about_torch(tmp_path):
    write_tokenizer(tmp_path)
    code = """
import sys
from pathlib import Path
from models.tokenizer import from_directory
print(from_directory(Path(sys.argv[1]))("world").input_ids)
assert "torch" not in sys.modules
"""
    assert run_python(code, tmp_path) == "[2]\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("stored", ["hf", "converted"])
def test_peak_host_memory_is_little_more_than_the_weights(stored, tmp_path):
    """On a CPU the parameters are host memory too: 1.0 of the 1.3 is theirs.

    Orbax keeps some 200 MB (caches, threads), however large the model: over 0.3 of this one, little of any that matters.
    """
    config = tiny_models.config(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, vocab_size=8192, num_attention_heads=16
    )
    tensors = {name: np.full(shape, 0.5, ml_dtypes.bfloat16) for name, shape in tiny_models.shapes(config).items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert num_bytes > 3e8
    path = tiny_models.write(tmp_path / "hf", config, tensors)
    del tensors
    write(tmp_path / "tiny")
    if stored == "converted":
        for name in ("hf", "tiny"):
            convert(str(tmp_path / name), tmp_path / f"{name}-converted")
        path = tmp_path / "hf-converted"
    code = """
import sys
import models

def read(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

models.load(sys.argv[2])  # imports and compiles
before = read("VmRSS")
model = models.load(sys.argv[1])
print(read("VmHWM") - before)
"""
    peak = int(run_python(code, path, tmp_path / ("tiny-converted" if stored == "converted" else "tiny")))
    assert 0.9 * num_bytes < peak < (1.3 * num_bytes if stored == "hf" else 1.1 * num_bytes + 300e6)
