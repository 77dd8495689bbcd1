"""From a loaded model and a configuration to an engine: limits, memory plan, buckets, runner, scheduler."""
