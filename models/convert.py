"""`python -m models.convert SOURCE OUT`: writes a model as a checkpoint that `models.load` restores without converting again."""

from pathlib import Path
from typing import Literal

import tyro

from models import checkpoint
from models.loading import load


def convert(
    source: tyro.conf.Positional[str],
    out: tyro.conf.Positional[Path],
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
) -> None:
    """Converts a model.

    Args:
        source: a GGUF file, a Hugging Face directory or hub id, or "smollm2".
        out: directory to write, new or empty.
        dtype: what the parameters are stored in; a load may ask for another.
    """
    model = load(source, dtype)
    checkpoint.save(out, model.config, model.params, model.tokenizer, model.generation_config)
    print(f"wrote {model.config.architecture} ({dtype}) to {out}")


if __name__ == "__main__":
    tyro.cli(convert)
