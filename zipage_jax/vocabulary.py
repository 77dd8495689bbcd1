"""What a request names must exist: its token ids in the vocabulary, a token that may be drawn, text for its stop strings."""

from collections.abc import Iterable

from zipage_jax.outputs import Request


def check_request(request: Request, vocab_size: int) -> None:
    """ValueError for a request that names what the model does not have, with the value, the limit and the fix."""
    params, sequence = request.params, request.sequences[0]
    _check_ids("the prompt", sequence.prompt_ids, vocab_size)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        _check_ids(name, getattr(params, name) or (), vocab_size)
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None and sequence.stop_ids.issuperset(allowed):
        raise ValueError(
            f"min_tokens={params.min_tokens} bans all of allowed_token_ids={list(allowed)}, because they would stop the "
            "request; allow another token or leave min_tokens out"
        )
    if params.stop_strings and request.tokenizer is None:
        raise ValueError(f"stop={params.stop!r} needs text, and the model has no tokenizer; use stop_token_ids")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{name} has token id {outside}, outside the vocabulary of {vocab_size}; use ids from 0 to {vocab_size - 1}"
        )
