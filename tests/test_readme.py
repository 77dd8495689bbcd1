"""The example of the README runs as printed, and compresses."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_compresses(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(block, str(README), "exec"), {"__name__": "example"})
    *story, last = capsys.readouterr().out.splitlines()
    assert "".join(story).strip()
    length, pages, compressions = map(int, re.findall(r"\d+", last))
    assert pages == 5 < length / 16 and compressions >= 4
