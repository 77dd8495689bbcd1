"""Runner: the parameters, the only live cache, and the compiled steps. Runs a plan and returns at once.

The host fetches the tokens a step later (`StepResult.fetch`); until then nothing waits for the device.
"""

import itertools
import logging
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from models import LoadedModel, ModelConfig
from zipage_jax.batches import compress_batch, decode_batch, prefill_batch
from zipage_jax.buckets import Buckets, bucket
from zipage_jax.config import EngineConfig
from zipage_jax.memory_plan import MemoryPlan
from zipage_jax.programs import Program, Programs
from zipage_jax.request import MAX_LOGPROBS, Sequence
from zipage_jax.scheduler import CompressJob, Plan, PrefillChunk
from zipage_jax.seats import needs_seat_arrays, new_seats, seat_arrays, seat_bias, set_bias, set_seat, with_seat_arrays
from zipage_jax.state import CacheState, StepOutput
from zipage_jax.steps import StepOptions, compress_step, decode_step, prefill_step

log = logging.getLogger(__name__)

SET_SEAT = Program(set_seat, donated=("seats",), fixed=("seat",))
SET_BIAS = Program(set_bias, donated=("seats",), fixed=("seat",))


@dataclass
class StepResult:
    """Outputs of one step, in the order of its plan: device arrays, or NumPy arrays once fetched."""

    prefill: list[tuple[list[PrefillChunk], StepOutput]] = field(default_factory=list)
    decode: StepOutput | None = None

    def fetch(self) -> "StepResult":
        """The same with NumPy arrays: waits for the step, and raises what went wrong in it."""
        chunks = [chunks for chunks, _ in self.prefill]
        outputs, decode = jax.device_get(([output for _, output in self.prefill], self.decode))
        return StepResult(prefill=list(zip(chunks, outputs, strict=True)), decode=decode)

    def start_copy(self) -> None:
        """Begin copying the outputs to the host."""
        for leaf in jax.tree.leaves(([output for _, output in self.prefill], self.decode)):
            leaf.copy_to_host_async()


class Runner:
    """Owns parameters, cache and seats on the device.

    `dispatch` donates cache and seats to a step and keeps what comes back, so nobody else may hold them.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, memory: MemoryPlan, buckets: Buckets):
        self.params, self.model = model.params, model.config
        self.config, self.memory, self.buckets = config, memory, buckets
        self.programs = Programs(jax.default_backend())
        self.reset()

    def reset(self) -> None:
        """A new, zeroed cache and empty seats; whatever was cached is lost."""
        self.cache = None  # free the old pool before the new one is made
        self.cache = new_cache(self.model, self.config, self.memory, self.params.embedding.dtype)
        self.seats = new_seats(self.config.max_num_seqs)
        # Seats whose arrays are those of a request that needed them: the next one in such a seat gets its own.
        self._filled: set[int] = set()

    def close(self) -> None:
        """Free the cache, the seats, the parameters and the executables."""
        self.cache = self.seats = self.params = None
        self.programs = Programs(jax.default_backend())

    def dispatch(self, plan: Plan) -> StepResult:
        """Enqueue the plan's compressions, prefills and decode, in this order."""
        result = StepResult()
        for jobs in _groups(plan.compress, self.config):
            self._compress(jobs)
        for chunks in self._prefill_groups(plan.prefill):
            result.prefill.append((chunks, self._prefill(chunks)))
        if plan.decode:
            result.decode = self._decode(list(plan.decode))
        result.start_copy()
        return result

    def warm_up(self) -> float:
        """Compile every bucket that plain requests can meet; returns the seconds it took."""
        return self.programs.warm_up(self.warm_up_work())

    def warm_up_work(self) -> list[tuple[Program, tuple]]:
        """Programs and arguments of those buckets: no row asks for filters, penalties or log probabilities."""
        options = StepOptions()
        b = self.buckets
        work = []
        for rows, pages in itertools.product(b.decode_rows, b.table_pages):
            batch = decode_batch([], num_rows=rows, max_pages=pages, padding_seat=self.padding_seat)
            work.append(self._step(decode_step, batch, options))
        for tokens in b.prefill_tokens:
            batch = self._prefill_arrays([], tokens, b.prefill_rows[-1], b.prefill_pages[-1])
            work.append(self._step(prefill_step, batch, options))
        if self.config.compression is not None:
            for rows in b.compress_rows:
                batch = self._compress_arrays([], rows, b.compress_pages[0])
                work += [self._slice(batch, span) for span in _slices(0, self.model.num_layers, self.stride)]
        return work

    @property
    def padding_seat(self) -> int:
        return self.config.max_num_seqs

    @property
    def stride(self) -> int:
        """Layers that one compression program processes."""
        return self.config.compression.slice_layers(self.model.num_layers)

    def _step(self, function, batch, options: StepOptions) -> tuple[Program, tuple]:
        program = Program(
            function,
            donated=("cache", "seats"),
            fixed=("params", "cache"),
            statics=(("model", self.model), ("options", options)),
        )
        return program, (self.params, self.cache, self.seats, batch)

    def _run(self, function, batch, options: StepOptions) -> StepOutput:
        program, args = self._step(function, batch, options)
        self.cache, self.seats, output = self.programs.run(program, *args)
        return output

    def _decode(self, sequences: list[Sequence]) -> StepOutput:
        for seq in sequences:
            if seq.params.min_tokens and seq.num_planned_outputs == seq.params.min_tokens:
                bias = seat_bias(seq, seq.num_planned_outputs, self.model.vocab_size)
                self.seats = self.programs.run(SET_BIAS, self.seats, np.int32(seq.seat), bias)
        batch = decode_batch(
            sequences,
            num_rows=bucket(len(sequences), self.buckets.decode_rows),
            max_pages=self._table_pages(sequences, self.buckets.table_pages),
            padding_seat=self.padding_seat,
        )
        return self._run(decode_step, batch, _options(sequences))

    def _prefill(self, chunks: list[PrefillChunk]) -> StepOutput:
        sequences = [chunk.seq for chunk in chunks]
        for chunk in chunks:
            needed = needs_seat_arrays(chunk.seq.params)
            if chunk.samples and (needed or chunk.seq.seat in self._filled):
                self._fill_seat(chunk.seq)
                (self._filled.add if needed else self._filled.discard)(chunk.seq.seat)
        batch = self._prefill_arrays(
            chunks,
            bucket(sum(chunk.length for chunk in chunks), self.buckets.prefill_tokens),
            bucket(len(chunks), self.buckets.prefill_rows),
            self._table_pages(sequences, self.buckets.prefill_pages),
        )
        return self._run(prefill_step, batch, _options(sequences, prompt=True))

    def _prefill_arrays(self, chunks, num_tokens: int, num_rows: int, max_pages: int):
        compression = self.config.compression
        return prefill_batch(
            chunks,
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_pages=max_pages,
            padding_seat=self.padding_seat,
            page_size=self.config.page_size,
            window=compression.window if compression else 0,
        )

    def _prefill_groups(self, chunks: tuple[PrefillChunk, ...]) -> list[list[PrefillChunk]]:
        rows = self.buckets.prefill_rows[-1]
        return [list(chunks[i : i + rows]) for i in range(0, len(chunks), rows)]

    def _fill_seat(self, seq: Sequence) -> None:
        vocab_size = self.model.vocab_size
        if self.seats.output_counts is None:
            self.seats = with_seat_arrays(self.seats, vocab_size)
        arrays = seat_arrays(seq, seq.num_planned_outputs, vocab_size)
        self.seats = self.programs.run(SET_SEAT, self.seats, np.int32(seq.seat), *arrays)

    def _compress(self, jobs: list[CompressJob]) -> None:
        batch = self._compress_arrays(
            jobs,
            bucket(len(jobs), self.buckets.compress_rows),
            bucket(max(len(job.source_page_ids) for job in jobs), self.buckets.compress_pages),
        )
        start, stop = jobs[0].layers
        for span in _slices(start, stop, self.stride):
            program, args = self._slice(batch, span)
            self.cache = self.programs.run(program, *args)

    def _compress_arrays(self, jobs, num_rows: int, num_pages: int):
        # The engine's own budget in all common cases; requests that bring a larger one share a wider program.
        num_targets = self.config.compression.budget_pages
        if any(job.budget_pages > num_targets for job in jobs):
            num_targets = num_pages - 1
        page_size = self.config.page_size
        return compress_batch(
            jobs, num_rows=num_rows, num_pages=num_pages, num_targets=num_targets, page_size=page_size
        )

    def _slice(self, batch, span: tuple[int, int]) -> tuple[Program, tuple]:
        start, stop = span
        program = Program(
            compress_step,
            donated=("cache",),
            fixed=("cache", "layer_start"),
            statics=(("config", self.config.compression), ("num_layers", stop - start)),
        )
        return program, (self.cache, batch, np.int32(start))

    @staticmethod
    def _table_pages(sequences: list[Sequence], sizes: tuple[int, ...]) -> int:
        return bucket(max(len(seq.page_ids) for seq in sequences), sizes)


