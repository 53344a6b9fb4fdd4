"""The engine: admit -> schedule -> run -> sample -> publish.

`Engine.step` does these one after the other. `overlap.OverlappedEngine` publishes the last tokens, computes masks and schedules the next
step while the device runs.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.step import StepBatch, StepModel
from server.engine.batch import BatchBuilder
from server.engine.constrain import ConstraintCompiler, Pending
from server.engine.embed import embedding_of
from server.engine.intake import open_request, open_text, row_behind
from server.engine.lazy import LazyMatcher
from server.engine.matcher import ConstraintError
from server.engine.outbox import Outbox, Publish, Timing
from server.engine.request import Request, Sequence, Stage
from server.engine.sampler import Bitmask, Drawn, Sampler
from server.engine.scheduler import Item, Plan, Scheduler
from server.handle import RequestError
from server.messages import (
    Abort,
    Embed,
    Failed,
    FinishReason,
    Stats,
    Submit,
    TokenEvent,
    TokenLogprob,
)


class Engine:
    def __init__(
        self,
        model: StepModel,
        publish: Publish,
        *,
        eos_ids: tuple[int, ...] = (),
        constraints: ConstraintCompiler | None = None,
        clock: Callable[[], float] = time.perf_counter,
        deadline_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` measures steps, `deadline_clock` deadlines."""
        self.scheduler = Scheduler(model.limits)
        self.timing = Timing()
        self._model = model
        self._clock = clock
        self._deadline_clock = deadline_clock
        self._outbox = Outbox(publish)
        self._eos_ids = eos_ids
        self._constraints = constraints
        self._batches = BatchBuilder(model.limits)
        self._sampler = Sampler(model)
        self._requests: dict[str, Request] = {}
        self._compiling: dict[Sequence, Pending] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # ids only: it outlives the requests
        self._num_arrived = 0

    # --- what arrives ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._outbox.has_news

    def submit(self, submit: Submit) -> None:
        try:
            request = self._open(submit)
        except RequestError as error:
            self._outbox.send(Failed(submit.request_id, error.code, error.message))
            return
        self._enter(request)
        for seq in request.sequences:
            if seq.stage is not Stage.FINISHED and seq.num_known >= seq.max_len:
                self._end(seq, FinishReason.LENGTH)
        if not any(seq.stage is Stage.COMPILING for seq in request.sequences):
            self.scheduler.add(request)

    def embed(self, embed: Embed) -> None:
        try:
            self._require_new(embed.request_id)
            request = open_text(embed, self._num_arrived, limits=self._model.limits)
        except RequestError as error:
            self._outbox.send(Failed(embed.request_id, error.code, error.message))
            return
        self._enter(request)
        self.scheduler.add(request)

    def _enter(self, request: Request) -> None:
        submit = request.submit
        self._num_arrived += 1
        self._requests[submit.request_id] = request
        if submit.deadline is not None:
            heapq.heappush(self._deadlines, (submit.deadline, request.arrival, submit.request_id))

    def _require_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError("generation_failed", f"request_id {request_id} is running already")

    def abort(self, abort: Abort) -> None:
        request = self._requests.get(abort.request_id)
        if request is None:
            return  # it has just ended
        for seq in list(request.sequences):
            if abort.choice in (None, seq.choice):
                self._end(seq, FinishReason.ABORT)

    def pause(self, paused: bool) -> None:
        """Run nothing until further notice; what is aborted is let go all the same."""
        self.scheduler.paused = paused

    def _open(self, submit: Submit) -> Request:
        self._require_new(submit.request_id)
        request = open_request(submit, self._num_arrived, limits=self._model.limits, eos_ids=self._eos_ids)
        constraint = submit.params.constraint
        if constraint is None or (constraint.trigger is not None and self._constraints is None):
            return request
        if self._constraints is None:
            raise RequestError("invalid_schema", "this model was loaded without a tokenizer, which constraints need")
        for seq in request.sequences:
            if seq.stage is Stage.WAITING:
                seq.stage = Stage.COMPILING
                self._compiling[seq] = self._constraints.compile(constraint)
        return request

    # --- one step --------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """False if there was nothing to run."""
        self._admit()
        plan = self.scheduler.settle(self.scheduler.schedule())
        if plan.items:
            launched = self._clock()
            logits, kernel_s = self._run(plan, self._batches.build(plan))
            self._sample(plan, logits, self._masks(plan))
            self._record(plan, self._clock() - launched, kernel_s)
        self._publish()
        return bool(plan.items)

    def _admit(self) -> None:
        """Let compiled constraints in and expired requests out."""
        now = self._deadline_clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            for seq in request.sequences if request is not None and request.arrival == arrival else ():
                self._end(seq, FinishReason.DEADLINE)
        for seq, pending in list(self._compiling.items()):
            if seq not in self._compiling:
                continue  # its request has just failed
            try:
                seq.matcher = pending.poll()
                if seq.matcher is not None:
                    self._constrain(seq)
            except ConstraintError as error:
                self._fail(seq.request, "invalid_schema", str(error))

    def _constrain(self, seq: Sequence) -> None:
        """The constraint is there: follow what was emitted before; when the last choice has its own, the request may run."""
        assert seq.matcher is not None
        del self._compiling[seq]
        seq.stage = Stage.WAITING
        seq.matcher.advance(seq.token_ids[seq.num_prompt :])
        if seq.choosing is not None:
            seq.choosing.let_go()  # as the former worker did, or it would have told nobody of these tokens
        self._tell(seq, *self._follow(seq))
        if not any(other.stage is Stage.COMPILING for other in seq.request.sequences):
            self.scheduler.add(seq.request)

    def _masks(self, plan: Plan) -> dict[Sequence, Bitmask]:
        """Of the rows that a constraint restricts. They depend on the tokens before the step, so the device may run meanwhile."""
        masks: dict[Sequence, Bitmask] = {}
        for seq, item in list(plan.items.items()):
            if item.draws and seq.matcher is not None and seq.stage is not Stage.FINISHED:
                try:
                    mask = seq.matcher.mask()
                except ConstraintError as error:
                    self._fail(seq.request, "generation_failed", f"the constraint cannot be followed: {error}")
                    continue
                if mask is not None:
                    masks[seq] = mask
        return masks

    def _run(self, plan: Plan, batch: StepBatch) -> tuple[NDArray[np.float32], float]:
        started = self._clock()
        for source, target in plan.copies:
            self._model.copy_page(source, target)
        logits = self._model.run(batch)
        return logits, self._clock() - started

    def _sample(self, plan: Plan, logits: NDArray[np.float32], masks: dict[Sequence, Bitmask]) -> None:
        drawing: list[Sequence] = []
        rows: list[int] = []
        at = 0
        embedded = [item for item in plan.items.values() if item.seq.request.embed is not None and item.draws]
        if embedded:
            self._deliver(embedded, self._model.hidden())
        for item in plan.items.values():
            seq = item.seq
            if seq.request.embed is not None:
                continue
            seq.num_awaited -= item.draws
            if seq.stage is not Stage.FINISHED:
                if seq.judges_prompt:
                    self._judge_prompt(seq, logits, at, item.num_rows - item.draws)
                if item.draws:
                    drawing.append(seq)
                    rows.append(at + item.num_rows - 1)
            at += item.num_rows
        for seq, place in zip(drawing, rows, strict=True):
            if seq.choosing is not None and (candidates := seq.choosing.candidates()):
                seq.choosing.weigh(self._sampler.weigh(logits, place, candidates))
        results = self._sampler.sample(logits, [seq.row for seq in drawing], [masks.get(seq) for seq in drawing], rows)
        for seq, drawn in zip(drawing, results, strict=True):
            if seq.stage is not Stage.FINISHED:  # another choice may have failed the request just now
                self._take(seq, drawn)

    def _deliver(self, items: list[Item], vectors: NDArray[np.float32]) -> None:
        for item, vector in zip(items, vectors, strict=True):
            seq, embed = item.seq, item.seq.request.embed
            seq.num_awaited -= 1
            if seq.stage is not Stage.FINISHED:
                assert embed is not None
                self._drop(seq.request)
                self._outbox.send(embedding_of(embed, vector))

    def _judge_prompt(self, seq: Sequence, logits: NDArray[np.float32], first: int, num_rows: int) -> None:
        """The rows from `first` on stand before the next tokens of the prompt."""
        num_top = seq.request.submit.params.prompt_logprobs
        assert seq.prompt_logprobs is not None and num_top is not None
        if num_rows:
            judged = len(seq.prompt_logprobs)
            seq.prompt_logprobs += self._sampler.judge(logits, first, seq.token_ids[judged : judged + num_rows], num_top)

    # --- what becomes of a token -----------------------------------------------------------------------------------------

    def _take(self, seq: Sequence, drawn: Drawn) -> None:
        if drawn.error is not None and isinstance(seq.matcher, LazyMatcher) and seq.matcher.let_go():
            self._take_back(seq, 0)  # what was banned left nothing to draw: an offer is not worth a failure
            return
        if drawn.error is not None:
            self._fail(seq.request, drawn.error.code, str(drawn.error))
            return
        if seq.choosing is not None and seq.choosing.refuses(drawn.token_id):
            self._take_back(seq, seq.choosing.take_back())
            return
        reason = self._append(seq, drawn.token_id)
        joined = [] if seq.stop_token_id is not None else [drawn.token_id]
        if reason is None:
            forced, reason = self._follow(seq)
            joined += forced
        self._tell(seq, joined, reason, () if drawn.logprob is None else (drawn.logprob,))

    def _take_back(self, seq: Sequence, num_tokens: int) -> None:
        """Its last tokens lead nowhere, and nobody was told of them: go on from before them."""
        self.scheduler.take_back(seq, num_tokens)
        seq.untold_ids = seq.untold_ids[: len(seq.untold_ids) - num_tokens]
        seq.untold_logprobs = seq.untold_logprobs[: len(seq.untold_ids)]
        seq.row = row_behind(seq.request.submit, seq.choice, seq.token_ids[seq.num_prompt :], self._eos_ids)
        self._tell(seq, *self._follow(seq))

    def _append(self, seq: Sequence, token_id: int) -> FinishReason | None:
        if token_id in seq.row.ender_ids and not seq.row.holds_back_end:
            seq.stop_token_id = token_id
            return FinishReason.STOP
        seq.token_ids.append(token_id)
        seq.row.advance(token_id)
        if seq.matcher is not None:
            seq.matcher.advance([token_id])
            if seq.matcher.is_complete:
                return FinishReason.STOP
        return FinishReason.LENGTH if seq.num_known >= seq.max_len else None

    def _follow(self, seq: Sequence) -> tuple[list[int], FinishReason | None]:
        """Append what the grammar forces, without running the model. Only where drawing could give nothing else: with
        log-probabilities wanted, other tokens banned or a stop token in the way, the model's step decides."""
        params = seq.row.params
        joined: list[int] = []
        if seq.matcher is None or not seq.row.is_plain or params.logprobs is not None or seq.prompt_logprobs is not None:
            return joined, None
        for token_id in seq.matcher.forced():
            if token_id in seq.row.ender_ids:
                break
            joined.append(token_id)
            reason = self._append(seq, token_id)
            if reason is not None:
                return joined, reason
        return joined, None

    def _tell(
        self,
        seq: Sequence,
        token_ids: list[int],
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        token_ids, logprobs = [*seq.untold_ids, *token_ids], (*seq.untold_logprobs, *logprobs)
        if reason is None and seq.choosing is not None:
            seq.untold_ids, seq.untold_logprobs = token_ids, logprobs
            return
        seq.untold_ids, seq.untold_logprobs = [], ()
        if reason is not None:
            self._end(seq, reason, token_ids, logprobs)
        elif token_ids:
            self._outbox.add(self._event(seq, token_ids, logprobs))

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """With its pages, within the step."""
        if seq.stage is Stage.FINISHED:
            return
        if seq.request.embed is not None:
            self._end_text(seq.request, reason)
            return
        self._compiling.pop(seq, None)
        self.scheduler.finish(seq)
        seq.finish_reason = reason
        self._outbox.add(self._event(seq, token_ids or [], logprobs))
        if seq.request.is_finished:
            del self._requests[seq.request.submit.request_id]

    def _end_text(self, request: Request, reason: FinishReason) -> None:
        if reason is FinishReason.DEADLINE:
            self._fail(request, "deadline_exceeded", "the deadline passed before the text's turn")
        else:
            self._drop(request)  # aborted: nobody listens

    def _fail(self, request: Request, code: str, message: str) -> None:
        self._drop(request)
        self._outbox.send(Failed(request.submit.request_id, code, message))

    def _drop(self, request: Request) -> None:
        for seq in request.sequences:
            if seq.stage is not Stage.FINISHED:
                self._compiling.pop(seq, None)
                self.scheduler.finish(seq)
        del self._requests[request.submit.request_id]

    def _event(self, seq: Sequence, token_ids: list[int], logprobs: tuple[TokenLogprob, ...]) -> TokenEvent:
        judged, seq.prompt_logprobs = seq.prompt_logprobs, None
        request = seq.request
        return TokenEvent(
            request.submit.request_id,
            seq.choice,
            tuple(token_ids),
            logprobs=logprobs,
            finish_reason=seq.finish_reason,
            stop_token_id=seq.stop_token_id,
            num_cached=request.num_cached or 0,
            prompt_logprobs=tuple(judged) if judged is not None and len(judged) == seq.num_prompt else (),
        )

    # --- what leaves -----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._outbox.flush()
        if self._outbox.wants_stats(is_busy=bool(self._requests)):
            self._outbox.send(self.stats())

    def _record(self, plan: Plan, step_s: float, kernel_s: float) -> None:
        self.timing.add(step_s, kernel_s)
        self.scheduler.pace.observe(plan.num_decode, plan.num_prefill, step_s)

    def stats(self) -> Stats:
        scheduler, pool, timing = self.scheduler, self.scheduler.pool, self.timing
        num_alive = sum(seq.stage is not Stage.FINISHED for r in self._requests.values() for seq in r.sequences)
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=num_alive - len(scheduler.running),
            num_pages_used=pool.num_used,
            num_pages=pool.num_pages - 1,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=pool.num_queried_tokens,
            prefix_hits=pool.num_found_tokens,
            num_steps=timing.num_steps,
            step_s=timing.last_step_s,
            kernel_s=timing.last_kernel_s,
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity(seq for request in self._requests.values() for seq in request.sequences)

    def close(self) -> None:
        if self._constraints is not None:
            self._constraints.close()
