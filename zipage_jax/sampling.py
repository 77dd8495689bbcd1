"""Logits -> tokens and log probabilities, on the device, in few passes over the logits and without a sort of the vocabulary.

The order is vLLM's: logit_bias, allowed tokens and the ban of `min_tokens` (all in `bias`), penalties, temperature, min_p,
top_k, top_p, draw. A temperature below 1e-5 is greedy: the exact argmax, the lowest id among equals. Each filter keeps the
tokens above a threshold, so tokens of equal logit are kept or dropped together:

* min_p keeps probabilities ≥ min_p · the largest; top_k keeps logits ≥ the k-th largest;
* top_p keeps a token iff less than top_p of the mass left by the other two lies strictly above it: the token that crosses
  top_p is kept. (vLLM cuts among tokens that tie exactly there; here all of them stay.)

How a token is drawn: first its chunk of 64 tokens, then the token in it, each by a race of exponential clocks (the Gumbel
trick) with random words keyed by (seed, position). A chunk's mass is a sum of integers, so it is exact in any order, and a
draw depends on (seed, position, logits) alone: not on the row, the batch size or the way a device adds. The price is an
error of about 2⁻²⁴ of a chunk's likeliest token in a token's probability. Source: ours; it reads the logits twice and needs
1/64 of the random words of a race between all tokens.

top_k's threshold is found among the chunks with the largest maxima, which hold it. top_p has no threshold at all: several
tokens are drawn, one pass measures the mass above each, and the first that is kept is the answer, which is distributed as if
drawn from the kept tokens only (rejection). Rows whose draws were all rejected go on above their best rejected token.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

CHUNK = 64
UNIT = 1 << 23
"""Fixed-point weight of a chunk's likeliest token; a chunk's sum stays below 2³¹."""
MAX_TOP_K = 128
"""Up to here top_k takes a threshold from candidates; a larger one costs a bisection of some 16 passes."""
DRAWS = 8
"""Tokens drawn at once for top_p: with top_p = 0.9, one row in 10⁸ needs another round."""
ROUNDS = 4
"""Rounds of draws, the last among the likeliest tokens only. Flat logits get there once in 10⁹ draws (top_p 0.3), 10⁵ (0.1)."""
GREEDY_BELOW = 1e-5
LARGEST = float(jnp.finfo(jnp.float32).max)


@struct.dataclass
class SamplingBatch:
    """How each row samples. `position` is that of the token to be drawn; `top_k` ≤ 0 keeps all tokens."""

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    presence_penalty: Float[Array, " rows"]
    frequency_penalty: Float[Array, " rows"]
    repetition_penalty: Float[Array, " rows"]
    seed: Int[Array, " rows"]
    position: Int[Array, " rows"]


def apply_penalties(
    logits: Float[Array, "rows vocab"],
    output_counts: Int[Array, "rows vocab"],
    prompt_mask: Bool[Array, "rows vocab"],
    bias: Float[Array, "rows vocab"],
    batch: SamplingBatch,
) -> Float[Array, "rows vocab"]:
    """Logits with bias, then repetition, frequency and presence penalties, as vLLM orders and defines them.

    `output_counts` counts generated tokens, `prompt_mask` marks those of the prompt (only the repetition penalty minds them);
    a bias of −inf bans a token.
    """
    repetition, frequency, presence = (
        penalty[:, None] for penalty in (batch.repetition_penalty, batch.frequency_penalty, batch.presence_penalty)
    )
    counts = output_counts.astype(jnp.float32)
    shaped = logits + bias
    repeated = jnp.where(shaped > 0, shaped / repetition, shaped * repetition)
    shaped = jnp.where((counts + prompt_mask.astype(jnp.float32)) > 0, repeated, shaped)
    return shaped - frequency * counts - presence * jnp.minimum(counts, 1.0)


def sample(logits: Float[Array, "rows vocab"], batch: SamplingBatch, *, filters: bool = True) -> Int[Array, " rows"]:
    """One token a row. `filters=False` is for batches in which no row uses top_k, top_p or min_p; it draws the same tokens.

    A row whose logits are all −inf draws token 0. +inf counts as the largest float.
    """
    row = _Rows(logits, batch)
    floor = jnp.where(row.greedy, row.top, -jnp.inf)
    if not filters:
        return row.draw(row.chunk_mass(floor), floor, range(1))[0][:, 0]
    floor = jnp.maximum(floor, row.top + jnp.log(batch.min_p) / row.rate)
    floor = jnp.maximum(floor, _top_k_threshold(row, batch.top_k))
    top_p = jnp.where(row.greedy, 1.0, batch.top_p)
    first_mass = row.chunk_mass(floor)
    allowed_mass = (top_p * row.total(first_mass[:, None])[:, 0])[:, None]

    def draw_round(number, floor, chunk_mass):
        """(first draw that top_p keeps, whether there is one, floor of the next round)."""
        tokens, values = row.draw(chunk_mass, floor, range(number * DRAWS, (number + 1) * DRAWS))
        surely = (top_p >= 1.0)[:, None] | ~(values < row.top[:, None])
        kept = lax.cond(jnp.all(surely), lambda: surely, lambda: surely | (row.mass_above(values) < allowed_mass))
        first = jnp.argmax(kept, axis=1)[:, None]
        above_best = jnp.nextafter(jnp.max(values, axis=1), jnp.inf)
        return jnp.take_along_axis(tokens, first, axis=1)[:, 0], jnp.any(kept, axis=1), above_best

    def another_round(number, state):
        token, done, floor = state
        floor = jnp.where(done | (number == ROUNDS - 1), row.top, floor)
        fresh = draw_round(number, floor, row.chunk_mass(floor))
        return jnp.where(done, token, fresh[0]), done | fresh[1], fresh[2]

    state = draw_round(0, floor, first_mass)
    for number in range(1, ROUNDS):
        # Conditionals, not a loop: they run inside a CUDA graph, where a loop would make the host wait for the device.
        state = lax.cond(jnp.all(state[1]), lambda s: s, functools.partial(another_round, number), state)
    return state[0]


class _Rows:
    """The logits of a batch, in chunks, and what drawing from them needs. Masses are relative to the row's likeliest token."""

    def __init__(self, logits: Float[Array, "rows vocab"], batch: SamplingBatch):
        self.logits = logits
        self.vocab_size = logits.shape[1]
        self.chunked = _chunked(logits)
        # The barrier makes the maximum of a row start from those of its chunks instead of reading the logits again.
        self.chunk_top = lax.optimization_barrier(jnp.max(self.chunked, axis=-1))
        self.top = jnp.minimum(jnp.max(self.chunk_top, axis=-1), LARGEST)
        self.greedy = batch.temperature < GREEDY_BELOW
        self.rate = jnp.where(self.greedy, 1.0, 1.0 / batch.temperature)
        self.keys = jax.vmap(_key_of)(batch.seed, batch.position)

    def chunk_mass(self, floor: Float[Array, " rows"]) -> Float[Array, "rows chunks"]:
        """Mass of each chunk's tokens whose logit is at least `floor`."""
        weights = jnp.where(self.chunked >= floor[:, None, None], self._weights(), 0)
        return self._scaled(jnp.sum(weights, axis=-1))

    def mass_above(self, bounds: Float[Array, "rows draws"]) -> Float[Array, "rows draws"]:
        """Mass of the tokens whose logit is strictly above each bound: one pass for all of them."""
        weights = self._weights()
        parts = [jnp.where(self.chunked > bounds[:, j, None, None], weights, 0) for j in range(bounds.shape[1])]
        return self.total(jnp.stack([self._scaled(x) for x in _sums(parts, (2,))], axis=1))

    def total(self, chunk_mass: Float[Array, "rows draws chunks"]) -> Float[Array, "rows draws"]:
        """Sums of masses, exact to 2⁻³⁰: an integer part of 2⁻¹² and a rest, so that the order does not matter."""
        high = jnp.floor(chunk_mass * 2.0**12)
        low = jnp.round((chunk_mass * 2.0**12 - high) * 2.0**18)
        high, low = (jnp.sum(x.astype(jnp.int32), axis=-1).astype(jnp.float32) for x in (high, low))
        return high * 2.0**-12 + low * 2.0**-30

    def draw(
        self, chunk_mass: Float[Array, "rows chunks"], floor: Float[Array, " rows"], draws: range
    ) -> tuple[Int[Array, "rows draws"], Float[Array, "rows draws"]]:
        """(tokens, their logits): draws number `draws` among the tokens that `chunk_mass` counted; greedy rows: the first one."""
        chunk = self._race(chunk_mass[:, None], draws, level=0)
        ids = chunk[:, :, None] * CHUNK + jnp.arange(CHUNK)[None, None]
        flat = jnp.minimum(ids, self.vocab_size - 1).reshape(ids.shape[0], -1)
        leaves = jnp.take_along_axis(self.logits, flat, axis=1).reshape(ids.shape)
        leaf_top = jnp.take_along_axis(self.chunk_top, chunk, axis=1)[:, :, None]
        can_be_drawn = (leaves >= floor[:, None, None]) & (ids < self.vocab_size)
        mass = jnp.where(can_be_drawn, _exp(leaves, leaf_top, self.rate[:, None, None]), 0.0)
        leaf = self._race(mass, draws, level=1)[:, :, None]
        return jnp.take_along_axis(ids, leaf, axis=2)[:, :, 0], jnp.take_along_axis(leaves, leaf, axis=2)[:, :, 0]

    def _race(self, mass: Float[Array, "rows draws nodes"], draws: range, level: int) -> Int[Array, "rows draws"]:
        """A node in proportion to its mass: whose exponential clock of that rate rings first. Greedy rows: the first with any."""
        words = self._words([2 * draw + level for draw in draws], mass.shape[-1])
        # −log1p(−u) of u in (0, 1) is exponential and keeps its precision where it matters, near 0. The largest words round to 1.
        uniform = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
        clock = -jnp.log1p(-uniform) / mass
        clock = jnp.where(self.greedy[:, None, None] & (mass > 0), 0.0, clock)
        return lax.argmin(clock, 2, jnp.int32)

    def _words(self, numbers: list[int], num: int) -> UInt[Array, "rows numbers num"]:
        """`num` random words a number, of the row's key and the number alone.

        A counter goes through two rounds of an integer hash ("lowbias32": xor-shifts by 16, 15 and 16, two multiplications), each
        keyed with half of the row's threefry key. Threefry for every word would take five times the instructions.
        """
        counters = jnp.asarray(numbers, jnp.uint32)[:, None] << 16 | jnp.arange(num, dtype=jnp.uint32)[None]
        x = counters[None] * jnp.uint32(0x9E3779B9)
        for half in (0, 1):
            x = x + self.keys[:, half, None, None]
            x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
            x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
            x = x ^ (x >> 16)
        return x

    def _weights(self) -> Int[Array, "rows chunks CHUNK"]:
        """Mass of each token relative to its chunk's likeliest, in units of 1/UNIT."""
        mass = _exp(self.chunked, self.chunk_top[:, :, None], self.rate[:, None, None])
        return jnp.round(mass * UNIT).astype(jnp.int32)

    def _scaled(self, weights: Int[Array, "rows chunks"]) -> Float[Array, "rows chunks"]:
        """Sums of `_weights`, as masses."""
        return weights.astype(jnp.float32) * (_exp(self.chunk_top, self.top[:, None], self.rate[:, None]) / UNIT)


