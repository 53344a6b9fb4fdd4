"""The engine: admit -> schedule -> encode -> run -> sample -> publish.

`Engine.step` runs these stages one after the other. For a limited time, the stage `encode` runs parts of the encoding of images or
recordings for which sequences wait. `overlap.OverlappedEngine` publishes the tokens of the last step, computes masks and schedules the next
step while the device computes. `requests.Requests` holds the unfinished requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from runtime.sampling import SampleBatch
from server.constraints.compiler import ConstraintCompiler
from server.constraints.matcher import LATE, ConstraintError, Mask
from server.engine.batch import BatchBuilder
from server.engine.outbox import Outbox, Publish, Timing
from server.engine.page_exchange import ExchangeOf
from server.engine.request import Sequence, Stage
from server.engine.requests import Requests
from server.engine.sampler import Sampler
from server.engine.scheduling.cache_log import CacheLog
from server.engine.scheduling.pace import Pace
from server.engine.scheduling.plan import Item, Plan
from server.engine.scheduling.scheduler import Scheduler
from server.engine.step_model import Logits, StepBatch, StepModel
from server.messages import Abort, CacheChanged, Embed, PageCounts, Stats, Step, Submit
from server.stages.relay import Relay

LONG_S = 10.0  # if a step may take at least this long, the front is sent a `Step` message


@dataclass(slots=True)
class Outputs:
    """What the rows of a step are used for. Rows of logits are numbered in batch order; texts to embed have no such rows."""

    vectors: list[Item] = field(default_factory=list[Item])  # texts to embed
    # sequences whose prompt log-probabilities are requested, each with its first row and its number of rows
    prompts: list[tuple[Sequence, int, int]] = field(default_factory=list[tuple[Sequence, int, int]])
    drawing: list[Sequence] = field(default_factory=list[Sequence])  # sequences that draw a token
    places: list[int] = field(default_factory=list[int])  # the row of each of `drawing`
    masks: dict[Sequence, Mask] = field(default_factory=dict[Sequence, Mask])
    batch: SampleBatch | None = None  # the arguments of the draw; None: `drawing` is empty


class Engine:
    """Runs the requests of a model that generates or gives hidden states. The worker calls `submit`, `embed`, `abort` and `pause` between
    steps."""

    def __init__(
        self,
        model: StepModel,
        publish: Publish,
        *,
        eos_ids: tuple[int, ...] = (),
        constraints: ConstraintCompiler | None = None,
        pace: Pace | None = None,
        logs_cache: bool = False,
        relay: Relay | None = None,
        exchange: ExchangeOf | None = None,
        clock: Callable[[], float] = time.perf_counter,
        deadline_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `logs_cache`, changes of the prefix cache are published too. `relay` connects to the model's other stages. `exchange` makes
        the object that exchanges pages with other servers. `clock` measures the duration of steps. Deadlines are compared with the time of
        `deadline_clock`."""
        self._cache_log = CacheLog(model.limits.groups) if logs_cache else None
        self.scheduler = Scheduler(model.limits, pace, self._cache_log, model.is_encoded)
        self.timing = Timing()
        self._model = model
        self._clock = clock
        self._outbox = Outbox(publish)
        self.exchange = None if exchange is None else exchange(model, self.scheduler, self._outbox.send)
        self._requests = Requests(
            model.limits,
            self.scheduler,
            self._outbox,
            eos_ids=eos_ids,
            constraints=constraints,
            clock=deadline_clock,
            exchange=self.exchange,
        )
        self._constraints = constraints
        self._relay = relay
        self._batches = BatchBuilder(model.limits)
        self._sampler = Sampler(model)
        self._has_announced = False  # the front was told that the present steps may take long

    @property
    def has_work(self) -> bool:
        """Whether a step may be needed: a request is unfinished, something is unsent (tokens, changes of the prefix cache, or the last
        statistics), or there may be pages to exchange."""
        has_changed = self._cache_log is not None and self._cache_log.has_news
        is_asked = self.exchange is not None and self.exchange.has_work
        has_news = self._outbox.has_news or (self._outbox.owes_stats and not self._is_busy)
        return bool(self._requests.living) or has_news or has_changed or is_asked

    @property
    def _is_busy(self) -> bool:
        """Whether a request is unfinished, pages are being given to other servers, or pages were exchanged before the last step. The front
        is sent statistics at intervals while this is true."""
        return bool(self._requests.living) or (self.exchange is not None and self.exchange.is_giving)

    def submit(self, submit: Submit) -> None:
        self._requests.submit(submit)

    def embed(self, embed: Embed) -> None:
        self._requests.embed(embed)

    def abort(self, abort: Abort) -> None:
        self._requests.abort(abort)
        if self.exchange is not None:
            self.exchange.stop(abort.request_id)

    def pause(self, paused: bool) -> None:
        """Plan nothing while `paused`. Requests may still be aborted, and pages are still exchanged with other servers."""
        self.scheduler.pause(paused)

    # --- one step --------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Encode images and audio for a while, and run one step. Return False if there was nothing to encode, no sequence could run, and
        there was no page to exchange with another server."""
        self._requests.admit()
        plan = self._settled(self.scheduler.schedule())
        has_moved = self._move_pages(plan)
        self._announce(plan)
        encoding_s = self._encode(plan)
        if plan.items:
            launched = self._clock()
            logits, kernel_s = self._run(self._batches.build(plan))
            self._sample(plan, logits, self._outputs(plan, self._masks(plan)))
            self._record(plan, self._clock() - launched, kernel_s)
        self.scheduler.encoding.observe(plan, encoding_s)
        self._publish()
        return plan.has_work or has_moved

    def _settled(self, plan: Plan) -> Plan:
        """Settle a plan, and let the model keep the encoded rows of the excerpts in `plan.needed`."""
        self.scheduler.settle(plan)
        if self._model.limits.excerpts:
            self._model.spare(plan.needed)
        return plan

    def _announce(self, plan: Plan) -> None:
        """If a step may take LONG_S or longer, tell the front how long, so that the front does not mistake a slow step for a stalled
        worker. Send 0.0 once steps are short again."""
        if not plan.has_work:
            return
        limit_s = self.scheduler.limit_s(plan)
        if limit_s >= LONG_S or self._has_announced:
            self._has_announced = limit_s >= LONG_S
            self._outbox.send(Step(limit_s if self._has_announced else 0.0))

    def _masks(self, plan: Plan) -> dict[Sequence, Mask]:
        """Return the masks of the sequences that draw a token in this step. A sequence without an entry may draw any token, was parked
        because its mask is late, or belongs to a request that has failed because a constraint cannot be followed. A mask depends only on
        tokens before the step, so the device may run the step at the same time."""
        masks: dict[Sequence, Mask] = {}
        seqs = [seq for seq, item in plan.items.items() if item.draws and seq.matcher is not None]
        for seq in seqs:
            if seq.matcher is not None:
                seq.matcher.prefetch_mask()
        for seq in seqs:
            if seq.matcher is None:
                continue  # the request has just failed: the constraint of another of its choices cannot be followed
            try:
                mask = seq.matcher.mask()
            except ConstraintError as error:
                self._requests.give_up(seq, error)
                continue
            if mask is LATE:
                self._requests.park(seq)
            elif mask is not None:
                masks[seq] = mask
        return masks

    def _move_pages(self, plan: Plan) -> bool:
        """Copy the pages in `plan.copies`, then exchange pages with other servers. The exchange comes second, because it may write into a
        page that is the source of a copy. Return whether there were pages to exchange."""
        for copy in plan.copies:
            self._model.copy_page(*copy)
        return self.exchange is not None and self.exchange.work()

    def _encode(self, plan: Plan) -> float:
        """Run parts of the plan's encodings, if there are any, for as long as the pace allows before the step, but at least one part.
        Return the seconds that the parts took."""
        spent_s = longest_s = 0.0
        if not plan.encodings:
            return spent_s
        limit_s, began, has_run = self.scheduler.encoding.limit_s(plan), self._clock(), False
        for encoding in plan.encodings:
            while not encoding.is_done:
                if has_run and spent_s + (encoding.longest_s or longest_s) >= limit_s:
                    return spent_s
                encoding.is_done = self._model.encode(encoding.work)
                part_s = self._clock() - began - spent_s
                encoding.observe(part_s)
                spent_s, longest_s, has_run = spent_s + part_s, max(longest_s, part_s), True
        return spent_s

    def _run(self, batch: StepBatch) -> tuple[Logits, float]:
        """Run the model. Return its logits, and the seconds that the call took."""
        started = self._clock()
        logits = self._model.run(batch)
        return logits, self._clock() - started

    def _outputs(self, plan: Plan, masks: dict[Sequence, Mask]) -> Outputs:
        """Return what the rows of a step are used for, and the arguments of its draw. They depend only on tokens before the step, so the
        device may run the step at the same time."""
        outputs = Outputs(masks=masks)
        finished, parked = Stage.FINISHED, Stage.PARKED
        at = 0
        for item in plan.in_order:
            seq = item.seq
            if seq.request.embed is not None:
                outputs.vectors.append(item)
                continue
            if seq.stage is not finished:
                if seq.prompt_logprobs is not None and seq.wants_prompt_logprobs:
                    outputs.prompts.append((seq, at, item.num_rows - item.draws))
                if item.draws and seq.stage is not parked:
                    outputs.drawing.append(seq)
                    outputs.places.append(at + item.num_rows - 1)
            at += item.num_rows
        outputs.batch = self._sampler.prepare(
            [seq.row for seq in outputs.drawing], [masks.get(seq) for seq in outputs.drawing], outputs.places
        )
        return outputs

    def _sample(self, plan: Plan, logits: Logits, outputs: Outputs) -> None:
        """Draw the step's tokens from its logits. Pass tokens, log-probabilities of prompts, and vectors on to their requests. Before the
        draw, matchers that select a tool receive the log-probabilities of their candidates. After the draw, the matchers of all sequences
        begin to process the drawn tokens, so that the matchers work in parallel."""
        self.scheduler.collect(plan)
        if outputs.vectors:
            self._deliver(outputs.vectors)
        for seq, first, num_rows in outputs.prompts:
            self._add_prompt_logprobs(seq, logits, first, num_rows)
        drawing = outputs.drawing
        for seq, place in zip(drawing, outputs.places, strict=True):
            if seq.matcher is not None and seq.choosing is not None and (candidates := seq.choosing.candidates()):
                seq.choosing.weigh(self._sampler.weigh(logits, place, candidates))
        results = self._sampler.draw(logits, [seq.row for seq in drawing], self._restricted(logits, outputs))
        for seq, drawn in zip(drawing, results, strict=True):
            if seq.matcher is not None and drawn.error is None:
                seq.matcher.prefetch(drawn.token_id)
        finished, take = Stage.FINISHED, self._requests.take
        for seq, drawn in zip(drawing, results, strict=True):
            if seq.stage is not finished:  # another choice may have failed the request just now
                take(seq, drawn)

    def _restricted(self, logits: Logits, outputs: Outputs) -> SampleBatch | None:
        """Return the arguments of the draw: `outputs.batch` if no matcher reads logits. Otherwise let the matchers that read logits
        restrict their masks, and prepare the arguments again."""
        reading = [(i, seq, seq.matcher) for i, seq in enumerate(outputs.drawing) if seq.matcher is not None and seq.matcher.reads_logits]
        if not reading:
            return outputs.batch
        rows, masks = self._model.download(logits), dict(outputs.masks)
        for i, seq, matcher in reading:
            masks[seq] = matcher.restrict(masks[seq], rows[outputs.places[i]])
        drawing = outputs.drawing
        return self._sampler.prepare([seq.row for seq in drawing], [masks.get(seq) for seq in drawing], outputs.places)

    def _deliver(self, items: list[Item]) -> None:
        """Pass on the vectors of texts to embed: the vector of each token once it is computed, or only that of the last token. A request
        ends when its last token is computed."""
        items = [item for item in items if item.num_rows]
        ends = np.cumsum([item.num_rows for item in items])
        for item, rows in zip(items, np.split(self._model.hidden(), ends[:-1]) if items else (), strict=True):
            if item.seq.stage is not Stage.FINISHED:
                self._requests.take_vectors(item.seq, rows, is_last=item.draws)

    def _add_prompt_logprobs(self, seq: Sequence, logits: Logits, first: int, num_rows: int) -> None:
        """Add log-probabilities of the next prompt tokens of `seq`, whose logits begin at row `first`."""
        num_top = seq.request.submit.params.prompt_logprobs
        assert seq.prompt_logprobs is not None and num_top is not None
        if num_rows:
            num_done = len(seq.prompt_logprobs)
            self._requests.take_prompt(
                seq, self._sampler.prompt_logprobs(logits, first, seq.token_ids[num_done : num_done + num_rows], num_top)
            )

    # --- output ----------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Send the tokens of the step, changes of the prefix cache, and statistics if they are due."""
        self._outbox.flush()
        if self._cache_log is not None and self._cache_log.has_news:
            self._outbox.send(CacheChanged(self._cache_log.take()))
        if self._outbox.wants_stats(is_busy=self._is_busy):
            self._outbox.send(self.stats())

    def _record(self, plan: Plan, step_s: float, kernel_s: float) -> None:
        """Count a step, and correct the scheduler's estimates of step costs by its duration."""
        self.timing.add(plan.num_tokens, plan.num_prefill, step_s, kernel_s)
        self.scheduler.observe(plan, step_s)

    def stats(self) -> Stats:
        """Return the present state as a message."""
        scheduler, pool, timing = self.scheduler, self.scheduler.pool, self.timing
        alive = [seq for seq in self._requests.sequences if seq.stage is not Stage.FINISHED]
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(alive) - len(scheduler.running),
            num_pages_used=pool.num_used,
            num_pages=pool.num_pages,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=pool.num_queried_tokens,
            prefix_hits=pool.num_found_tokens,
            num_steps=timing.num_steps,
            step_s=timing.last_step_s,
            kernel_s=timing.last_kernel_s,
            num_step_tokens=timing.num_tokens,
            steps_by_size=tuple(timing.by_size),
            num_prefill_tokens=timing.num_prefill,
            stages_s=0.0 if self._relay is None else self._relay.waited_s,
            pages=PageCounts() if self.exchange is None else self.exchange.counts,
            num_prompt_tokens_left=sum(max(0, seq.num_prompt - seq.num_computed) for seq in alive if seq not in seq.request.followers),
        )

    def check_integrity(self) -> None:
        """Raise an error if the scheduler's records contradict each other."""
        self.scheduler.check_integrity(self._requests.sequences)

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()
        if self._constraints is not None:
            self._constraints.close()
