"""LLM: prompts in, texts out. Tokenising, request bookkeeping, progress; the engine does the rest."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from tqdm.auto import tqdm

import models
from zipage_jax.build import build_engine, keep_compiled_programs, reserve_device_memory, resolve_dtype
from zipage_jax.chat import render_chat
from zipage_jax.config import EngineConfig, from_options
from zipage_jax.outputs import Request
from zipage_jax.request import RequestOutput, SamplingParams, Sequence

log = logging.getLogger(__name__)

Prompt = str | dict[str, Any] | Seq[int]
"""A text, `{"prompt_token_ids": [...]}`, `{"prompt": text}`, or token ids."""


class LLM:
    """A model, its tokenizer and an engine. Names follow vLLM's `LLM`.

    Args:
        model: "smollm2", a local Hugging Face directory, a hub id, a GGUF file, an Orbax checkpoint of `models.convert`, or,
            with `random_weights`, the name of a shape (`models.SHAPES`).
        random_weights: draw weights on the device instead of loading them; the model then has no tokenizer.
        options: fields of `EngineConfig`; an unknown one is a TypeError.

    Use it as a context manager, or call `close`, to hand the device memory back.
    """

    def __init__(self, model: str = "smollm2", *, random_weights: bool = False, **options: Any):
        config: EngineConfig = from_options(EngineConfig, options)
        reserve_device_memory(config.gpu_memory_utilization)
        keep_compiled_programs()
        dtype = resolve_dtype(config.dtype)
        loaded = models.random_model(model, dtype, config.seed) if random_weights else models.load(model, dtype)
        self.model_name, self.config = model, config
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.config
        self.stop_ids = tuple(loaded.config.eos_token_ids)
        self.engine = build_engine(loaded, config)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Outputs in the order of `prompts`; all are checked before any runs.

        Raises:
            ValueError: a prompt that is empty, too long or holds ids outside the vocabulary, naming which.
        """
        requests = self.submit(prompts, sampling_params)
        try:
            self._run(requests, use_tqdm)
            return [request.output() for request in requests]
        finally:
            self.forget(requests)

    def chat(
        self,
        messages: Seq[dict[str, Any]] | Seq[Seq[dict[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` on one conversation or a list of them, rendered with the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            {
                "prompt_token_ids": render_chat(
                    self.get_tokenizer(), conversation, add_generation_prompt, chat_template_kwargs or {}
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yield a request's output so far whenever it grew; the last one of each has `finished=True`.

        Closing the generator aborts what is unfinished.
        """
        requests = self.submit(prompts, sampling_params)
        try:
            while any(not request.finished for request in requests):
                for request_id in {seq.request_id for seq in self.engine.step()}:
                    yield self.engine.outputs[request_id].output()
        finally:
            self.forget(requests)

    def get_tokenizer(self):
        """The tokenizer (Hugging Face's interface); ValueError for a model that has none."""
        if self.tokenizer is None:
            raise ValueError(f"model {self.model_name!r} has no tokenizer; pass prompt_token_ids")
        return self.tokenizer

    @property
    def metrics(self):
        """Totals and recent steps of the engine."""
        return self.engine.metrics

    def close(self) -> None:
        """Hand the device memory back. The LLM cannot be used afterwards."""
        self.engine.close()
        self.engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.model_name!r}, {self.engine.runner.memory if self.engine else 'closed'})"

    def submit(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Request]:
        """Queue prompts without running them; step `engine` to run, then `forget` them. All are checked, or none is queued."""
        if self.engine is None:
            raise ValueError("this LLM is closed; build a new one")
        prompts = _as_list(prompts)
        params = _as_params(sampling_params, len(prompts))
        requests = [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
        added = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request)
        except ValueError as error:
            self.forget(added)
            raise ValueError(f"prompt {len(added)}: {error}") from None
        return requests

    def _request(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
        try:
            ids = self._token_ids(prompt)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
        index = next(self._ids)
        request_id = str(index)
        seed = self.config.seed * 1_000_003 + index if params.seed is None else params.seed
        sequences = [
            Sequence(
                request_id=request_id,
                index=sample,
                prompt_ids=ids,
                params=params,
                seed=(seed + sample * 7919) & 0x7FFFFFFF,
                eos_ids=self.stop_ids,
            )
            for sample in range(params.n)
        ]
        return Request(request_id, text, sequences, self.tokenizer)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, dict):
            unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
            if unknown:
                raise ValueError(f"unknown key(s) {unknown}; known: ['prompt', 'prompt_token_ids']")
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", "")
        ids = self.get_tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else [int(i) for i in prompt]
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        vocab_size = self.model_config.vocab_size
        outside = next((i for i in ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise ValueError(f"token id {outside} is outside the vocabulary of {vocab_size}")
        return ids

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        num_prompt_tokens = sum(len(request.sequences[0].prompt_ids) for request in requests)
        with tqdm(total=len(requests), desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            tokens, done = 0, 0
            while any(not request.finished for request in requests[done:]):
                tokens += len(self.engine.step())
                finished = sum(request.finished for request in requests)
                if finished > bar.n or tokens % 64 == 0:
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"in {num_prompt_tokens / elapsed:.0f} tok/s, out {tokens / elapsed:.0f} tok/s")
                bar.update(finished - bar.n)

    def forget(self, requests: list[Request]) -> None:
        """Let go of submitted requests; what is unfinished (an interrupted call) is aborted and its pages are freed."""
        for request in requests:
            if not request.finished:
                self.engine.abort(request.request_id)
        self.engine.drain()
        for request in requests:
            self.engine.outputs.remove(request.request_id)


def _as_list(prompts) -> list[Prompt]:
    single = isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)


def _as_params(params, num: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num
    if len(params) != num:
        raise ValueError(f"{len(params)} sampling_params for {num} prompts; give one, or one each")
    return list(params)
