"""One request: what its user asks for (`SamplingParams`), its state on the host (`Sequence`), what comes back (`RequestOutput`)."""

import enum
import functools
import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are drawn and when it stops; names and defaults follow vLLM.

    `temperature=0` is the exact argmax. `seed` fixes what is drawn: the key of a token is fold_in(seed, position), so
    neighbours, rows and buckets do not change it; None takes a seed from the engine's. `max_tokens=None` goes on until
    max_model_len. `kv_budget` is this request's own budget: None takes the engine's, an int counts entries (rounded up to
    pages), a float in (0, 1] is a share of prompt + max_tokens (of max_model_len where that is None), `"full"` never
    compresses. Keys of `logit_bias` may be texts, as they are in JSON.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Seq[int] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    kv_budget: int | float | str | None = None

    def __post_init__(self):
        def check(ok: bool, name: str, want: str):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {want}")

        def is_int(name):
            value = getattr(self, name)
            return isinstance(value, int) and not isinstance(value, bool)

        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            check(_is_float32(value), name, "a finite number")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            check(isinstance(getattr(self, name), bool), name, "True or False")
        check(is_int("n") and 1 <= self.n <= MAX_SAMPLES, "n", f"an integer in [1, {MAX_SAMPLES}]")
        check(self.temperature >= 0, "temperature", "at least 0 (0 is greedy)")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(is_int("top_k") and -1 <= self.top_k < 2**31, "top_k", "in [1, 2**31), or 0 or -1 for all tokens")
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        check(0 < self.repetition_penalty <= 2, "repetition_penalty", "in (0, 2]")
        most = math.inf if self.max_tokens is None else self.max_tokens
        check(self.max_tokens is None or (is_int("max_tokens") and most >= 1), "max_tokens", "None or at least 1 token")
        check(is_int("min_tokens") and 0 <= self.min_tokens <= most, "min_tokens", "an integer in [0, max_tokens]")
        check(self.seed is None or is_int("seed"), "seed", "an integer or None")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(
                value is None or (is_int(name) and 0 <= value <= MAX_LOGPROBS), name, f"None or in [0, {MAX_LOGPROBS}]"
            )
        if self.stop is not None and not isinstance(self.stop, str):
            texts = isinstance(self.stop, Collection) and all(isinstance(s, str) for s in self.stop)
            check(texts, "stop", "a string or a list of strings")
        check("" not in self.stop_strings, "stop", "made of non-empty strings")
        for name in ("allowed_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if ids is not None:
                listed = isinstance(ids, Collection) and all(map(_is_token_id, ids))
                check(listed, name, "a list of token ids (integers from 0 on)")
                object.__setattr__(self, name, list(map(int, ids)))
        check(self.allowed_token_ids != [], "allowed_token_ids", "None (all tokens) or a list of at least one")
        if self.logit_bias is not None:
            check(isinstance(self.logit_bias, Mapping), "logit_bias", "a dict of token ids and biases")
            by_id = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in self.logit_bias.items()}
            check(all(map(_is_token_id, by_id)), "logit_bias", "a dict with token ids (integers from 0 on) as keys")
            check(all(map(_is_float32, by_id.values())), "logit_bias", "a dict with finite numbers as values")
            check(len(by_id) == len(self.logit_bias), "logit_bias", "a dict with every token id once")
            object.__setattr__(self, "logit_bias", by_id)
        budget = self.kv_budget
        if isinstance(budget, str):
            check(budget == "full", "kv_budget", 'None, "full", a number of entries or a share in (0, 1]')
        elif isinstance(budget, float):
            check(0 < budget <= 1, "kv_budget", "a share in (0, 1] when it is a float")
        elif budget is not None:
            check(is_int("kv_budget") and budget >= 1, "kv_budget", "at least 1 entry when it is an integer")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


MAX_LOGPROBS = 20
MAX_SAMPLES = 16384
LARGEST_FLOAT32 = 3.4e38
SHOWN_CHARACTERS = 60
"""Of a text in a repr."""


def _is_float32(value: Any) -> bool:
    """Whether the device, which calculates in float32, can hold `value`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT32


def _is_token_id(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Logprob:
    """Log probability of one token (nats, before temperature and penalties) and its rank (1 is the most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class RequestStats:
    """What happened to a sample's cache, and when. Entries are per layer and kv head.

    `first_token_s` and `finished_s` are seconds from when the request was queued until its first and its latest token.
    """

    num_compressions: int = 0
    entries_evicted: int = 0
    peak_pages: int = 0
    entries_held: int = 0
    length: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None

    def __repr__(self) -> str:
        """Counts that are 0 and times that are not known yet are left out."""
        known = {name: value for name, value in vars(self).items() if value}
        numbers = (
            f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}" for name, value in known.items()
        )
        return f"RequestStats({', '.join(numbers)})"


@dataclass
class CompletionOutput:
    """One sample. `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` the stop string or token id."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    error: str | None = None

    def __repr__(self) -> str:
        end = self.error or self.finish_reason or "unfinished"
        return f"CompletionOutput({self.index}: {_shortened(self.text)}, {len(self.token_ids)} tokens, {end})"


@dataclass
class RequestOutput:
    """All samples of one request, in the order of their index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"{_shortened(self.prompt)}, "
        return f"RequestOutput({self.request_id!r}, {prompt}{len(self.prompt_token_ids)} prompt tokens, {self.outputs})"


