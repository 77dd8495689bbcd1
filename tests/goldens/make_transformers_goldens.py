"""Writes transformers_tiny.npz: logits of Hugging Face's own models (transformers + torch) for the tiny checkpoints.

Run from the repository's root, in an environment of its own (torch is no dependency of this project):

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    /tmp/torch/bin/python -m tests.goldens.make_transformers_goldens
"""

import tempfile
from pathlib import Path

import numpy as np

from tests.reference import tiny_models

CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_rope": ("llama", {"rope_scaling": tiny_models.LLAMA3_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "rope_theta": 1e6}),
}
"""Name -> kind and changes to `tiny_models.config`. The weights are `tiny_models.tensors(config, seed=7)`."""
SEED = 7
TOKENS = np.random.default_rng(0).integers(0, 96, 40)
POSITIONS = np.arange(40) * 3  # past the original context of the llama3 case


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    goldens = {}
    for name, (kind, changes) in CASES.items():
        config = tiny_models.config(kind, **changes)
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_models.write(Path(folder), config, tiny_models.tensors(config, SEED))
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor(TOKENS[None]),
                position_ids=torch.tensor(POSITIONS[None]),
                # Without a mask, gaps between positions would be taken for borders between packed sequences.
                attention_mask=torch.ones((1, len(TOKENS)), dtype=torch.long),
                use_cache=False,
            )
        goldens[name] = output.logits[0].numpy()
    np.savez_compressed(Path(__file__).with_name("transformers_tiny.npz"), **goldens)


if __name__ == "__main__":
    main()
