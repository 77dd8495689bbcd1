"""`--explain` plans what the engine would plan, from names alone."""

import jax
import jax.numpy as jnp
import pytest

import models
from tests.test_llm import directory  # noqa: F401 (a fixture)
from zipage_jax import build
from zipage_jax.buckets import choose_buckets
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.explain import GPUS, make_plan
from zipage_jax.run import main

BUDGET = EngineConfig(compression=CompressionConfig(budget_pages=8))


@pytest.mark.parametrize("config", [EngineConfig(), BUDGET], ids=["full", "budget"])
def test_the_plan_is_the_engines(config):
    """As `build_engine` makes it, on a device that has what is left beside the weights."""
    shape = models.SHAPES["qwen3-8b"]
    plan = make_plan("qwen3-8b", config, "h200")
    assert 15.2 * 2**30 < plan.weight_bytes < 15.3 * 2**30
    buckets = choose_buckets(config, max_model_len=shape.max_position_embeddings, gather=False)
    free = int(141e9 * 0.9 * 0.98) - plan.weight_bytes
    assert plan.memory == build.plan_for_device(shape, config, buckets, 2, free)
    assert plan.memory.total_bytes + plan.activation_bytes + plan.workspace_bytes <= free


def test_concurrency_by_pages_slots_and_seats():
    full, budget = (make_plan("qwen3-14b", config, "a100") for config in (EngineConfig(), BUDGET))
    assert full.concurrency(40_960) == (full.memory.num_pages - 1) // 160
    assert budget.concurrency(40_960) == budget.memory.num_slots < 256
    assert budget.pages_of(40_960) == 9 and budget.pages_of(300) == 2
    assert budget.concurrency(256) == 256  # one page each: the seats are the limit


def test_models_are_described_without_their_weights(directory):  # noqa: F811
    loaded = models.load(str(directory), jnp.float32)
    assert models.describe(str(directory)) == loaded.config
    for file in directory.glob("*.safetensors"):
        file.rename(file.with_suffix(".away"))
    try:
        assert models.describe(str(directory)) == loaded.config
    finally:
        for file in directory.glob("*.away"):
            file.rename(file.with_suffix(".safetensors"))
    assert models.describe("smollm2").num_layers == 30
    with pytest.raises(FileNotFoundError, match="no model at"):
        models.describe("nothing-of-that-name")


def test_the_command_line_explains(capsys):
    assert main(["--explain", "h200", "-m", "qwen3-8b", "--budget-pages", "8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "budget of 8 pages full KV" in shown and "weights 15.26 GiB" in shown
    assert "requests of 40,960 tokens at once 256 (9 pages each) 17 (160 pages each)" in shown


def test_nothing_is_allocated(capsys):
    before = sum(array.nbytes for array in jax.live_arrays())
    assert main(["--explain", "l4"]) == 0
    assert sum(array.nbytes for array in jax.live_arrays()) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--explain", "h20"], f"known: {', '.join(GPUS)}"),
        (["--explain", "l4", "-m", "qwen3-32b"], "cannot hold one request"),
    ],
)
def test_what_does_not_fit_or_exist_is_an_error(capsys, options, says):
    assert main(options) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("zipage-jax 0.")