def _shortened(text: str) -> str:
    """`text` quoted, at most SHOWN_CHARACTERS of it."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…")


class RequestsFailed(RuntimeError):
    """Requests ended with an error; the step's own exception is the cause.

    `outputs` are those of the whole call: the others are complete, and a failed sample has what it generated before.
    """

    def __init__(self, outputs: list[RequestOutput]):
        self.outputs = outputs
        samples = [sample for output in outputs for sample in output.outputs]
        errors = [sample.error for sample in samples if sample.error is not None]
        super().__init__(f"{len(errors)} of {len(samples)} samples failed: {errors[0]}; `outputs` has the others")


class Status(enum.Enum):
    """Where a sequence stands. All but WAITING, DRAINING and FINISHED are running: they hold pages and a seat."""

    WAITING = "waiting"
    """Holds nothing; new, or preempted."""
    PREFILL = "prefill"
    """Has tokens left to prefill and the pages for its next chunk."""
    DECODE = "decode"
    """Takes part in every decode step."""
    SUSPENDED = "suspended"
    """Needs a query slot for its next token."""
    BLOCKED = "blocked"
    """Needs pages for its next token."""
    DUE = "due"
    """Must compress before its next token."""
    COMPRESSING = "compressing"
    """Its layers are being compressed, slice by slice."""
    DRAINING = "draining"
    """Its last token is on its way; it holds nothing any more."""
    FINISHED = "finished"


@functools.lru_cache(maxsize=1024)
def _stop_ids(stop_token_ids: tuple[int, ...], eos_ids: tuple[int, ...]) -> frozenset[int]:
    """One set for all sequences that stop alike: committing a step looks into every sequence's set."""
    return frozenset(stop_token_ids + eos_ids)


class Sequence:
    """Host state of one sample of a request. The scheduler alone changes it; compared and hashed by identity.

    `all_ids` are the prompt's tokens and the committed outputs; `num_tokens` counts the planned, uncommitted ones too.
    `page_ids` is the page table in time order and `cache_len` the entries in it, those that the current plan writes included;
    `num_evicted` true tokens before them are gone. `seat` and `query_slot` are -1 and 0 (NULL_SLOT) when it has none.
    """

    __slots__ = (
        "all_ids",
        "budget_pages",
        "cache_len",
        "chain",
        "compress_len",
        "error",
        "finish_reason",
        "index",
        "keys",
        "max_len",
        "min_len",
        "next_event",
        "num_evicted",
        "num_prompt",
        "num_registered",
        "num_tokens",
        "order",
        "page_ids",
        "params",
        "pending_ids",
        "prefill_len",
        "query_slot",
        "request_id",
        "reserve",
        "seat",
        "seed",
        "slot_pages",
        "stats",
        "status",
        "stop_ids",
        "stop_reason",
        "wants_slot",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: Seq[int],
        params: SamplingParams,
        *,
        index: int = 0,
        seed: int = 0,
        eos_ids: Iterable[int] = (),
    ):
        self.request_id, self.index, self.params, self.seed = request_id, index, params, seed
        self.all_ids: list[int] = list(prompt_ids)
        self.num_prompt = self.num_tokens = len(self.all_ids)
        self.stop_ids = _stop_ids(tuple(params.stop_token_ids or ()), () if params.ignore_eos else tuple(eos_ids))
        self.min_len = self.num_prompt + params.min_tokens
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.stats = RequestStats()
        # Set when it is added: tokens at which it ends, pages kept by a compression (None: full KV), whether it is to have a
        # query slot, the pages that a slot holder sets aside, and the entries at which it compresses next.
        self.max_len = 0
        self.budget_pages: int | None = None
        self.wants_slot = False
        self.slot_pages = 0
        self.compress_len = 0
        # Contents of its full pages as prefix-map keys, made as needed.
        self.keys: list[bytes] = []
        self.forget_cache()

    def forget_cache(self) -> None:
        """Forget everything that ends with a preemption."""
        self.page_ids: list[int] = []
        self.pending_ids: list[int] = []
        self.cache_len = 0
        self.num_evicted = 0
        self.seat = -1
        self.query_slot = 0
        self.order = -1
        self.reserve = 0
        self.next_event = 0
        self.num_registered = 0
        self.chain = 0
        # Tokens known when it was admitted: they are prefilled, the later ones decoded.
        self.prefill_len = 0

    @property
    def in_flight(self) -> int:
        """Outputs that were planned and are not yet committed."""
        return self.num_tokens - len(self.all_ids)

    @property
    def num_written(self) -> int:
        """True tokens whose K and V were computed, the current plan's included."""
        return self.cache_len + self.num_evicted

    @property
    def position(self) -> int:
        """True index of the last token that the current plan writes: its RoPE position."""
        return self.cache_len + self.num_evicted - 1

    @property
    def num_planned_outputs(self) -> int:
        """Index among the outputs of the newest planned one: how many were drawn before it."""
        return self.num_tokens - self.num_prompt - 1

    @property
    def prompt_ids(self) -> list[int]:
        return self.all_ids[: self.num_prompt]

    @property
    def output_ids(self) -> list[int]:
        return self.all_ids[self.num_prompt :]

    @property
    def compressed(self) -> bool:
        """Whether entries were evicted, or are being evicted: such a sequence cannot be prefilled again."""
        return self.num_evicted > 0 or self.status is Status.COMPRESSING

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}.{self.index} {self.status.value}, {self.num_prompt} prompt + "
            f"{self.num_tokens - self.num_prompt} output tokens, {self.cache_len} entries in {len(self.page_ids)} pages)"
        )
