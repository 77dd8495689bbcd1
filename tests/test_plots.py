"""Figures show the numbers they are given; a recorded generation tells what is alive."""

import sys

import numpy as np
import pytest

from zipage_jax import LLM, CompressionConfig, SamplingParams
from zipage_jax.evals.policies import Cell, summarise
from zipage_jax.evictions import generate_survivors
from zipage_jax.metrics import StepRecord
from zipage_jax.plots import PageView, draw_budgets, draw_pages, draw_steps, draw_survival, survival_html
from zipage_jax.plots.pages import EMPTY, EVICTED, KEPT, WINDOW


def image_of(figure, tmp_path) -> int:
    figure.savefig(tmp_path / "figure.png")
    return (tmp_path / "figure.png").stat().st_size


def cells(axis) -> list[str]:
    from matplotlib.colors import to_hex

    return [to_hex(patch.get_facecolor()) for patch in axis.patches]


def test_pages_before_and_after(tmp_path):
    before = PageView((7, 3), np.array([0, 1, 2, 3, 4, 5, 6, 7]), 4)
    after = PageView((7, 3), np.array([0, 2, 6, 7, 8]), 4)
    figure = draw_pages(before, after, window=2)
    top, bottom = figure.axes
    assert cells(top) == [KEPT, EVICTED, KEPT, EVICTED, EVICTED, EVICTED, WINDOW, WINDOW]
    assert cells(bottom) == [KEPT, KEPT, WINDOW, WINDOW, KEPT, EMPTY, EMPTY, EMPTY]
    assert [text.get_text() for text in bottom.texts] == ["page 7", "0", "2", "6", "7", "page 3", "8"]
    assert image_of(figure, tmp_path) > 2_000
    with pytest.raises(ValueError, match="do not fit"):
        PageView((7,), np.arange(5), 4)


ALIVE = np.array([[[0, 3], [2, 3]], [[0, 3], [1, 3]]])


def test_survival_heat_map(tmp_path):
    figure = draw_survival({"a": ALIVE, "b": ALIVE}, 4)
    (image,) = figure.axes[0].images
    expected = [[1, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1]]
    np.testing.assert_array_equal(image.get_array(), expected)
    np.testing.assert_array_equal(
        draw_survival({"a": ALIVE}, 4, bin_size=2).axes[0].images[0].get_array()[0], [0.5, 0.5]
    )
    assert image_of(figure, tmp_path) > 2_000


def test_survival_in_the_text():
    text = survival_html(["<a>", "b", "c", "d"], ALIVE)
    assert 'rgba(66, 146, 198, 0.50)" title="50%">&lt;a&gt;<' in text and 'title="100%">d<' in text
    assert text._repr_html_() == text
    with pytest.raises(ValueError, match="position 3 is alive"):
        survival_html(["a"], ALIVE)


def test_budgets(tmp_path):
    rows = summarise([Cell(p, b, [1 / b], [0.5], 1.0) for p in ("zipage", "random") for b in (128, 64)], seed=0)
    figure = draw_budgets(rows)
    line = figure.axes[0].lines[0]
    assert line.get_label() == "zipage" and line.get_xdata().tolist() == [64, 128]
    np.testing.assert_allclose(line.get_ydata(), [1 / 64, 1 / 128], rtol=1e-3)
    assert image_of(figure, tmp_path) > 2_000


def test_steps(tmp_path):
    times = {"plan_s": 0.0, "dispatch_s": 0.1, "wait_s": 0.1, "commit_s": 0.0}
    numbers = {
        "prefill_tokens": 0,
        "prefill_rows": 0,
        "compress_rows": 0,
        "running": 3,
        "waiting": 1,
        "entries_read": 9,
    }
    records = [StepRecord(time_s=0.2 * i, decode_rows=3, pages_used=i, **numbers, **times) for i in range(1, 5)]
    figure = draw_steps(records, num_pages=8, steps=2)
    requests, rate, occupancy, step = figure.axes
    assert [line.get_label() for line in requests.lines] == ["running", "waiting"]
    np.testing.assert_allclose(rate.lines[0].get_ydata(), [15.0, 15.0])
    np.testing.assert_allclose(occupancy.lines[0].get_ydata(), [0.25, 0.5])
    np.testing.assert_allclose(step.lines[0].get_ydata(), [200.0, 200.0])
    assert image_of(figure, tmp_path) > 2_000


def test_a_missing_matplotlib_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="uv sync --extra plots"):
        draw_budgets([])


def build(**compression) -> LLM:
    sizes = {"page_size": 4, "num_pages": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "dtype": "float32"}
    config = CompressionConfig(budget_pages=2, window=2, policy="streaming-llm", **compression)
    return LLM("tiny-llama", random_weights=True, compression=config, **sizes)


PROMPT = {"prompt_token_ids": list(range(1, 8))}
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def test_survivors_of_a_generation():
    """The newest entries and the first ones: what `streaming-llm` keeps is known."""
    with build(record_evictions=True) as llm:
        found = generate_survivors(llm, PROMPT, PARAMS)
        (expected,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
        assert found.output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.token_ids == (PROMPT["prompt_token_ids"] + expected.outputs[0].token_ids)[: len(found.token_ids)]
        layers, kv_heads, cache_len = found.alive.shape
        assert (layers, kv_heads) == (2, 2) and 8 <= cache_len <= 12 and len(found.page_ids) == 3
        assert found.alive.max() == len(found.token_ids) - 1 == 25
        assert (np.diff(found.alive) > 0).all() and (found.alive[..., 0] == 0).all()
        with pytest.raises(ValueError, match="n=2"):
            generate_survivors(llm, PROMPT, SamplingParams(n=2))
        assert llm.engine.scheduler.num_used_pages == 0


def test_survivors_need_records():
    with build() as llm, pytest.raises(ValueError, match="record_evictions=True"):
        generate_survivors(llm, PROMPT, PARAMS)
