"""The command line: errors end it with a line that names them, and what failed shows in its exit status."""

import json

import pytest

from tests.test_llm import directory  # noqa: F401 (a fixture)
from zipage_jax.outputs import SampleOutput
from zipage_jax.run import main

OPTIONS = ["--page-size", "4", "--num-pages", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
OPTIONS += ["--max-model-len", "128", "--max-tokens", "5", "--ignore-eos"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no prompts"),
        ("\n  \n", "has no prompts"),
        ("hello", ":1: not a JSON object"),
        ('{"prompt": "a"}\n{"promt": "b"}', ":2: needs exactly one of"),
        ('{"prompt": "a", "messages": []}', ":1: needs exactly one of"),
        ("[]", ":1: needs exactly one of"),
    ],
)
def test_a_bad_file_of_prompts_is_an_error(tmp_path, capsys, content, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert main(["--prompts", str(path)]) == 2
    assert says in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("fails", [False, True])
def test_the_exit_status_tells_of_failed_requests(directory, tmp_path, monkeypatch, fails):  # noqa: F811
    if fails:
        monkeypatch.setattr(SampleOutput, "push", lambda *_: 1 / 0)
    path = tmp_path / "outputs.jsonl"
    assert main(["-m", str(directory), "-p", "a", "-p", "b", "--output", str(path), *OPTIONS]) == int(fails)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["outputs"][0]["finish_reason"] for record in records] == ["error" if fails else "length"] * 2
    assert [record["prompt"] for record in records] == ["a", "b"]


@pytest.mark.parametrize("path", ["none/outputs.jsonl", "."])
def test_an_output_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path, capsys, path):
    assert main(["-p", "a", "--output", str(tmp_path / path)]) == 2
    assert "must be a file in a folder that exists" in " ".join(capsys.readouterr().err.split())


def test_compression_has_one_set_of_flags(capsys):
    with pytest.raises(SystemExit):
        main(["-p", "a", "engine:compression-config", "--budget-pages", "2"])
    assert "engine:compression-config" in capsys.readouterr().err


def test_pages_of_full_kv_are_those_that_it_holds(directory, capsys):  # noqa: F811
    """A page border at the last token: it is never cached."""
    assert main(["-m", str(directory), "-p", "abcd", "--raw", *OPTIONS]) == 0
    assert "peak pages 2 (full KV: 2), 4 entries each" in " ".join(capsys.readouterr().out.split())