def new_cache(model: ModelConfig, config: EngineConfig, memory: MemoryPlan, dtype) -> CacheState:
    """A zeroed cache of the plan's size (zeros, because 0 · NaN of a stale value would reach an output)."""
    c = model
    pages = (c.num_layers * memory.num_pages, c.num_kv_heads, config.page_size)
    compression = config.compression
    scores = queries = positions = None
    if compression is not None:
        queries = jnp.zeros((c.num_layers * (memory.num_slots + 1), compression.window, c.num_heads, c.head_dim), dtype)
        if compression.policy.keeps_history:
            scores = jnp.zeros(pages, jnp.float32)
        if compression.record_evictions:
            positions = jnp.zeros(pages, jnp.int32)
    return CacheState(
        k_pages=jnp.zeros((*pages, c.head_dim), dtype),
        v_pages=jnp.zeros((*pages, c.head_dim), dtype),
        scores=scores,
        window_queries=queries,
        positions=positions,
        num_layers=c.num_layers,
    )


def _options(sequences: list[Sequence], prompt: bool = False) -> StepOptions:
    params = [seq.params for seq in sequences]
    return StepOptions(
        filters=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params if p.temperature > 0.0),
        logprobs=MAX_LOGPROBS if any(p.logprobs is not None for p in params) else None,
        prompt_logprobs=MAX_LOGPROBS if prompt and any(p.prompt_logprobs is not None for p in params) else None,
    )


def _groups(jobs: tuple[CompressJob, ...], config: EngineConfig) -> list[list[CompressJob]]:
    """Jobs of the same layers side by side, at most `max_rows` together."""
    groups: dict[tuple[int, int], list[list[CompressJob]]] = {}
    for job in jobs:
        lists = groups.setdefault(job.layers, [[]])
        if len(lists[-1]) == config.compression.max_rows:
            lists.append([])
        lists[-1].append(job)
    return [jobs for lists in groups.values() for jobs in lists]


def _slices(start: int, stop: int, stride: int) -> list[tuple[int, int]]:
    return [(i, min(i + stride, stop)) for i in range(start, stop, stride)]
