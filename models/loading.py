"""Loading a model from whatever holds one: a GGUF file, a Hugging Face directory or hub id, a converted checkpoint.

Tensors go to the device a parameter at a time, so the host never holds more than the sources of the largest one besides
what the device (on a CPU: the same memory) already has.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.common import Params
from models.config import ModelConfig
from models.registry import param_weights, random_params
from models.shapes import shape
from models.weights import Weight, build


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `tokenizer` is a Hugging Face tokenizer, or None for random weights."""

    config: ModelConfig
    params: Params
    tokenizer: Any | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)


class TensorSource(Protocol):
    """A checkpoint: tensors by their Hugging Face names."""

    path: Path

    @property
    def names(self) -> Set[str]:
        """Names of all tensors."""

    def read(self, name: str) -> np.ndarray:
        """One tensor, on the host."""


def load(source: str | Path, dtype: Any = "bfloat16", *, shardings: Params | None = None) -> LoadedModel:
    """The model that `source` names: "smollm2" or a GGUF file.

    `shardings` (see `models.param_shardings`) places the parameters on a mesh; None: on the default device.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: something is there but it is not a model that we can run; the message names what is wrong.
    """
    from models.gguf_file import GgufFile, default_model_path
    from models.tokenizer import from_gguf

    path = default_model_path() if source == "smollm2" else Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no model at {path}")
    file = GgufFile(path)
    params = assemble(file, file.config, dtype, shardings)
    return LoadedModel(file.config, params, from_gguf(file))


def random_model(
    model: str | ModelConfig, dtype: Any = "bfloat16", seed: int = 0, *, shardings: Params | None = None
) -> LoadedModel:
    """A model with random weights of a named shape (`models.SHAPES`) or of a configuration; it has no tokenizer."""
    config = shape(model) if isinstance(model, str) else model
    return LoadedModel(config, random_params(config, dtype, seed, shardings))


def assemble(source: TensorSource, config: ModelConfig, dtype: Any, shardings: Params | None = None) -> Params:
    """The parameters of `config` from a checkpoint's tensors, each used exactly once, cast to `dtype` on the device.

    Raises:
        ValueError: tensors are missing, unexpected or of the wrong shape; all are named.
    """
    spec = param_weights(config)
    leaves, structure = jax.tree.flatten(spec)
    wanted = {name for weight in leaves for name, _ in weight.tensors}
    if missing := sorted(wanted - source.names):
        raise ValueError(f"{source.path} lacks {len(missing)} tensor(s): {_listed(missing)}")
    if unexpected := sorted(source.names - wanted):
        raise ValueError(f"{source.path} has {len(unexpected)} unexpected tensor(s): {_listed(unexpected)}")
    places = [None] * len(leaves) if shardings is None else structure.flatten_up_to(shardings)
    arrays = [_parameter(source, weight, jnp.dtype(dtype), place) for weight, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def _parameter(
    source: TensorSource, weight: Weight, dtype: jnp.dtype, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    # On a mesh the sources pass through every device whole: simple, and the largest is a small part of the memory.
    everywhere = None
    if sharding is not None:
        everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    tensors = []
    for name, tensor_shape in weight.tensors:
        tensor = source.read(name)
        if tensor.shape != tensor_shape:
            raise ValueError(f"{source.path}: {name} has shape {tensor.shape}, config.json says {tensor_shape}")
        tensors.append(jax.device_put(tensor, everywhere))
    parameter = build(weight.arrange, weight.shape, dtype, *tensors)
    if sharding is not None:
        parameter = jax.device_put(parameter, sharding)
    # Waiting keeps one parameter's sources in memory, not all of them.
    return parameter.block_until_ready()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
