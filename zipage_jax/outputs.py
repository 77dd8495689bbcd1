"""Tokens -> text and log probabilities, one builder a sample: detokenising, stop strings, what a RequestOutput shows."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from zipage_jax.request import CompletionOutput, Logprob, RequestOutput, Sequence
from zipage_jax.text import Detokenizer, StopMatcher


@dataclass(frozen=True)
class TokenLogprobs:
    """One row of `state.Logprobs` on the host."""

    chosen: float
    rank: int
    top_ids: np.ndarray
    top: np.ndarray

    @classmethod
    def of_row(cls, logprobs: Any, row: int) -> TokenLogprobs | None:
        if logprobs is None:
            return None
        return cls(float(logprobs.chosen[row]), int(logprobs.rank[row]), logprobs.top_ids[row], logprobs.top[row])

    def as_dict(self, token: int, num: int, tokenizer) -> dict[int, Logprob]:
        """The token's own and the `num` best, by id."""

        def decode(token_id: int) -> str | None:
            return None if tokenizer is None else tokenizer.decode([token_id])

        found = {token: Logprob(self.chosen, self.rank, decode(token))}
        for rank, (token_id, value) in enumerate(zip(self.top_ids[:num], self.top[:num], strict=True), start=1):
            found.setdefault(int(token_id), Logprob(float(value), rank, decode(int(token_id))))
        return found


class SampleOutput:
    """Text, token ids and log probabilities of one sample as they grow."""

    def __init__(self, seq: Sequence, tokenizer):
        self.seq, self.tokenizer = seq, tokenizer
        params = seq.params
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params.skip_special_tokens)
        self._flushed = False
        self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)

    def push(self, token: int, logprobs: TokenLogprobs | None) -> str | None:
        """Add a token; returns the stop string that it completed, if any."""
        if self.logprobs is not None:
            self.logprobs.append(logprobs.as_dict(token, self.seq.params.logprobs, self.tokenizer))
            self.cumulative_logprob += logprobs.chosen
        if self._detokenizer is None:
            return None
        may_stop = len(self.seq.all_ids) >= self.seq.min_len
        text, matched = self._matcher.push(self._detokenizer.push(token), may_stop)
        self.text += text
        return matched

    def output(self) -> CompletionOutput:
        """What has been produced so far; once the sample has ended, with what was held back (half a stop string)."""
        seq = self.seq
        if seq.finished and not self._flushed:
            self._flush()
        return CompletionOutput(
            index=seq.index,
            text=self.text,
            token_ids=list(seq.output_ids),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=self.cumulative_logprob if self.logprobs is not None else None,
            stats=dataclasses.replace(seq.stats),
            error=seq.error,
        )

    def _flush(self) -> None:
        self._flushed = True
        if self._detokenizer is None or isinstance(self.seq.stop_reason, str):
            return
        text, _ = self._matcher.push(self._detokenizer.flush())
        self.text += text + self._matcher.flush()


class Outputs:
    """Requests that are running, by id: what the engine pushes tokens into and the LLM reads from."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Follow a request; ValueError if its id is in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use; give each request its own")
        self._requests[request.request_id] = request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]

    def push(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> str | None:
        """Add a token to its sample; returns the stop string that it completed, if any."""
        return self._requests[seq.request_id].samples[seq.index].push(token, logprobs)

    def push_prompt(self, seq: Sequence, start: int, length: int, first: int, logprobs: Any) -> None:
        """Add log probabilities of prompt tokens start + 1 … start + length, rows first … of `logprobs`."""
        self._requests[seq.request_id].push_prompt(start, length, first, logprobs)


class Request:
    """One request as its user sees it: the prompt and its samples."""

    def __init__(self, request_id: str, prompt: str | None, sequences: list[Sequence], tokenizer):
        self.request_id, self.prompt, self.tokenizer = request_id, prompt, tokenizer
        self.sequences = sequences
        self.samples = [SampleOutput(seq, tokenizer) for seq in sequences]
        self.params = sequences[0].params
        self.queued_at = time.perf_counter()
        # The first token has no log probability: nothing comes before it.
        self._prompt_logprobs: dict[int, dict[int, Logprob] | None] = {0: None}

    @property
    def finished(self) -> bool:
        return all(seq.finished for seq in self.sequences)

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far, by all samples."""
        return sum(len(seq.all_ids) - seq.num_prompt for seq in self.sequences)

    def push_prompt(self, start: int, length: int, first: int, logprobs: Any) -> None:
        num, ids = self.params.prompt_logprobs, self.sequences[0].prompt_ids
        if num is None:
            return
        for i in range(min(length, len(ids) - 1 - start)):
            position = start + i + 1
            row = TokenLogprobs.of_row(logprobs, first + i)
            self._prompt_logprobs[position] = row.as_dict(ids[position], num, self.tokenizer)

    def output(self) -> RequestOutput:
        """What has been produced so far."""
        prompt_ids = self.sequences[0].prompt_ids
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [self._prompt_logprobs.get(i) for i in range(len(prompt_ids))]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(prompt_ids),
            outputs=[sample.output() for sample in self.samples],
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
        )
