"""Compressed PagedAttention in JAX: an inference engine under a fixed KV budget.

The names are loaded when they are first used, so that the scheduler and the configuration do not pull in a model.
"""

import importlib

_WHERE = {
    "LLM": "zipage_jax.llm",
    "SamplingParams": "zipage_jax.request",
    "RequestOutput": "zipage_jax.request",
    "RequestsFailed": "zipage_jax.request",
    "EngineConfig": "zipage_jax.config",
    "CompressionConfig": "zipage_jax.config",
}
__all__ = list(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'zipage_jax' has no attribute {name!r}; it has {sorted(_WHERE)}")
    return getattr(importlib.import_module(_WHERE[name]), name)
