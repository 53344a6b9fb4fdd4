"""Generate the text that answers a request. All generated answers, streamed or whole, are made by `Generation`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from server.api.answer.shapes import UsageCounts
from server.api.context import Caller
from server.errors import DEADLINE_EXCEEDED, FINGERPRINT_MISMATCH, GENERATION_FAILED, MODEL_NOT_READY, SHUTTING_DOWN, ApiError, of_request
from server.interfaces import RequestError
from server.messages import IDLE, FinishReason, Submit, TokenEvent, TokenLogprob
from server.metrics import ModelSeries
from server.models.model import Loaded
from server.text.detokenize import Detokenizer, StopRules

TURN = 8  # events handled before other tasks may run; an engine step may bring a hundred events for one request
DEADLINE_GRACE_S = 1.0  # the worker enforces deadlines; if it hangs, the front gives up this many seconds after the deadline


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer: the message that submits it to the worker, and the rules by which tokens become text."""

    submit: Submit
    stops: StopRules
    shown: Mapping[int, bytes] = field(default_factory=dict)  # special tokens that appear in the answer, and their text in UTF-8


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """The log-probabilities of a token, and the position in the answer where the token's text begins."""

    start: int  # in characters
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class Step:
    """The text, tokens and log-probabilities that one event of the worker adds to one choice."""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    entries: tuple[TokenEntry, ...] = ()
    finish: str | None = None  # stop or length; None: the choice goes on
    stop_reason: str | int | None = None  # the stop string or the id of the stop token, if one has ended the choice
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(slots=True)
class Usage:
    """The counts of tokens that an answer reports."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def describe(self) -> UsageCounts:
        """Return the counts in OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class _Choice:
    """The state of one choice: its detokenizer, and the log-probabilities of tokens whose text is not certain yet. Text is certain once it
    cannot belong to a stop string, and its last character has all its bytes."""

    __slots__ = ("detokenizer", "entries", "last_s")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.entries: list[TokenEntry] = []
        self.last_s = 0.0  # time of the monotonic clock at which the choice's last event came; 0: none has come

    def push(self, event: TokenEvent) -> Step:
        """Add the tokens of an event. Return the step with the text that is certain now."""
        detokenizer = self.detokenizer
        before = detokenizer.num_tokens
        text = detokenizer.push(event.token_ids)
        token_ids = event.token_ids[: detokenizer.num_tokens - before]
        finish, stop_reason = None, None
        if detokenizer.stopped_by is not None:
            finish, stop_reason = "stop", detokenizer.stopped_by
        elif event.finish_reason is not None:
            text += detokenizer.finish()
            finish, stop_reason = event.finish_reason.value, event.stop_token_id
            if event.stop_token_id is not None:
                token_ids += (event.stop_token_id,)  # the model sampled the stop token, so it counts, although it has no text
        entries: tuple[TokenEntry, ...] = ()
        if event.logprobs:
            starts = detokenizer.token_starts[before:]
            self.entries += [TokenEntry(start, entry) for start, entry in zip(starts, event.logprobs, strict=False)]
        if self.entries:
            entries = self._certain(detokenizer.length, whole=finish is not None and detokenizer.stopped_by is None)
        return Step(event.choice, text, token_ids, entries, finish, stop_reason, event.prompt_logprobs)

    def _certain(self, length: int, *, whole: bool) -> tuple[TokenEntry, ...]:
        """Remove and return the entries of tokens whose text lies at least in part before the position `length` of the answer; with
        `whole`, all entries. Neither the entries nor the text of tokens after a stop string are ever returned."""
        certain = tuple(entry for entry in self.entries if whole or entry.start < length)
        self.entries = self.entries[len(certain) :]
        return certain


