"""Converted checkpoints: parameters as Orbax stores them, already in our layout, beside a description and the tokenizer.

A restore reads every array straight to its place, on one device or on a mesh; nothing is transposed or fused again.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.common import Params
from models.config import ModelConfig, RopeConfig
from models.registry import abstract_params

DESCRIPTION = "zipage_model.json"
"""The file that marks a directory as a converted checkpoint; written last, so that an unfinished one is none."""
TOKENIZER = "tokenizer"
_PARAMS = "params"
_FORMAT = 1
"""Counts up when the layout of a parameter changes."""


def save(
    path: Path, config: ModelConfig, params: Params, tokenizer: Any | None, generation_config: dict[str, Any]
) -> None:
    """Writes a checkpoint into `path`, which must be new or empty.

    Raises:
        FileExistsError: `path` holds something.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty directory")
    path.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute() / _PARAMS, _by_name(params))
    if tokenizer is not None:
        tokenizer.save_pretrained(path / TOKENIZER)
    description = {
        "format": _FORMAT,
        "config": dataclasses.asdict(config),
        "generation_config": generation_config,
    }
    (path / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")


def describe(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The configuration and the generation defaults of a checkpoint.

    Raises:
        ValueError: another format, or a description that cannot be read.
    """
    try:
        description = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        if description["format"] != _FORMAT:
            raise ValueError(f"format {description['format']}, known: {_FORMAT}; convert the model again")
        fields = dict(description["config"])
        rope = dict(fields.pop("rope"))
        divisors = rope.pop("divisors")
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        rope = RopeConfig(divisors=None if divisors is None else tuple(divisors), **rope)
        return ModelConfig(rope=rope, **fields), description["generation_config"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / DESCRIPTION} cannot be read: {error}") from error


def restore(path: Path, config: ModelConfig, dtype: Any, shardings: Params | None = None) -> Params:
    """The parameters, cast to `dtype` on the way, on `shardings` or on the default device."""
    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: here, abstract_params(config, dtype))
    target = abstract_params(config, dtype, shardings)
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(path.absolute() / _PARAMS, _by_name(target))
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in _by_name(target)])


def _by_name(params: Params) -> dict[str, Any]:
    """Parameters by names such as "layers.0.qkv": the checkpoint does not depend on our classes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
