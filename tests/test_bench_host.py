"""The benches that need no model run, and print one JSON object last."""

import json

import pytest

from zipage_jax.bench import __main__ as bench


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_scheduler_bench(capsys):
    bench.main(["scheduler", "--running", "16", "--waiting", "40", "--steps", "200", "--warmup", "50"])
    result = last_line(capsys)
    assert 0 < result["p50_ms"] <= result["p99_ms"] and result["waiting"] == 40 and result["steps"] == 200


@pytest.mark.parametrize("workload", ["amc", "mixture", "longbench"])
def test_simulator(capsys, tmp_path, workload):
    options = ["--workload", workload, "--fraction", "0.01", "--device", "h200", "--plot", str(tmp_path / "curves.png")]
    bench.main(["simulate", *options])
    variants = last_line(capsys)[workload]
    assert set(variants) == {"zipage", "no_async", "no_prefix", "no_hybrid", "full_kv"}
    assert all(result["tokens_per_s"] > 0 and 0 < result["mean_occupancy"] <= 1 for result in variants.values())
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", bench.names())
def test_every_bench_explains_itself(capsys, name):
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out


def test_decode_bench(capsys):
    options = ["--model", "tiny-qwen3", "--rows", "2", "1", "--entries", "20", "--page-size", "16", "--steps", "1"]
    bench.main(["decode", *options])
    result = last_line(capsys)
    assert [case["rows"] for case in result["cases"]] == [2, 1] and all(case["ms"] > 0 for case in result["cases"])
    with pytest.raises(ValueError, match="entries=0"):
        bench.main(["decode", "--entries", "0"])


def test_bad_names_are_refused():
    with pytest.raises(SystemExit, match="usage: python -m zipage_jax"):
        bench.main(["nonsense"])
    with pytest.raises(ValueError, match="unknown variant"):
        bench.main(["simulate", "--variants", "zipagee"])
