"""What is compiled shows on stderr of a program that set up no logging, and only there."""

import subprocess
import sys

import pytest

QUIET = "import logging; logging.basicConfig(level=logging.WARNING)"
OWN = "import logging; logging.basicConfig(level=logging.INFO, format='own %(message)s')"
LEVEL = "import logging; logging.getLogger('zipage_jax').setLevel(logging.ERROR)"
WORK = """
import jax.numpy as jnp
from zipage_jax.logs import show_logs
from zipage_jax.programs import Program, Programs
def double(x): return x * 2
show_logs(); show_logs()
Programs("cpu").run(Program(double, donated=(), fixed=()), jnp.ones(3))
"""


@pytest.mark.parametrize(
    ("script", "starts"),
    [
        (WORK, ["compiling", "compiled"]),
        (OWN + WORK, ["own compiling", "own compiled"]),
        (WORK.replace('Programs("cpu")', f'{OWN}\nPrograms("cpu")'), ["own compiling", "own compiled"]),
        (QUIET + WORK, []),
        (LEVEL + WORK, []),
    ],
    ids=["none", "own", "own, set up later", "own, warnings only", "own level"],
)
def test_compilations_are_shown_once(script, starts):
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = [line for line in result.stderr.splitlines() if " double " in line]
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts))
