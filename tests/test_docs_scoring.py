"""The example of docs/scoring-policies.md runs as printed."""

import pathlib
import re

from zipage_jax.scoring import PRESETS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "scoring-policies.md"


def test_the_example_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    try:
        exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "example"})
    finally:
        PRESETS.pop("key-norm", None)
    # 40 + 40 tokens in pages of 16 with a budget of 2: 48 entries are full once, twice, and 79 are written.
    assert capsys.readouterr().out == "2 compressions evicted 32 entries per layer and head\n"


def test_the_table_lists_what_the_context_has():
    from zipage_jax.scoring import ScoreContext

    named = set(
        re.findall(r"`(\w+)(?:\(.*?\))?`", "\n".join(re.findall(r"^\| `.*? \|", PAGE.read_text(), re.MULTILINE)))
    )
    fields = set(ScoreContext.__dataclass_fields__) | {name for name in vars(ScoreContext) if not name.startswith("_")}
    assert named <= fields
    hidden = {"k_pages", "v_pages", "page_ids", "history_len", "entries_readable", "implementation", "_computed"}
    assert fields - named == hidden