def _chunked(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows chunks CHUNK"]:
    padding = -logits.shape[1] % CHUNK
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf) if padding else logits
    return padded.reshape(logits.shape[0], -1, CHUNK)


def _key_of(seed: Int[Array, ""], position: Int[Array, ""]) -> UInt[Array, "2"]:
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), position))


def _exp(x, top, rate):
    """exp((x − top) · rate), at most 1; 0 for x = −inf whatever `top`, 1 for x = +inf."""
    return jnp.minimum(jnp.exp((x - jnp.clip(top, -LARGEST, LARGEST)) * rate), 1.0)


def _sums(parts: list[Int[Array, "..."]], axes: tuple[int, ...]) -> list[Int[Array, "..."]]:
    """Sums over the same axes of several functions of one array, in one pass over it."""
    return lax.reduce(parts, [jnp.int32(0)] * len(parts), lambda a, b: [x + y for x, y in zip(a, b, strict=True)], axes)


def _top_k_threshold(row: _Rows, top_k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """The top_k-th largest logit of each row; −inf where top_k ≤ 0 or it is at least the vocabulary."""
    num = min(MAX_TOP_K, row.vocab_size)
    active = (top_k > 0) & (top_k < row.vocab_size)
    # At most k − 1 chunks have a maximum above the k-th largest logit, so the k best chunks hold the k largest.
    _, chunks = lax.top_k(row.chunk_top, min(num, row.chunk_top.shape[1]), is_stable=False)
    candidates = jnp.take_along_axis(row.chunked, chunks[:, :, None], axis=1).reshape(chunks.shape[0], -1)
    best, _ = lax.top_k(candidates, num, is_stable=False)
    threshold = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, num - 1)[:, None], axis=1)[:, 0]
    if row.vocab_size > MAX_TOP_K:
        many = active & (top_k > MAX_TOP_K)
        bisected = lax.cond(jnp.any(many), lambda: _bisect_top_k(row, top_k), lambda: threshold)
        threshold = jnp.where(many, bisected, threshold)
    return jnp.where(active, threshold, -jnp.inf)


