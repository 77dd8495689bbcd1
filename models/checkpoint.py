"""Converted checkpoints: parameters as Orbax stores them, already in our layout, beside a description and the tokenizer.

A restore reads every array straight to its place, on one device or on a mesh; nothing is transposed or fused again.
"""

import dataclasses
import json
from collections.abc import Iterator
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
    with _checkpointer() as checkpointer:
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
    arrays: dict[str, jax.Array] = {}
    with _checkpointer() as checkpointer:
        for part in _parts(_by_name(target)):
            restore_args = ocp.checkpoint_utils.construct_restore_args(part)
            arguments = ocp.args.PyTreeRestore(part, restore_args=restore_args, partial_restore=True)
            arrays |= checkpointer.restore(path.absolute() / _PARAMS, args=arguments)
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in _by_name(target)])


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly compress, and decompressing them would be most of the time of a restore.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False))


def _parts(named: dict[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Groups of at most a sixteenth of the parameters (or one): what is read together is in the host's memory together."""
    num_bytes = {name: leaf.size * leaf.dtype.itemsize for name, leaf in named.items()}
    limit, part = sum(num_bytes.values()) / 16, {}
    for name, leaf in named.items():
        if part and sum(num_bytes[held] for held in part) + num_bytes[name] > limit:
            yield part
            part = {}
        part[name] = leaf
    yield part


def _by_name(params: Params) -> dict[str, Any]:
    """Parameters by names such as "layers.0.qkv": the checkpoint does not depend on our classes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
