"""The memory plan of a model and a budget on a named GPU, with and without compression. Needs neither the GPU nor weights."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from rich.console import Group
from rich.table import Table

import models
from pallas_kernels.dispatch import KERNEL_CAPABILITY
from zipage_jax.buckets import choose_buckets
from zipage_jax.build import DEVICE_RESERVE, activation_bytes, model_len, plan_for_device, workspace_bytes
from zipage_jax.config import EngineConfig
from zipage_jax.memory_plan import MemoryPlan

LENGTHS = (1_024, 4_096, 16_384)
"""Tokens (prompt + output) of requests whose concurrency is shown, besides the longest."""


@dataclass(frozen=True)
class Gpu:
    """Bytes of memory and major compute capability."""

    memory_bytes: float
    capability: int


# Memory as NVIDIA's data sheets state it, in decimal gigabytes. Drivers report up to 7 % more, so that a plan made here is on
# the safe side of the one that the engine makes on the device.
GPUS = {
    "a100": Gpu(80e9, 8),
    "a100-40": Gpu(40e9, 8),
    "b200": Gpu(180e9, 10),
    "h100": Gpu(80e9, 9),
    "h100-nvl": Gpu(94e9, 9),
    "h200": Gpu(141e9, 9),
    "l4": Gpu(24e9, 8),
    "l40s": Gpu(48e9, 8),
    "rtx-4090": Gpu(24e9, 8),
}


@dataclass(frozen=True)
class Explanation:
    """The plan of one configuration, and the bytes that are not the cache's."""

    config: EngineConfig
    memory: MemoryPlan
    weight_bytes: int
    activation_bytes: int
    workspace_bytes: int
    max_model_len: int

    def pages_of(self, num_tokens: int) -> int:
        """Most pages that a request of `num_tokens` holds."""
        pages = -(-num_tokens // self.config.page_size)
        return pages if self.config.compression is None else min(pages, self.config.compression.max_pages)

    def concurrency(self, num_tokens: int) -> int:
        """Requests of `num_tokens` that run to their end side by side: by pages, by query slots if they compress, by seats."""
        pages = -(-num_tokens // self.config.page_size)
        limits = [self.config.max_num_seqs, (self.memory.num_pages - 1) // self.pages_of(num_tokens)]
        if self.pages_of(num_tokens) < pages:
            limits.append(self.memory.num_slots)
        return min(limits)


def explain(model: str, config: EngineConfig, gpu: str) -> Group:
    """The plans as a table to print: `config`, and the same without compression.

    ValueError for an unknown GPU, or one that cannot hold one request.
    """
    plans = {"full KV": make_plan(model, dataclasses.replace(config, compression=None), gpu)}
    if config.compression is not None:
        plans = {f"budget of {config.compression.budget_pages} pages": make_plan(model, config, gpu)} | plans
    first = next(iter(plans.values()))
    table = Table("", *plans, box=None)
    rows = {
        "activations": lambda plan: _gib(plan.activation_bytes),
        "compression workspace": lambda plan: _gib(plan.workspace_bytes),
        "pages and query slots": lambda plan: _gib(plan.memory.total_bytes),
        f"pages of {config.page_size} entries": lambda plan: f"{plan.memory.num_pages - 1:,}",
        "bytes a page": lambda plan: f"{plan.memory.page_bytes / 2**20:.2f} MiB",
        "query slots": lambda plan: f"{plan.memory.num_slots or '–'}",
    }
    lengths = sorted({length for length in LENGTHS if length < first.max_model_len} | {first.max_model_len})
    for length in lengths:
        rows[f"requests of {length:,} tokens at once"] = lambda plan, length=length: (
            f"{plan.concurrency(length):,} ({plan.pages_of(length)} pages each)"
        )
    for name, show in rows.items():
        table.add_row(name, *map(show, plans.values()))
    share = config.gpu_memory_utilization
    return Group(
        f"{model} on {gpu}: {GPUS[gpu].memory_bytes / 1e9:.0f} GB, of which {share:.0%} are used; weights "
        f"{_gib(first.weight_bytes)}, at most {config.max_num_seqs} requests at once (max_num_seqs)",
        table,
    )


def make_plan(model: str, config: EngineConfig, gpu: str) -> Explanation:
    """What `build_engine` would plan for a model on a GPU; "auto" is bfloat16."""
    if gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}; known: {', '.join(GPUS)}")
    device, shape = GPUS[gpu], models.describe(model)
    dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)
    gather = device.capability != KERNEL_CAPABILITY or dtype == jnp.float32
    max_model_len = model_len(shape, config)
    buckets = choose_buckets(config, max_model_len=max_model_len, gather=gather)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(models.abstract_params(shape, dtype)))
    free = int(device.memory_bytes * config.gpu_memory_utilization * (1 - DEVICE_RESERVE)) - weights
    return Explanation(
        config=config,
        memory=plan_for_device(shape, config, buckets, dtype.itemsize, free),
        weight_bytes=weights,
        activation_bytes=activation_bytes(shape, buckets, dtype.itemsize),
        workspace_bytes=workspace_bytes(shape, config, buckets, dtype.itemsize),
        max_model_len=max_model_len,
    )


def _gib(num: int) -> str:
    return f"{num / 2**30:.2f} GiB"
