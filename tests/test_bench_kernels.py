"""The kernel bench's own parts, on the CPU: timing, checking, reporting a failure and going on."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench, bench_attention, bench_timing
from pallas_kernels.bench_timing import Case, Ceilings
from pallas_kernels.cases import DecodeCase, PrefillCase, decode_inputs, log_uniform_lens, page_table
from pallas_kernels.paged_attention import paged_attention

CEILINGS = Ceilings(4.0e12, 3.0e12, 6.0e14)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(bench_timing, "ROUND_S", 1e-4)
    monkeypatch.setattr(bench_timing, "ROUNDS", 1)


def records_of(case):
    records = []
    bench_timing.run_case(case, records.append)
    return records


def xla(*args):
    return paged_attention(*args, implementation="xla")


def test_a_case_is_checked_timed_and_compared_with_its_floor():
    case = bench_attention.decode_case(DecodeCase("tiny", (5, 40, 17), "smollm2", 16, must_reach=0.5), CEILINGS, False)
    assert case.floor_us == pytest.approx((2 * 62 * 3 * 64 * 2 + 2 * 3 * 9 * 64 * 2) / 4.0e6)
    case.functions = {
        ("pallas", ""): xla,
        ("xla", "wrong"): lambda *args: xla(*args) * 1.1,
        ("xla", "broken"): lambda *args: xla(*args, args[0]),
    }
    right, wrong, broken = records_of(case)
    assert right["ok"] and right["us"] > 0 and right["must_reach"] == 0.5
    assert right["floor_share"] == pytest.approx(right["floor_us"] / right["us"], abs=2e-3)
    assert not wrong["ok"] and wrong["error"] == pytest.approx(0.1, abs=0.02)
    assert not broken["ok"] and "us" not in broken and broken["failed"]
    lines = bench.table([right, wrong, broken]).splitlines()
    assert len(lines) == 4 and "failed" in lines[3]
    json.dumps([right, wrong, broken])


def test_prefill_reference_is_the_last_rows_tokens():
    case = bench_attention.prefill_case(PrefillCase("tiny", (6, 9), (3, 0), "smollm2", 16), CEILINGS, False)
    tokens, expected = case.reference(*case.inputs)
    assert list(tokens) == list(range(6, 15)) and expected.shape == (9, 9, 64)


def test_an_op_in_place_keeps_its_inputs_for_the_next_implementation():
    state = jnp.arange(6.0)
    case = Case(
        "op", "case", 1.0, {("a", ""): lambda x: x + 1.0, ("b", ""): lambda x: x + 1.0}, (state,), 0.0, in_place=True
    )
    assert [r["ok"] for r in records_of(case)] == [True, True]
    case.chained = False
    assert [r["ok"] for r in records_of(case)] == [True, True]


def test_every_op_of_the_command_has_a_module_with_cases():
    for op, module in bench.OPS.items():
        assert module in ("bench_attention", "bench_compress"), op
    names = [name for name, _ in bench_attention.cases("paged_attention", CEILINGS, False)]
    assert len(set(names)) == len(names)


def test_the_command_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        bench.main(["no_such_op"])
    assert "known" in capsys.readouterr().err
    if jax.default_backend() == "cpu":
        with pytest.raises(SystemExit):
            bench.main(["paged_attention"])


def test_page_tables_give_each_row_pages_of_its_own():
    lens = log_uniform_lens(20, 200)
    assert min(lens) >= 1 and max(lens) <= 200
    table, total = page_table(lens, 16)
    used = [page for row, n in enumerate(lens) for page in table[row, : -(-n // 16)]]
    assert sorted(used) == list(range(1, total))
    assert decode_inputs(DecodeCase("tiny", lens, "smollm2", 16))[1].shape == (total, 3, 16, 64)
