"""From a checkpoint's tensors to parameters on the device, one parameter at a time.

The host never holds more than the sources of one parameter besides what the device (on a CPU: the same memory) already has.
"""

from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.common import Params
from models.config import ModelConfig
from models.registry import param_weights
from models.weights import Weight, build

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorSource(Protocol):
    """A checkpoint: tensors by their Hugging Face names."""

    path: Path

    @property
    def names(self) -> Set[str]:
        """Names of all tensors."""

    def read(self, name: str) -> np.ndarray:
        """One tensor, on the host."""


def assemble(source: TensorSource, config: ModelConfig, dtype: Any, shardings: Params | None = None) -> Params:
    """The parameters of `config` from a checkpoint's tensors, each used exactly once, cast to `dtype` on the device.

    A tied model may store its head all the same, if it equals the embedding.

    Raises:
        ValueError: tensors are missing, unexpected or of the wrong shape; they are named.
    """
    leaves, structure = jax.tree.flatten(param_weights(config))
    wanted = {name for weight in leaves for name, _ in weight.tensors}
    if missing := sorted(wanted - source.names):
        raise ValueError(f"{source.path} lacks {len(missing)} tensor(s): {_listed(missing)}")
    unexpected = source.names - wanted
    if config.tie_word_embeddings and _HEAD in unexpected:
        if not np.array_equal(source.read(_HEAD), source.read(_EMBEDDING)):
            raise ValueError(f"{source.path}: {_HEAD} differs from {_EMBEDDING}, but tie_word_embeddings is true")
        unexpected = unexpected - {_HEAD}
    if unexpected:
        raise ValueError(f"{source.path} has {len(unexpected)} unexpected tensor(s): {_listed(sorted(unexpected))}")
    places = [None] * len(leaves) if shardings is None else structure.flatten_up_to(shardings)
    parameters: list[Any] = [None] * len(leaves)
    # The largest first: what is still on the host then comes on top of as little as possible.
    for index in sorted(range(len(leaves)), key=lambda index: -np.prod(leaves[index].shape)):
        parameters[index] = _parameter(source, leaves[index], jnp.dtype(dtype), places[index])
    return jax.tree.unflatten(structure, parameters)


def _parameter(
    source: TensorSource, weight: Weight, dtype: jnp.dtype, sharding: jax.sharding.NamedSharding | None
) -> jax.Array:
    # On a mesh the sources pass through every device whole: simple, and even the largest is a small part of the memory.
    whole = None if sharding is None else jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    tensors = []
    for name, shape in weight.tensors:
        tensor = source.read(name)
        if tensor.shape != shape:
            raise ValueError(f"{source.path}: {name} has shape {tensor.shape}; the configuration says {shape}")
        tensors.append(jax.device_put(tensor, whole))
    parameter = build(weight.arrange, weight.shape, dtype, *tensors)
    if sharding is not None:
        parameter = jax.device_put(parameter, sharding)
    # Dispatch is asynchronous: without waiting, the sources of many parameters would be alive together.
    return parameter.block_until_ready()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
