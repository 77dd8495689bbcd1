"""Every notebook runs from top to bottom; its two files are in step and carry no outputs.

One is to take less than three minutes on two cores of its own; twice that is given, for machines that do other things too.
"""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.py"))
SECONDS = 360
pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(SECONDS)]


def library(name: str):
    try:
        return __import__(name)
    except ImportError:
        pytest.fail(f"{name} is missing; install it with `uv sync --extra notebooks`", pytrace=False)


def test_all_are_there():
    assert len(NOTEBOOKS) == 6
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_both_files_say_the_same(name):
    source = library("jupytext").read(FOLDER / f"{name}.py")
    paired = library("nbformat").read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (source, paired)]
    assert cells[0] == cells[1], "write it again: uv run --extra notebooks jupytext --sync notebooks/*.py"
    code = [cell for cell in paired.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "strip the outputs"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs(name, tmp_path, monkeypatch):
    # Executables are kept for the engines of one notebook, as for a user, but none is there at its start.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    notebook = library("jupytext").read(FOLDER / f"{name}.py")
    resources = {"metadata": {"path": str(FOLDER)}}
    library("nbclient").NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
