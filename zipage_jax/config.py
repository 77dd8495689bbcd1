"""Configuration of the engine: frozen dataclasses, checked when they are built.

They are passed explicitly and read by name; an unknown keyword is a TypeError that lists the known ones (`from_options`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from zipage_jax.scoring import PRESETS, ScoringPolicy, resolve_policy


@dataclass(frozen=True)
class CompressionConfig:
    """What a request keeps when it compresses.

    A compressed request holds `budget_pages · page_size` entries after a compression and at most one page more before the
    next (N_max = budget_pages + 1). Source: arXiv 2603.08743, sec. 4.1.

    Attributes:
        budget_pages: pages kept by a compression.
        window: tokens at the end of the last page whose queries score the cache; they are always kept.
        policy: a preset's name (`zipage_jax.scoring.PRESETS`) or a `ScoringPolicy`.
        sink_len: first entries of the sequence that are always kept.
        layer_stride: most layers that one slice of a compression processes (a divisor of the model's layers is taken).
        max_rows: requests that one compression job holds; the others wait their turn.
        compress_during_prefill: compress long prompts chunk by chunk instead of once they are complete.
        record_evictions: keep, per layer and head, which token positions are alive (for notebooks; costs memory).
    """

    budget_pages: int
    window: int = 16
    policy: str | ScoringPolicy = "zipage"
    sink_len: int = 0
    layer_stride: int = 8
    max_rows: int = 8
    compress_during_prefill: bool = False
    record_evictions: bool = False

    def __post_init__(self):
        for name, least in (("budget_pages", 1), ("window", 1), ("sink_len", 0), ("layer_stride", 1), ("max_rows", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        for name in ("compress_during_prefill", "record_evictions"):
            _check_flag(name, getattr(self, name))
        object.__setattr__(self, "policy", resolve_policy(self.policy))

    def __repr__(self) -> str:
        return changed_fields(self)

    @property
    def max_pages(self) -> int:
        """N_max: pages a compressed request holds at most."""
        return self.budget_pages + 1

    def slice_layers(self, num_layers: int) -> int:
        """Layers of one slice: the largest divisor of `num_layers` up to `layer_stride`, so that all slices are alike."""
        return max(n for n in range(1, min(self.layer_stride, num_layers) + 1) if num_layers % n == 0)

    def check(self, page_size: int) -> None:
        """Raise ValueError when the window or the budget does not fit pages of `page_size` entries."""
        if self.window > page_size:
            raise ValueError(f"window={self.window} is longer than a page; use at most page_size={page_size}")
        if self.window + self.sink_len > self.budget_pages * page_size:
            raise ValueError(
                f"budget_pages={self.budget_pages} keeps {self.budget_pages * page_size} entries, fewer than "
                f"window + sink_len = {self.window + self.sink_len}; raise budget_pages or lower them"
            )


@dataclass(frozen=True)
class EngineConfig:
    """What the engine runs and how much memory and how many rows it may use.

    Attributes:
        dtype: of weights and cache; "auto" is bfloat16 on a GPU and float32 on a CPU.
        page_size: entries a page holds.
        num_pages: pages of the pool, the null page included; None derives it from the memory at hand.
        kv_cache_bytes: bytes for pages and query slots; None derives it from `gpu_memory_utilization`.
        gpu_memory_utilization: share of the device's memory that weights, cache and activations may take.
        max_num_seqs: seats: requests that run at once.
        max_num_batched_tokens: tokens of one prefill chunk; decode never waits for more.
        max_model_len: longest prompt + output; None takes the model's own limit.
        num_query_slots: requests that may store window queries; None derives it (SPEC: M).
        scheduling: "hybrid" admits requests without a query slot, "constrained" at most M requests.
        enable_prefix_caching: share the full pages of equal prefixes.
        async_compression: let the others decode on while a request compresses, slice by slice of layers.
        batch_invariant: a request's tokens do not depend, bit for bit, on its neighbours (one bucket, one prompt a prefill).
        compression: None is full KV.
    """

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    page_size: int = 256
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    num_query_slots: int | None = None
    scheduling: Literal["hybrid", "constrained"] = "hybrid"
    enable_prefix_caching: bool = True
    async_compression: bool = True
    batch_invariant: bool = False
    seed: int = 0
    compression: CompressionConfig | None = None

    def __post_init__(self):
        for name in ("page_size", "max_num_seqs", "max_num_batched_tokens"):
            _check_positive(name, getattr(self, name))
        for name in ("num_pages", "kv_cache_bytes", "max_model_len", "num_query_slots"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in ("enable_prefix_caching", "async_compression", "batch_invariant"):
            _check_flag(name, getattr(self, name))
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0.0 < share <= 1.0:
            raise ValueError(f"gpu_memory_utilization={share!r} must be a number in (0, 1]")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed={self.seed!r} must be an integer")
        if self.max_num_batched_tokens < self.page_size:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below page_size={self.page_size}; "
                "a prefill chunk must hold at least one page"
            )
        _check_choice("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _check_choice("scheduling", self.scheduling, ("hybrid", "constrained"))
        if self.compression is not None and not isinstance(self.compression, CompressionConfig):
            raise TypeError(
                f"compression={self.compression!r} must be None or a CompressionConfig, like "
                "CompressionConfig(budget_pages=4)"
            )
        if self.compression is not None and not self.compression.policy.evicts:
            object.__setattr__(self, "compression", None)
        if self.compression is not None:
            self.compression.check(self.page_size)

    def __repr__(self) -> str:
        return changed_fields(self)


def changed_fields(config: Any) -> str:
    """A configuration as it could be written: the fields that differ from their defaults, policies by their preset's name."""

    def shown(value: Any) -> str:
        return repr(next((name for name, policy in PRESETS.items() if policy == value), value))

    fields = ((f, shown(getattr(config, f.name))) for f in dataclasses.fields(config))
    changed = (f"{f.name}={text}" for f, text in fields if text != repr(f.default))
    return f"{type(config).__name__}({', '.join(changed)})"


def from_options(cls: type, options: dict[str, Any]):
    """`cls(**options)`, or a TypeError that names the unknown options and the known ones."""
    known = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"unknown option(s) {unknown}; known: {known}")
    return cls(**options)


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {list(choices)}")
