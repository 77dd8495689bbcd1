"""Benchmarks: `python -m zipage_jax.bench NAME [options]`, one module a benchmark; each prints one JSON object last."""
