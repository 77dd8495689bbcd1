"""Test setup: strict dtypes and ranks, deterministic Hypothesis, shape annotations checked at run time."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")  # none: processes side by side must not share half-written files

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "zipage",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("zipage")


def pytest_runtest_setup(item):
    """Asking for tests marked `gpu` without a GPU is an error, not a skip: the default run leaves them out."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.fail("this test needs a GPU, and jax found none", pytrace=False)
