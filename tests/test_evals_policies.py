"""The policy evaluation: exact where nothing is evicted, the same for every table width, and its summary statistics."""

import numpy as np
import pytest

from tests.engines import tiny
from zipage_jax.config import CompressionConfig
from zipage_jax.evals.policies import Cell, main, paired_interval, summarise, table
from zipage_jax.evals.teacher import divergence, full_pass
from zipage_jax.evals.texts import documents

PAGE = 4


@pytest.fixture(scope="module")
def full():
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40)).astype(np.int32)
    return full_pass(tiny("llama")[0], tokens, kept=16)


def measured(full, policy: str, budget_pages: int, table_pages=None):
    config = CompressionConfig(budget_pages=budget_pages, window=2, policy=policy)
    return divergence(tiny("llama")[0], full, config, page_size=PAGE, num_tokens=12, table_pages=table_pages)


def test_padding_tables_changes_nothing(full):
    narrow, wide = measured(full, "zipage", 2), measured(full, "zipage", 2, table_pages=4)
    np.testing.assert_allclose(narrow.kl, wide.kl, atol=1e-5)
    assert narrow.kl.shape == narrow.agrees.shape == (2, 12)
    assert (narrow.kl > -1e-6).all() and narrow.kl.max() > 1e-4


def test_more_budget_diverges_less(full):
    assert measured(full, "attention", 3).kl.mean() < measured(full, "attention", 1).kl.mean()


class Words:
    """A tokenizer that numbers characters."""

    def encode(self, text, **options):
        return [ord(c) % 96 for c in text]


def test_documents_do_not_overlap():
    ids = documents(Words(), 30, 2000)
    assert ids.shape == (30, 2000)
    assert len({row.tobytes() for row in ids}) == 30
    with pytest.raises(ValueError, match="ask for fewer"):
        documents(Words(), 10_000, 2000)


def test_summary_marks_what_beats_random():
    cells = [
        Cell("good", 64, [0.1, 0.2, 0.1], [0.9, 0.9, 0.9], 1.0),
        Cell("mixed", 64, [0.1, 2.0, 0.5], [0.9, 0.1, 0.9], 1.0),
        Cell("random", 64, [0.5, 0.6, 0.6], [0.5, 0.5, 0.5], 1.0),
    ]
    good, mixed, random = summarise(cells, seed=0)
    assert good["beats_random"] and not mixed["beats_random"] and "beats_random" not in random
    low, high = paired_interval(np.array([-0.4, -0.4, -0.5]), seed=0)
    assert -0.5 <= low < high <= -0.4
    assert "| good | 0.1333* / 90.0 % |" in table([good, mixed, random])


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="multiple of page_size"):
        main(["--budgets", "40"])
    with pytest.raises(ValueError, match="unknown policy"):
        main(["--policies", "best"])
