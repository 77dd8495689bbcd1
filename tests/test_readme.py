"""The README's example runs as printed and compresses; its commands and the files that it names exist."""

import pathlib
import re
import shlex

import pytest
import tyro

from zipage_jax.run import Arguments

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"


def test_the_example_runs_and_compresses(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(block, str(README), "exec"), {"__name__": "example"})
    *story, last = capsys.readouterr().out.splitlines()
    assert "".join(story).strip()
    length, pages, compressions = map(int, re.findall(r"\d+", last))
    assert pages == 5 < length / 16 and compressions >= 4


def commands() -> list[str]:
    return re.findall(r"python -m zipage_jax\.run *([^#\n`]*)", README.read_text())


@pytest.mark.parametrize("command", commands())
def test_the_commands_are_understood(command):
    tyro.cli(Arguments, args=shlex.split(command.replace("(or", "").strip()))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_files_it_names_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:zipage_jax|pallas_kernels|models|tests|notebooks|benchmarks|docs)/[\w./*-]*)`", text))
    named |= set(re.findall(r"\]\((?!http)([^)#]+)\)", text))
    assert len(named) > 5
    assert not [name for name in named if not list(ROOT.glob(name.rstrip("/")))]


def test_the_figure_is_drawn_by_its_command(tmp_path):
    from zipage_jax.plots.__main__ import main

    main([str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
