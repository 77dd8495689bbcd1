"""Language models as pure functions on parameter trees, and loaders for them. Knows nothing of pages or engines.

model = models.load("smollm2", "float32")
hidden, cache = models.forward(model.params, model.config, tokens, positions, cache, attend)
logits = models.logits(model.params, model.config, hidden)
"""

from models.common import Attend, Params, logits
from models.config import ModelConfig, RopeConfig
from models.loading import LoadedModel, describe, load, random_model
from models.registry import MODELS, abstract_params, forward, param_shardings, random_params
from models.shapes import SHAPES

__all__ = [
    "MODELS",
    "SHAPES",
    "Attend",
    "LoadedModel",
    "ModelConfig",
    "Params",
    "RopeConfig",
    "abstract_params",
    "describe",
    "forward",
    "load",
    "logits",
    "param_shardings",
    "random_model",
    "random_params",
]
