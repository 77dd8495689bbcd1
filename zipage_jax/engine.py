"""Engine: plan -> dispatch -> commit, one step ahead of the device.

The scheduler plans step t + 1 from counts alone, the runner enqueues it, and only then are the tokens of step t fetched and
committed: the device never waits for the host. Single-threaded; `step` is to be called until `has_unfinished` is False.
"""

import logging
import time
from dataclasses import dataclass

from zipage_jax.metrics import Metrics
from zipage_jax.outputs import Outputs, Request, TokenLogprobs
from zipage_jax.request import Sequence
from zipage_jax.runner import Runner, StepResult
from zipage_jax.scheduler import Plan, Scheduler
from zipage_jax.vocabulary import check_request

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Failed steps in a row after which the engine gives the requests up instead of trying them again."""


@dataclass
class Pending:
    """A step that was dispatched and not yet committed."""

    plan: Plan
    result: StepResult


class Engine:
    """Runs requests to their end. `outputs` turns tokens into text and finds stop strings.

    `last_failure` is the exception of the newest step that failed.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, outputs: Outputs):
        self.runner, self.scheduler, self.outputs = runner, scheduler, outputs
        self.metrics = Metrics(num_pages=runner.memory.num_pages - 1)
        self._pending: Pending | None = None
        self._failures = 0
        self.last_failure: Exception | None = None

    def add(self, request: Request) -> None:
        """Queue a request; ValueError, and nothing queued, if its id is in use, it can never run or names unknown tokens."""
        check_request(request, self.runner.model.vocab_size)
        self.outputs.add(request)
        try:
            for seq in request.sequences:
                self.scheduler.add(seq)
        except ValueError:
            self.scheduler.abort(request.request_id)
            self.outputs.remove(request.request_id)
            raise

    def abort(self, request_id: str) -> list[Sequence]:
        """End a request's samples with finish_reason "abort" and free what they hold."""
        return self.scheduler.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished() or self._pending is not None

    def step(self) -> list[Sequence]:
        """Plan and enqueue one step, commit the one before; returns the sequences that got a token or ended."""
        start = time.perf_counter()
        plan = self.scheduler.plan()
        if plan.empty and self._pending is None:
            return self._idle()
        planned = time.perf_counter()
        try:
            result = None if plan.empty else self.runner.dispatch(plan)
            dispatched = time.perf_counter()
            pending, self._pending = self._pending, None if result is None else Pending(plan, result)
            fetched = pending.result.fetch() if pending else None
            waited = time.perf_counter()
            changed = self._commit(pending.plan, fetched) if pending else []
        except Exception as error:
            return self._recover(error)
        changed += self.scheduler.take_ended()
        self.metrics.record(
            plan,
            self.scheduler,
            plan_s=planned - start,
            dispatch_s=dispatched - planned,
            wait_s=waited - dispatched,
            commit_s=time.perf_counter() - waited,
        )
        return changed

    def close(self) -> None:
        """Wait for what is in flight and hand the device memory back."""
        self.drain()
        self.runner.close()

    def drain(self) -> list[Sequence]:
        """Commit what is in flight, without planning more."""
        if self._pending is None:
            return []
        pending, self._pending = self._pending, None
        try:
            return self._commit(pending.plan, pending.result.fetch())
        except Exception as error:
            return self._recover(error)

    def _idle(self) -> list[Sequence]:
        """A step without anything to do. Requests that are left would wait for ever: an error, not a loop."""
        if self.scheduler.has_unfinished():
            raise RuntimeError(
                f"the scheduler is stuck with {self.scheduler.running()} and {self.scheduler.num_waiting} waiting; "
                "abort these requests and report it"
            )
        return self.scheduler.take_ended()

    def _commit(self, plan: Plan, result: StepResult) -> list[Sequence]:
        tokens = []
        logprobs: list[TokenLogprobs | None] = []
        for chunks, output in result.prefill:
            first = 0
            for row, chunk in enumerate(chunks):
                if output.prompt_logprobs is not None:
                    self.outputs.push_prompt(chunk.seq, chunk.start, chunk.length, first, output.prompt_logprobs)
                first += chunk.length
                if chunk.samples:
                    tokens.append(int(output.tokens[row]))
                    logprobs.append(TokenLogprobs.of_row(output.logprobs, row))
        if result.decode is not None:
            tokens += result.decode.tokens[: len(plan.decode)].tolist()
            logprobs += [TokenLogprobs.of_row(result.decode.logprobs, row) for row in range(len(plan.decode))]
        changed = self.scheduler.commit(plan, tokens, lambda seq, i, token: self.outputs.push(seq, token, logprobs[i]))
        self._failures = 0
        now = time.perf_counter()
        for seq in changed:
            elapsed = now - self.outputs[seq.request_id].queued_at
            if seq.stats.first_token_s is None:
                seq.stats.first_token_s = elapsed
            seq.stats.finished_s = elapsed
        return changed

    def _recover(self, error: Exception) -> list[Sequence]:
        """After a failed step: new pools, uncompressed requests prefilled again, compressed ones ended with the error."""
        log.exception("a step failed; the cache is rebuilt")
        self._pending, self.last_failure = None, error
        self._failures += 1
        self.runner.reset()
        give_up = self._failures >= MAX_FAILURES
        return self.scheduler.reset_after_failure(f"{type(error).__name__}: {error}", end_all=give_up)
