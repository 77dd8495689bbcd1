"""The architectures, and what follows from a model file's description of its parameters.

To add a model: write its file (`Layer`, `layer_weights`, `forward`), add a line to MODELS and one to
`models.config.ARCHITECTURES`.
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from models import llama, qwen2, qwen3, weights
from models.common import Attend, Params
from models.config import ModelConfig

MODELS: dict[str, ModuleType] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
"""Architecture -> model file."""

INIT_STD = 0.02


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    cache: Any,
    attend: Attend,
) -> tuple[Float[Array, "tokens hidden"], Any]:
    """Hidden states (for `logits`) and the cache, by the model file of `config.architecture`."""
    return MODELS[config.architecture].forward(params, config, tokens, positions, cache, attend)


def param_weights(config: ModelConfig) -> Params:
    """The parameters as a tree of `Weight`s: what each is and what a checkpoint calls it."""
    layer_weights = MODELS[config.architecture].layer_weights
    table = functools.partial(weights.table, rows=config.vocab_size, columns=config.hidden_size)
    return Params(
        embedding=table("model.embed_tokens.weight"),
        layers=tuple(layer_weights(config, f"model.layers.{index}.") for index in range(config.num_layers)),
        norm=weights.vector("model.norm.weight", config.hidden_size),
        head=None if config.tie_word_embeddings else table("lm_head.weight", shard_axis=0),
    )


def abstract_params(config: ModelConfig, dtype: Any, shardings: Params | None = None) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s, for memory plans and for compiling without weights."""
    spec = param_weights(config)
    if shardings is None:
        return jax.tree.map(lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype)), spec)
    return jax.tree.map(
        lambda weight, sharding: jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype), sharding=sharding),
        spec,
        shardings,
    )


def param_shardings(config: ModelConfig, mesh: Mesh, axis: str) -> Params:
    """Shardings for tensor parallelism over a mesh axis: kv-head groups, MLP columns, the head's vocabulary.

    Raises:
        ValueError: the number of devices along `axis` does not divide a sharded axis (kv heads, say).
    """

    def sharding(weight: weights.Weight) -> NamedSharding:
        if weight.shard_axis is None:
            return NamedSharding(mesh, PartitionSpec())
        if weight.shape[weight.shard_axis] % mesh.shape[axis]:
            names = ", ".join(name for name, _ in weight.tensors)
            raise ValueError(
                f"{names}: axis {weight.shard_axis} of {weight.shape} does not split over {mesh.shape[axis]} devices"
            )
        return NamedSharding(mesh, PartitionSpec(*(None,) * weight.shard_axis, axis))

    return jax.tree.map(sharding, param_weights(config))


def random_params(config: ModelConfig, dtype: Any, seed: int = 0, shardings: Params | None = None) -> Params:
    """Random weights (normal, standard deviation 0.02; norms 1), made on the device without a copy on the host."""
    spec = param_weights(config)

    def draw(part: Any, part_shardings: Any) -> Any:
        leaves, structure = jax.tree.flatten(part)

        @functools.partial(jax.jit, out_shardings=part_shardings)
        def drawn(key: Array) -> Any:
            keys = jax.random.split(key, len(leaves))
            arrays = [_random_weight(weight, key, jnp.dtype(dtype)) for weight, key in zip(leaves, keys, strict=True)]
            return jax.tree.unflatten(structure, arrays)

        return drawn

    keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    around = spec.replace(layers=())
    layer_shardings = None if shardings is None else shardings.layers[0]
    # One program makes every layer: the layers differ only in their keys.
    draw_layer = draw(spec.layers[0], layer_shardings)
    layers = tuple(draw_layer(key) for key in keys[1:])
    params = draw(around, None if shardings is None else shardings.replace(layers=()))(keys[0])
    return params.replace(layers=layers)


def _random_weight(weight: weights.Weight, key: Array, dtype: jnp.dtype) -> Array:
    if weight.init == "one":
        return jnp.ones(weight.shape, dtype)
    return jax.random.normal(key, weight.shape, dtype) * INIT_STD