def _bisect_top_k(row: _Rows, top_k: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """The top_k-th largest logit, two bits at a time from the highest, over integers in the order of the floats."""
    sign = jnp.uint32(1 << 31)

    def as_float(order):
        order = jnp.maximum(order, jnp.uint32(0x007FFFFF))  # −inf; what lies below are NaNs
        return lax.bitcast_convert_type(jnp.where(order >= sign, order ^ sign, ~order), jnp.float32)

    found = jnp.zeros(top_k.shape, jnp.uint32)
    for shift in range(30, -1, -2):
        bounds = [as_float(found + jnp.uint32(digit << shift))[:, None, None] for digit in (1, 2, 3)]
        counts = _sums([(row.chunked >= bound).astype(jnp.int32) for bound in bounds], (1, 2))
        found = found + (sum((count >= top_k).astype(jnp.uint32) for count in counts) << shift)
    return as_float(found)


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"], num: int
) -> tuple[Float[Array, " rows"], Int[Array, " rows"], Int[Array, "rows num"], Float[Array, "rows num"]]:
    """(log probability, rank, ids of the `num` most likely, their log probabilities), in nats, of softmax(logits).

    Rank 1 is the most likely; tokens of equal logit share the better rank. Among equals the best list prefers lower ids.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    values, ids = _best(logits, num)
    return chosen[:, 0] - normaliser, rank, ids, values - normaliser[:, None]


def _best(logits: Float[Array, "rows vocab"], num: int) -> tuple[Float[Array, "rows num"], Int[Array, "rows num"]]:
    """The `num` largest logits and their ids, lower ids first among equals, from the `num` best chunks."""
    rows = logits.shape[0]
    if num == 0:
        return jnp.zeros((rows, 0), jnp.float32), jnp.zeros((rows, 0), jnp.int32)
    chunked = _chunked(logits)
    _, chunks = lax.top_k(jnp.max(chunked, axis=-1), min(num, chunked.shape[1]))
    chunks = jnp.sort(chunks, axis=-1)
    candidates = jnp.take_along_axis(chunked, chunks[:, :, None], axis=1).reshape(rows, -1)
    values, places = lax.top_k(candidates, num)
    ids = jnp.take_along_axis(chunks, places // CHUNK, axis=1) * CHUNK + places % CHUNK
    return values, ids


def prompt_logprobs(
    hidden: Float[Array, "tokens hidden"],
    next_tokens: Int[Array, " tokens"],
    logits_of: Callable[[Float[Array, "block hidden"]], Float[Array, "block vocab"]],
    num: int,
    *,
    block: int = 256,
) -> tuple[Float[Array, " tokens"], Int[Array, " tokens"], Int[Array, "tokens num"], Float[Array, "tokens num"]]:
    """`token_logprobs` of each token's successor, `block` tokens at a time: the logits of a whole prompt never exist at once."""
    num_tokens = hidden.shape[0]
    block = min(block, num_tokens)
    padding = -num_tokens % block
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
    next_tokens = jnp.pad(next_tokens, (0, padding)).reshape(-1, block)
    blocks = lax.map(lambda x: token_logprobs(logits_of(x[0]), x[1], num), (hidden, next_tokens))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], blocks)
