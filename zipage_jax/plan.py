"""What a step is to do: `Plan` and its parts, as the scheduler hands them to the engine.

A step executes its plan in the order compress, prefill, decode; pages that one part frees may be written by the next. The
engine reads the sequences right after `plan()`, when their state already includes the step:

* prefill: the chunk's tokens go to entries cache_len − length … cache_len − 1 of `page_ids` (entry e is page e // page_size,
  offset e % page_size) and have positions start … start + length − 1; `position` is the last one's. `query_slot` is the slot
  for all tokens of the chunk.
* decode: one token, at entry cache_len − 1 and position `position`; it attends to all `cache_len` entries.
* compress: `page_ids` is the old table until the plan with the last slice of layers, then the new one (targets, then the page
  for further decoding); source and target pages are the job's own. A sequence may compress, be prefilled and decode in one
  step, in that order.
"""

from dataclasses import dataclass, field

from zipage_jax.request import Sequence


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens all_ids[start : start + length] of `seq`; `samples`: the last one's logits give the next token."""

    seq: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class CompressJob:
    """One slice of one sequence's compression: layers[0] ≤ layer < layers[1]. All jobs of a plan have the same layers.

    Every source page is full. `target_page_ids` (budget_pages of them) may be source pages of this job, never of another.
    `history_len` entries at the front have a global score from the compression before (0: first compression).
    """

    seq: Sequence
    source_page_ids: tuple[int, ...]
    target_page_ids: tuple[int, ...]
    budget_pages: int
    history_len: int
    layers: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `empty`: nothing to do until a plan that is in flight is committed, or until a request is added."""

    compress: tuple[CompressJob, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[Sequence, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.compress or self.prefill or self.decode)


@dataclass(slots=True)
class Counters:
    """Totals of a scheduler. `prompt_tokens` counts what was admitted, preempted requests again; `cached_tokens` of them
    came from the prefix cache."""

    admissions: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    compressions: int = 0
    shared_compressions: int = 0
    all_shared_compressions: int = 0
    suspensions: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the admitted tokens that the prefix cache had."""
        return self.cached_tokens / max(1, self.prompt_tokens)
