"""Evaluations: `python -m zipage_jax.evals NAME [options]`, one module an evaluation; each prints one JSON object last."""
