"""Memory plan against the paper's equations and by hand."""

import pytest

from tests.engines import tiny
from zipage_jax.buckets import choose_buckets
from zipage_jax.build import plan_for_device
from zipage_jax.config import EngineConfig
from zipage_jax.memory_plan import page_bytes, plan_memory, slot_bytes

QWEN3_8B = {"num_layers": 36, "head_dim": 128, "itemsize": 2}
PAGE = page_bytes(page_size=256, num_kv_heads=8, score_itemsize=4, **QWEN3_8B)
SLOT = slot_bytes(window=16, num_heads=32, **QWEN3_8B)


def test_bytes_of_a_page_and_a_slot():
    assert PAGE == 36 * 256 * 8 * (2 * 128 * 2 + 4)
    assert SLOT == 4.5 * 2**20
    plain = page_bytes(page_size=256, num_kv_heads=8, **QWEN3_8B)
    assert plain == 36 * 2**20
    # The global score in the cache's dtype costs 1 / (2 · head_dim) of K and V.
    assert page_bytes(page_size=256, num_kv_heads=8, score_itemsize=2, **QWEN3_8B) == plain * (1 + 1 / 256)
    quantised = page_bytes(page_size=256, num_kv_heads=8, num_layers=36, head_dim=128, itemsize=1, scale_itemsize=4)
    assert quantised == 36 * 256 * 8 * (256 + 8)


@pytest.mark.parametrize("gib", [1, 20, 105])
@pytest.mark.parametrize("max_pages", [2, 9, 17])
def test_m_and_n_total_follow_the_equations(gib, max_pages):
    avail = gib * 2**30
    plan = plan_memory(avail, page_bytes=PAGE, slot_bytes=SLOT, max_pages=max_pages, max_num_seqs=10**6)
    most = avail // (max_pages * PAGE + SLOT)
    assert most - 1 <= plan.num_slots <= most, "the null page and the null slot cost at most one request"
    assert plan.total_bytes <= avail < plan.total_bytes + PAGE
    assert plan.num_slots * max_pages <= plan.num_pages - 1, "all slot holders can hold N_max pages at once"


def test_slots_beyond_the_seats_become_pages():
    wide, narrow = (
        plan_memory(20 * 2**30, page_bytes=PAGE, slot_bytes=SLOT, max_pages=9, max_num_seqs=n) for n in (999, 8)
    )
    assert narrow.num_slots == 8 < wide.num_slots and narrow.num_pages > wide.num_pages


def test_without_compression_there_are_only_pages():
    plan = plan_memory(2**30, page_bytes=PAGE, slot_bytes=SLOT, max_num_seqs=8)
    assert plan.num_slots == plan.slot_bytes == 0 and plan.num_pages == 2**30 // PAGE


def test_given_numbers_are_taken_or_refused():
    options = {"page_bytes": 100, "slot_bytes": 10, "max_pages": 3, "max_num_seqs": 8}
    plan = plan_memory(None, num_pages=13, **options)
    assert (plan.num_pages, plan.num_slots) == (13, 4)
    plan = plan_memory(2_000, num_slots=2, **options)
    assert (plan.num_pages, plan.num_slots, plan.total_bytes) == (19, 2, 1_930)
    with pytest.raises(ValueError, match=r"13 pages .* lower num_pages or num_query_slots"):
        plan_memory(1_000, num_pages=13, **options)


def test_more_pages_than_the_device_holds_are_refused():
    model = tiny("llama")[0].config

    def plan(num_pages, free):
        config = EngineConfig(page_size=4, num_pages=num_pages, max_num_seqs=2, max_num_batched_tokens=8)
        return plan_for_device(model, config, choose_buckets(config, max_model_len=64, gather=False), 4, free)

    assert plan(64, 10**8).num_pages == plan(64, None).num_pages == 64
    with pytest.raises(ValueError, match=r"1000000 pages .* GiB at hand; lower num_pages"):
        plan(10**6, 10**8)


@pytest.mark.parametrize("avail", [0, -5, 399])
def test_memory_for_less_than_one_request_is_refused(avail):
    with pytest.raises(ValueError, match=r"cannot hold one request: it needs 4 pages .* N_max=3.*lower budget_pages"):
        plan_memory(avail, page_bytes=100, slot_bytes=10, max_pages=3, max_num_seqs=8)
    with pytest.raises(ValueError, match="num_pages=3 cannot hold one request"):
        plan_memory(None, num_pages=3, page_bytes=100, slot_bytes=10, max_pages=3, max_num_seqs=8)
    with pytest.raises(ValueError, match="neither num_pages nor kv_cache_bytes"):
        plan_memory(None, page_bytes=100, max_num_seqs=8)
