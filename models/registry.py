"""The architectures, and what follows from a model file's description of its parameters.

To add a model: write its file (`Layer`, `layer_weights`, `forward`), add a line to MODELS and one to
`models.config.ARCHITECTURES`.
"""

import functools
from collections.abc import Callable
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
    # XLA's own generator: it compiles in a third of the time of JAX's default, and nobody depends on the values.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), config.num_layers + 1)

    def draw(key: Array, part: Any, places: Any) -> Any:
        leaves, structure = jax.tree.flatten(part)
        places = None if places is None else tuple(structure.flatten_up_to(places))
        return jax.tree.unflatten(structure, _drawer(tuple(leaves), jnp.dtype(dtype), places)(key))

    # Drawn as if all were the first: layers differ in their keys only, so that one program makes them all.
    layer, layer_places = spec.layers[0], None if shardings is None else shardings.layers[0]
    layers = tuple(draw(key, layer, layer_places) for key in keys[1:])
    around = draw(keys[0], spec.replace(layers=()), None if shardings is None else shardings.replace(layers=()))
    return around.replace(layers=layers)


@functools.lru_cache(maxsize=8)
def _drawer(
    leaves: tuple[weights.Weight, ...], dtype: jnp.dtype, shardings: tuple[NamedSharding, ...] | None
) -> Callable[[Array], tuple[Array, ...]]:
    """A program that draws these parameters from a key."""

    def draw(weight: weights.Weight, key: Array) -> Array:
        if weight.init == "one":
            return jnp.ones(weight.shape, dtype)
        return jax.random.normal(key, weight.shape, dtype) * INIT_STD

    def drawn(key: Array) -> tuple[Array, ...]:
        keys = jax.random.split(key, len(leaves))
        return tuple(draw(weight, key) for weight, key in zip(leaves, keys, strict=True))

    return jax.jit(drawn, out_shardings=shardings)