class Generation:
    """Runs one job. `steps` may be iterated once. When the iteration ends, for whatever reason, the worker stops computing the job, the
    job's admission is released, and the metrics count the job."""

    def __init__(self, loaded: Loaded, job: Job, metrics: ModelSeries, caller: Caller) -> None:
        """`loaded` is the model, `metrics` the series that count the job, `caller` the sender of the request."""
        self.usage = Usage(prompt_tokens=len(job.submit.prompt_ids))
        self._loaded = loaded
        self._job = job
        self._metrics = metrics
        self._arrived_s = caller.arrived_s
        self._record = caller.record
        self._quota_key = caller.quota_key
        self._expects = caller.expects
        self._has_begun = caller.has_begun
        self._submitted_s = time.monotonic()
        self._running = set(range(job.submit.num_choices))
        self._first_s: float | None = None
        self._finished: list[str] = []  # why each choice has ended
        prompt_ids = job.submit.prompt_ids
        self._choices = [_Choice(Detokenizer(loaded.tokenizer, job.stops, job.shown, prompt_ids)) for _ in range(job.submit.num_choices)]

    @property
    def first_s(self) -> float | None:
        """The time of the monotonic clock at which the first token arrived; None: it has not arrived."""
        return self._first_s

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Generate, and yield the steps of all choices as they come. Raise ApiError if the model accepts no more requests, if the request
        expects another fingerprint than the model's, if the model's fingerprint has changed since the request came, or if generation
        fails."""
        submit, worker = self._job.submit, self._loaded.worker
        require_fingerprint(self._loaded, self._expects)
        require_same(self._loaded)  # the request may have been tokenized before a restart of the worker
        try:
            lease = self._loaded.admission.admit(
                submit.num_choices,
                len(submit.prompt_ids),
                self._quota_key,
                submit.params.constraint,
                is_idle=submit.priority == IDLE,
                has_begun=self._has_begun,
            )
        except ApiError as error:
            self._metrics.metrics.rejected.labels(*self._metrics.labels, error.kind.code).inc()
            raise
        running = self._running
        self._record.submit(self._metrics.labels[0], self._submitted_s, self._loaded.fingerprint, submit.params.seed)
        events = worker.generate(submit)
        outcome, num_taken = "cancelled", 0
        try:
            async for event in events if submit.deadline is None else self._until(submit.deadline, events):
                if event.choice not in running:
                    continue  # the event was on its way when this process ended the choice
                if self._first_s is None:
                    require_same(self._loaded)  # later, the supervisor ends the job if the worker's fingerprint changes
                    lease.prefilled()
                step = self._take(event)
                if step.finish is not None and event.finish_reason is None:
                    self.end(event.choice, step.finish)
                elif step.finish is not None:
                    self._finished.append(step.finish)
                    running.discard(event.choice)
                yield step
                if not running:
                    break
                num_taken += 1
                if num_taken % TURN == 0:
                    await asyncio.sleep(0)
            if running:
                raise ApiError(GENERATION_FAILED, "the model's worker stopped before the answer was complete")
            outcome = "finished"
        except ApiError as error:
            outcome = error.kind.code
            raise
        except RequestError as error:
            outcome = error.code
            raise of_request(error) from error
        finally:
            await events.aclose()
            lease.release()
            self._account(outcome)

    def end(self, choice: int, reason: str = "stop") -> None:
        """End a choice that the worker still generates, and abort it in the worker. The metrics count `reason`. Do nothing if the choice
        has ended already."""
        if choice not in self._running:
            return
        self._finished.append(reason)
        self._running.discard(choice)
        if self._running:  # if no choice is left, `steps` closes the worker's events, which ends the whole job
            self._loaded.worker.abort(self._job.submit.request_id, choice)

    def _take(self, event: TokenEvent) -> Step:
        """Return the step of an event, and count its tokens. Raise ApiError if the event reports that the deadline has passed or that the
        model was unloaded."""
        choice, now_s = self._choices[event.choice], time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self.usage.cached_tokens = event.num_cached
            self._metrics.ttft.observe(now_s - self._arrived_s)
        elif choice.last_s:
            self._metrics.itl.observe(now_s - choice.last_s)
        choice.last_s = now_s
        match event.finish_reason:
            case FinishReason.DEADLINE:
                self._count(choice, event)
                raise self._too_late()
            case FinishReason.ABORT:
                raise ApiError(SHUTTING_DOWN, "the model was unloaded before the answer was complete")
            case _:
                pass
        step = choice.push(event)
        self.usage.completion_tokens += len(step.token_ids)
        return step

    def _count(self, choice: _Choice, event: TokenEvent) -> None:
        """Count the tokens of an event whose text is not sent."""
        choice.push(event)
        self.usage.completion_tokens += len(event.token_ids)

    async def _until(self, deadline: float, events: AsyncGenerator[TokenEvent, None]) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events. Raise ApiError if the next event has not come DEADLINE_GRACE_S after the deadline."""
        while True:
            try:
                async with asyncio.timeout(deadline + DEADLINE_GRACE_S - time.monotonic()):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._too_late() from None
            yield event

    def _too_late(self) -> ApiError:
        """Return the error for a deadline that has passed."""
        message = f"the deadline passed after {self.usage.completion_tokens} tokens"
        return ApiError(DEADLINE_EXCEEDED, message, usage=self.usage.describe())

    def _account(self, outcome: str) -> None:
        """Count the job in the metrics and in the record of the request. `outcome`: finished, cancelled, or the code of an error."""
        metrics, labels, submit = self._metrics.metrics, self._metrics.labels, self._job.submit
        now_s, usage = time.monotonic(), self.usage
        self._metrics.generated.inc(usage.completion_tokens)
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        metrics.cached_tokens.labels(*labels).inc(usage.cached_tokens)
        metrics.by_source.labels(*labels, "local_cache_hit").inc(usage.cached_tokens)
        metrics.by_source.labels(*labels, "local_compute").inc(usage.prompt_tokens - usage.cached_tokens)
        self._record.count(usage.prompt_tokens, usage.completion_tokens, self._first_s, now_s)
        if outcome == "cancelled":
            stage = "prefill" if self._first_s is None else "decode"
            metrics.cancelled.labels(*labels, stage).inc()
            metrics.success.labels(*labels, "abort").inc()
            return
        if outcome != "finished":
            metrics.failed.labels(*labels, outcome).inc()
            metrics.success.labels(*labels, "error").inc()
            return
        first_s = self._first_s or now_s
        longest = max(choice.detokenizer.num_tokens for choice in self._choices)
        metrics.e2e.labels(*labels).observe(now_s - self._arrived_s)
        metrics.queue.labels(*labels).observe(self._submitted_s - self._arrived_s)
        metrics.inference.labels(*labels).observe(now_s - self._submitted_s)
        metrics.prefill.labels(*labels).observe(first_s - self._submitted_s)
        metrics.decode.labels(*labels).observe(now_s - first_s)
        if longest > 1:
            metrics.tpot.labels(*labels).observe((now_s - first_s) / (longest - 1))
        metrics.prompt_length.labels(*labels).observe(usage.prompt_tokens)
        metrics.output_length.labels(*labels).observe(usage.completion_tokens)
        metrics.max_length.labels(*labels).observe(longest)
        metrics.param_n.labels(*labels).observe(submit.num_choices)
        metrics.param_max_tokens.labels(*labels).observe(submit.params.max_tokens)
        for reason in self._finished:
            metrics.success.labels(*labels, reason).inc()


def require_fingerprint(loaded: Loaded, expected: str) -> None:
    """Raise ApiError if the request expects another fingerprint than this model's: this model might not continue the answer of another one
    with the same bytes. "" and "*" allow every fingerprint."""
    found = loaded.fingerprint
    if expected not in ("", "*", found):
        text = f"if-match is {expected!r:.80}; this model has the fingerprint {found}, so it cannot continue the answer with the same bytes"
        raise ApiError(FINGERPRINT_MISMATCH, text)


def require_same(loaded: Loaded) -> None:
    """Raise ApiError if the present worker has another fingerprint than `loaded`. While the request waited, the worker may have been
    restarted after the model's files were replaced. The request's tokens would then be those of the old files, its answer could mix bytes
    of the old and the new model, and the answer would state the old fingerprint."""
    now = loaded.worker.ready
    if now is not None and now.fingerprint != loaded.ready.fingerprint:
        found = loaded.defaults.mark(now.fingerprint)
        text = f"the model has the fingerprint {found} since its restart, and this request came to {loaded.fingerprint}; ask again"
        raise ApiError(MODEL_NOT_READY, text, headers={"retry-after": "1"})
