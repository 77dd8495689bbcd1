"""From a loaded model and a configuration to an engine: limits, memory plan, buckets, runner, scheduler."""

import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from models import LoadedModel, ModelConfig
from pallas_kernels.dispatch import default_implementation
from zipage_jax import compression, memory_plan
from zipage_jax.buckets import Buckets, choose_buckets
from zipage_jax.config import EngineConfig
from zipage_jax.engine import Engine
from zipage_jax.memory_plan import MemoryPlan
from zipage_jax.outputs import Outputs
from zipage_jax.runner import Runner
from zipage_jax.scheduler import Scheduler

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30
"""Bytes for pages where the device does not say what it has."""
DEVICE_RESERVE = 0.02
"""Share of the device's memory left to fragmentation and to what libraries take."""


def build_engine(loaded: LoadedModel, config: EngineConfig) -> Engine:
    """An engine for `loaded`; ValueError if its limits or its memory cannot hold one request."""
    model, device = loaded.config, jax.devices()[0]
    max_model_len = model_len(model, config)
    gather = default_implementation("paged_attention") == "xla" or loaded.params.embedding.dtype == jnp.float32
    buckets = choose_buckets(config, max_model_len=max_model_len, gather=gather)
    itemsize = loaded.params.embedding.dtype.itemsize
    memory = plan_for_device(model, config, buckets, itemsize, free_bytes(device))
    log.info("%s", describe(model, config, memory, max_model_len))
    runner = Runner(loaded, config, memory, buckets)
    if not gather:
        seconds = runner.warm_up()
        log.info("compiled %d executables in %.1f s", runner.programs.num_compiled, seconds)
    scheduler = Scheduler(
        config,
        num_pages=memory.num_pages,
        num_slots=memory.num_slots,
        num_layers=model.num_layers,
        max_model_len=max_model_len,
    )
    return Engine(runner, scheduler, Outputs(loaded.tokenizer))


def model_len(model: ModelConfig, config: EngineConfig) -> int:
    """Longest prompt + output: the configured one, never more positions than the model was made for."""
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len} exceeds the model's {limit} positions; use at most {limit}"
        )
    return config.max_model_len or limit


def plan_for_device(
    model: ModelConfig, config: EngineConfig, buckets: Buckets, itemsize: int, free: int | None
) -> MemoryPlan:
    """Pages and slots: as configured, or what `free` bytes hold beside activations and the compression workspace."""
    settings = config.compression
    shape = {
        "num_layers": model.num_layers,
        "page_size": config.page_size,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "itemsize": itemsize,
    }
    if settings is None:
        page = memory_plan.page_bytes(**shape)
        return memory_plan.plan_memory(
            available_bytes(model, config, buckets, itemsize, free),
            page_bytes=page,
            max_num_seqs=config.max_num_seqs,
            num_pages=config.num_pages,
        )
    return memory_plan.plan_memory(
        available_bytes(model, config, buckets, itemsize, free),
        page_bytes=memory_plan.page_bytes(
            **shape,
            score_itemsize=4 if settings.policy.keeps_history else 0,
            position_itemsize=4 if settings.record_evictions else 0,
        ),
        slot_bytes=memory_plan.slot_bytes(
            num_layers=model.num_layers,
            window=settings.window,
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            itemsize=itemsize,
        ),
        max_pages=settings.max_pages,
        max_num_seqs=config.max_num_seqs,
        num_pages=config.num_pages,
        num_slots=config.num_query_slots,
    )


def available_bytes(
    model: ModelConfig, config: EngineConfig, buckets: Buckets, itemsize: int, free: int | None
) -> int | None:
    """Bytes for pages and query slots, or None if only `num_pages` limits them."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if free is None:
        return CPU_CACHE_BYTES if config.num_pages is None else None
    return free - activation_bytes(model, buckets, itemsize) - workspace_bytes(model, config, buckets, itemsize)


def activation_bytes(model: ModelConfig, buckets: Buckets, itemsize: int) -> int:
    """Temporaries of the largest step: the MLP of the largest prefill, and logits in float32 with what sampling makes of them."""
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    token = (3 * model.intermediate_size + 4 * model.hidden_size + attention) * itemsize
    rows = max(buckets.decode_rows[-1], buckets.prefill_rows[-1])
    return buckets.prefill_tokens[-1] * token + 4 * rows * model.vocab_size * 4


def workspace_bytes(model: ModelConfig, config: EngineConfig, buckets: Buckets, itemsize: int) -> int:
    """Temporaries of one slice of a compression to the engine's own budget; 0 without compression."""
    if config.compression is None:
        return 0
    return compression.workspace_bytes(
        config.compression,
        rows=buckets.compress_rows[-1],
        pages=buckets.compress_pages[-1],
        target_pages=config.compression.budget_pages,
        num_layers=config.compression.slice_layers(model.num_layers),
        page_size=config.page_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        itemsize=itemsize,
    )


def reserve_device_memory(utilization: float) -> None:
    """Let jax take this share of the GPU's memory. Without effect once jax has started its GPU back end, or if the user chose."""
    if not any(name in os.environ for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(utilization)


def keep_compiled_programs() -> None:
    """Let jax keep executables under ~/.cache/zipage-jax, so that the next start need not compile them again.

    Only where the user chose no folder (JAX_COMPILATION_CACHE_DIR; an empty one keeps nothing).
    """
    if jax.config.jax_compilation_cache_dir is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "zipage-jax" / "programs"))


def free_bytes(device: jax.Device) -> int | None:
    """Bytes that `device` still has for us, or None if it does not say (a CPU)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"] * (1 - DEVICE_RESERVE)) - stats["bytes_in_use"]


def describe(model: ModelConfig, config: EngineConfig, memory: MemoryPlan, max_model_len: int) -> str:
    """The start-up line: pages, slots, N_max, policy."""
    settings = config.compression
    if settings is None:
        return f"{memory}; full KV, at most {max_model_len} tokens a request, {config.max_num_seqs} seats"
    return (
        f"{memory}; N_max {settings.max_pages} pages of {config.page_size} entries, budget "
        f"{settings.budget_pages * config.page_size}, window {settings.window}, {settings.policy}"
    )


def resolve_dtype(name: str) -> jnp.dtype:
    """The dtype of `name`; "auto" is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        name = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    return jnp.dtype(name)
