"""The three pure functions that the runner compiles. Nothing here knows requests, buckets or devices.

`cache` and `seats` are donated: a step returns them changed, in place.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import models
from models import ModelConfig
from zipage_jax.attention import decode_attend, prefill_attend
from zipage_jax.compression import compress_layers
from zipage_jax.config import CompressionConfig
from zipage_jax.sampling import SamplingBatch, apply_penalties, prompt_logprobs, sample, token_logprobs
from zipage_jax.state import CacheState, CompressBatch, Logprobs, PrefillBatch, RowBatch, SeatState, StepOutput


@dataclass(frozen=True)
class StepOptions:
    """What an executable computes beside tokens; each combination is an executable of its own.

    Attributes:
        filters: a row uses top_k, top_p or min_p.
        logprobs: best tokens whose log probabilities are returned; None returns none.
        prompt_logprobs: the same for every prompt token of a prefill.
    """

    filters: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def decode_step(
    params,
    cache: CacheState,
    seats: SeatState,
    rows: RowBatch,
    *,
    model: ModelConfig,
    options: StepOptions,
    implementation: str | None = None,
) -> tuple[CacheState, SeatState, StepOutput]:
    """One token a row: its input is the row's last token, taken from its seat."""
    tokens = seats.last_token[rows.ints("seat")]
    attend = decode_attend(rows, implementation=implementation)
    hidden, cache = models.forward(params, model, tokens, rows.ints("position"), cache, attend)
    seats, output = _draw(params, seats, rows, hidden, model, options)
    return cache, seats, output


def prefill_step(
    params,
    cache: CacheState,
    seats: SeatState,
    batch: PrefillBatch,
    *,
    model: ModelConfig,
    options: StepOptions,
    implementation: str | None = None,
) -> tuple[CacheState, SeatState, StepOutput]:
    """New tokens of several rows; each row's last token draws the next one (kept by rows that have a seat)."""
    tokens = batch.column("token")
    attend = prefill_attend(batch, implementation=implementation)
    hidden, cache = models.forward(params, model, tokens, batch.column("position"), cache, attend)
    last = jnp.maximum(batch.query_start[1:] - 1, 0)
    seats, output = _draw(params, seats, batch.rows, hidden[last], model, options)
    if options.prompt_logprobs is not None:
        given = prompt_logprobs(
            hidden,
            jnp.roll(tokens, -1),
            lambda h: models.logits(params, model, h),
            options.prompt_logprobs,
        )
        output = dataclasses.replace(output, prompt_logprobs=Logprobs(*given))
    return cache, seats, output


def compress_step(
    cache: CacheState, batch: CompressBatch, layer_start: jax.Array, *, config: CompressionConfig, num_layers: int
) -> CacheState:
    """Layers layer_start : layer_start + num_layers of the batch's requests, compressed into their target pages."""
    return compress_layers(cache, batch, config, layer_start=layer_start, num_layers=num_layers)


def _draw(params, seats: SeatState, rows: RowBatch, hidden, model: ModelConfig, options: StepOptions):
    logits = models.logits(params, model, hidden)
    seat = rows.ints("seat")
    batch = SamplingBatch(
        position=rows.ints("position") + 1,
        seed=rows.ints("seed"),
        top_k=rows.ints("top_k"),
        **{name: rows.floats(name) for name in ("temperature", "top_p", "min_p", *PENALTIES)},
    )
    shaped = logits
    if seats.output_counts is not None:
        shaped = apply_penalties(logits, seats.output_counts[seat], seats.prompt_mask[seat], seats.bias[seat], batch)
    tokens = sample(shaped, batch, filters=options.filters)
    seats = dataclasses.replace(seats, last_token=seats.last_token.at[seat].set(tokens))
    if seats.output_counts is not None:
        seats = dataclasses.replace(seats, output_counts=seats.output_counts.at[seat, tokens].add(1))
    logprobs = None
    if options.logprobs is not None:
        logprobs = Logprobs(*token_logprobs(logits, tokens, options.logprobs))
    return seats, StepOutput(tokens=tokens, logprobs=logprobs)


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
