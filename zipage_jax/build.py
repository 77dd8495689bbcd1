"""From a loaded model and a configuration to an engine: limits, memory plan, buckets, runner, scheduler."""

import jax
from models import LoadedModel
from zipage_jax.buckets import choose_buckets
from zipage_jax.config import EngineConfig
from zipage_jax.engine import Engine
from zipage_jax.memory_plan import MemoryPlan
from zipage_jax.outputs import Outputs
from zipage_jax.runner import Runner
from zipage_jax.scheduler import Scheduler


def build_engine(loaded: LoadedModel, config: EngineConfig) -> Engine:
    model = loaded.config
    max_model_len = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    memory = MemoryPlan(config.num_pages or 1000, config.num_query_slots or 16)
    buckets = choose_buckets(config, max_model_len=max_model_len, gather=True)
    runner = Runner(loaded, config, memory, buckets)
    scheduler = Scheduler(
        config, num_pages=memory.num_pages, num_slots=memory.num_slots, num_layers=model.num_layers, max_model_len=max_model_len
    )
    return Engine(runner, scheduler, Outputs(loaded.tokenizer))
