"""Seats: what each running request has on the device beside its pages, and the arrays that penalties and biases need.

Arrays of vocabulary width exist only once a request needs them: a seat of a 152k vocabulary takes 1.4 MB.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from zipage_jax.request import SamplingParams, Sequence
from zipage_jax.state import SeatState


def needs_seat_arrays(params: SamplingParams) -> bool:
    """Whether drawing this request's tokens needs its counts or a bias."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.min_tokens
    )


def new_seats(num_seats: int) -> SeatState:
    """`num_seats` seats and the padding seat, without arrays."""
    return SeatState(last_token=jnp.zeros(num_seats + 1, jnp.int32))


def with_seat_arrays(seats: SeatState, vocab_size: int) -> SeatState:
    """The same seats with zero counts and no bias. Requests already seated need none of them."""
    shape = (seats.last_token.shape[0], vocab_size)
    return dataclasses.replace(
        seats,
        output_counts=jnp.zeros(shape, jnp.int32),
        prompt_mask=jnp.zeros(shape, bool),
        bias=jnp.zeros(shape, jnp.float32),
    )


def seat_arrays(seq: Sequence, num_outputs: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(output counts, prompt mask, bias) of a request that is about to draw output number `num_outputs`.

    The bias holds logit_bias, −inf for tokens that are not allowed and, before `min_tokens`, −inf for those that would stop.
    """
    counts = np.bincount(np.asarray(seq.output_ids[:num_outputs], np.int64), minlength=vocab_size).astype(np.int32)
    prompt_mask = np.zeros(vocab_size, bool)
    prompt_mask[np.asarray(seq.prompt_ids, np.int64)] = True
    return counts, prompt_mask, seat_bias(seq, num_outputs, vocab_size)


def seat_bias(seq: Sequence, num_outputs: int, vocab_size: int) -> np.ndarray:
    """What is added to the logits of output number `num_outputs`: float32 [vocab]."""
    params = seq.params
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0.0
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    if num_outputs < params.min_tokens:
        bias[list(seq.stop_ids)] = -np.inf
    return bias


def set_seat(seats: SeatState, seat, counts, prompt_mask, bias) -> SeatState:
    """`seats` with one seat's arrays replaced."""
    return dataclasses.replace(
        seats,
        output_counts=seats.output_counts.at[seat].set(counts),
        prompt_mask=seats.prompt_mask.at[seat].set(prompt_mask),
        bias=seats.bias.at[seat].set(bias),
    )


def set_bias(seats: SeatState, seat, bias) -> SeatState:
    """`seats` with one seat's bias replaced."""
    return dataclasses.replace(seats, bias=seats.bias.at[seat].set(bias))
