"""The time that a step cannot beat: its bytes at the memory's speed or its products at the tensor cores', whichever is longer.

Compression, sampling and the host count as free. Source: ours; the ceilings are measured (benchmarks/README.md).
"""

from dataclasses import dataclass

import jax

from models import ModelConfig

READ_BYTES_PER_S = {"NVIDIA H200": 4.49e12}
BF16_FLOP_PER_S = {"NVIDIA H200": 664e12}


@dataclass(frozen=True)
class Roofline:
    """Floors of one model on one device.

    Attributes:
        weight_bytes: read by every program: all parameters but the embedding table.
        entry_bytes: K and V of one token in all layers.
        flop_per_token: of the weight products.
        flop_per_pair: of attention, for one (query, entry) pair in all layers and heads.
    """

    weight_bytes: int
    entry_bytes: int
    flop_per_token: float
    flop_per_pair: float
    bytes_per_s: float
    flop_per_s: float

    @classmethod
    def of(cls, config: ModelConfig, params, cache_itemsize: int, device: jax.Device) -> "Roofline | None":
        """Floors on `device`, or None where its ceilings are not known."""
        if device.device_kind not in READ_BYTES_PER_S:
            return None
        total = sum(leaf.size for leaf in jax.tree.leaves(params))
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        itemsize = jax.tree.leaves(params)[0].dtype.itemsize
        return cls(
            weight_bytes=(total - embedding) * itemsize,
            entry_bytes=2 * config.num_layers * config.num_kv_heads * config.head_dim * cache_itemsize,
            flop_per_token=2.0 * (total - embedding),
            flop_per_pair=4.0 * config.num_layers * config.num_heads * config.head_dim,
            bytes_per_s=READ_BYTES_PER_S[device.device_kind],
            flop_per_s=BF16_FLOP_PER_S[device.device_kind],
        )

    def decode_s(self, rows: int, entries: int) -> float:
        """Seconds of a decode step of `rows` rows that read `entries` entries in total."""
        if not rows:
            return 0.0
        moved = self.weight_bytes + entries * self.entry_bytes
        flop = rows * self.flop_per_token + entries * self.flop_per_pair
        return max(moved / self.bytes_per_s, flop / self.flop_per_s)

    def prefill_s(self, tokens: int) -> float:
        """Seconds of a prefill of `tokens` tokens (attention among them is left out)."""
        if not tokens:
            return 0.0
        return max(self.weight_bytes / self.bytes_per_s, tokens * self.flop_per_token / self.flop_per_s)
