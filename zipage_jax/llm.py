"""LLM: prompts in, texts out. Tokenising, request bookkeeping, progress; the engine does the rest."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from tqdm.auto import tqdm

import models
from zipage_jax.build import build_engine, keep_compiled_programs, reserve_device_memory, resolve_dtype
from zipage_jax.chat import as_conversations, render_chat
from zipage_jax.config import EngineConfig, from_options
from zipage_jax.engine import Engine
from zipage_jax.exclusive import exclusive
from zipage_jax.logs import show_logs
from zipage_jax.metrics import Metrics
from zipage_jax.outputs import Request
from zipage_jax.prompts import as_list, prompt_text, token_ids
from zipage_jax.request import RequestOutput, RequestsFailed, SamplingParams, Sequence

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

    Use it as a context manager, or call `close`, to hand the device memory back. Threads may share it: a `generate` or
    `chat` runs alone, another one waits for it; streams advance side by side. After Ctrl-C it can be used on.
    """

    def __init__(self, model: str = "smollm2", *, random_weights: bool = False, **options: Any):
        config: EngineConfig = from_options(EngineConfig, options)
        show_logs()
        reserve_device_memory(config.gpu_memory_utilization)
        keep_compiled_programs()
        dtype = resolve_dtype(config.dtype)
        loaded = models.random_model(model, dtype, config.seed) if random_weights else models.load(model, dtype)
        self.model_name, self.config = model, config
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.config
        self.stop_ids = tuple(loaded.config.eos_token_ids)
        self._engine: Engine | None = build_engine(loaded, config)
        self._ids = itertools.count()
        self._lock = threading.RLock()

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
            TypeError: something that is no prompt.
            RequestsFailed: a step failed on the device and took requests with it that cannot be run again.
        """
        with self._lock, self._queued(prompts, sampling_params) as requests:
            self._run(requests, use_tqdm)
            outputs = [request.output() for request in requests]
            if any(sample.error is not None for output in outputs for sample in output.outputs):
                raise RequestsFailed(outputs) from self.engine.last_failure
            return outputs

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
        prompts = [
            {
                "prompt_token_ids": render_chat(
                    self.get_tokenizer(), conversation, add_generation_prompt, chat_template_kwargs or {}
                )
            }
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yield a request's output so far whenever it grew; the last one of each has `finished=True`.

        A sample that failed has finish_reason "error". Closing the generator aborts what is unfinished.
        """
        with self._queued(prompts, sampling_params) as requests:
            shown = dict.fromkeys(requests, 0)
            while shown:
                with exclusive(self._lock):
                    self.engine.step()
                    grown = [request for request in shown if request.finished or request.num_outputs > shown[request]]
                    outputs = [request.output() for request in grown]
                    shown |= {request: request.num_outputs for request in grown}
                    shown = {request: num for request, num in shown.items() if not request.finished}
                yield from outputs

    def get_tokenizer(self):
        """The tokenizer (Hugging Face's interface); ValueError for a model that has none."""
        if self.tokenizer is None:
            raise ValueError(f"model {self.model_name!r} has no tokenizer; pass prompt_token_ids")
        return self.tokenizer

    @property
    def engine(self) -> Engine:
        """What runs the requests; RuntimeError once the LLM is closed. Not for several threads."""
        if self._engine is None:
            raise RuntimeError(f"this LLM of {self.model_name!r} is closed; build a new one")
        return self._engine

    @property
    def metrics(self) -> Metrics:
        """Totals and recent steps of the engine."""
        return self.engine.metrics

    def close(self) -> None:
        """Hand the device memory back. The LLM cannot be used afterwards; closing it again does nothing."""
        with exclusive(self._lock):
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.model_name!r}, {self._engine.runner.memory if self._engine else 'closed'})"

    def submit(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Request]:
        """Queue prompts without running them; step `engine` to run, then `forget` them. All are checked, or none is queued."""
        engine = self.engine
        prompts = as_list(prompts)
        params = _as_params(sampling_params, len(prompts))
        requests = [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
        added = []
        try:
            for request in requests:
                engine.add(request)
                added.append(request)
        except ValueError as error:
            self.forget(added)
            raise ValueError(f"prompt {len(added)}: {error}") from None
        return requests

    def _request(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        try:
            ids = token_ids(prompt, self.get_tokenizer)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"prompt {number}: {error}") from None
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
        return Request(request_id, prompt_text(prompt), sequences, self.tokenizer)

    @contextlib.contextmanager
    def _queued(self, prompts, sampling_params) -> Iterator[list[Request]]:
        """Requests for `prompts`, queued; forgotten at the end, whatever happens."""
        requests: list[Request] = []
        try:
            with exclusive(self._lock):
                requests += self.submit(prompts, sampling_params)
            yield requests
        finally:
            with exclusive(self._lock):
                self.forget(requests)

    def _step(self) -> list[Sequence]:
        with exclusive(self._lock):
            return self.engine.step()

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        num_prompt_tokens = sum(len(request.sequences[0].prompt_ids) for request in requests)
        with tqdm(total=len(requests), desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            tokens = finished = 0
            while finished < len(requests):
                tokens += len(self._step())
                finished = sum(request.finished for request in requests)
                if finished > bar.n or tokens % 64 == 0:
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"in {num_prompt_tokens / elapsed:.0f} tok/s, out {tokens / elapsed:.0f} tok/s")
                bar.update(finished - bar.n)

    def forget(self, requests: list[Request]) -> None:
        """Let go of submitted requests; what is unfinished (an interrupted call) is aborted and its pages are freed."""
        if self._engine is None:
            return
        for request in requests:
            if not request.finished:
                self._engine.abort(request.request_id)
        self._engine.drain()
        for request in requests:
            self._engine.outputs.remove(request.request_id)


def _as_params(params: Any, num: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num
    if not isinstance(params, Seq) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"sampling_params={params!r} must be a SamplingParams, or a list of them, one for each prompt")
    if len(params) != num:
        raise ValueError(f"{len(params)} sampling_params for {num} prompts; give one, or one each")
    return list(params)
