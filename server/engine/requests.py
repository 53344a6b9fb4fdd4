"""The unfinished requests of an engine: they arrive, wait for their constraints or for pages of other servers, receive tokens, and end.

`Engine` runs the steps. When a request ends for any reason, its pages are freed at once. This module also gives the outbox each request's
tokens, vectors or failure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.constraints.compiler import ConstraintCompiler
from server.constraints.matcher import ConstraintError, ConstraintLost
from server.constraints.rules import Bans, matcher_of
from server.constraints.stamps import StampMatcher
from server.engine.embed import embedding_of
from server.engine.intake import open_request, open_text
from server.engine.outbox import Outbox
from server.engine.page_exchange import PageExchange
from server.engine.request import Request, Sequence, Stage
from server.engine.sampler import Drawn
from server.engine.scheduling.scheduler import Scheduler
from server.engine.step_model import StepLimits
from server.interfaces import RequestError
from server.messages import Abort, Embed, ErrorCode, Failed, FinishReason, Submit, TokenEvent, TokenLogprob


class Requests:
    """The unfinished requests of an engine, by id in `living`."""

    def __init__(
        self,
        limits: StepLimits,
        scheduler: Scheduler,
        outbox: Outbox,
        *,
        eos_ids: tuple[int, ...],
        constraints: ConstraintCompiler | None,
        clock: Callable[[], float],
        exchange: PageExchange | None = None,
    ) -> None:
        """Deadlines are compared with the time of `clock`. `exchange` fetches pages from other servers."""
        self.living: dict[str, Request] = {}
        self._limits = limits
        self._scheduler = scheduler
        self._outbox = outbox
        self._eos_ids = eos_ids
        self._constraints = constraints
        self._clock = clock
        self._exchange = exchange
        self._compiling: dict[Sequence, None] = {}  # sequences that wait for their constraints, in order of arrival
        self._parked: set[Sequence] = set()
        self._deadlines: list[tuple[float, int, str]] = []  # a heap of deadline, arrival and request id; entries may outlive their requests
        self._num_arrived = 0

    @property
    def sequences(self) -> Iterator[Sequence]:
        return (seq for request in self.living.values() for seq in request.sequences)

    # --- arrival ---------------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """Take in a request to generate. Send a failure if it cannot be served. End the choices that have all their tokens already;
        `_constrain` does that for choices that wait for a constraint. If the request names a server, begin to fetch pages from that
        server."""
        try:
            request = self._open(submit)
        except RequestError as error:
            self._outbox.send(Failed(submit.request_id, error.code, error.message))
            return
        self._enter(request)
        for seq in request.sequences:
            if seq.stage is not Stage.FINISHED and seq not in self._compiling and seq.num_known >= seq.max_len:
                self._end(seq, FinishReason.LENGTH)
        if self._exchange is not None and not request.is_finished:
            self._exchange.begin(request)
        self._schedule(request)

    def _schedule(self, request: Request) -> None:
        """Schedule a request, unless it waits for its constraints or for pages of another server."""
        waits = self._exchange is not None and self._exchange.has_waiting(request)
        if not waits and not any(seq in self._compiling for seq in request.sequences):
            self._scheduler.add(request)

    def embed(self, embed: Embed) -> None:
        """Take in a text to embed. Send a failure if it cannot be embedded."""
        try:
            self._require_new(embed.request_id)
            request = open_text(embed, self._num_arrived, limits=self._limits)
        except RequestError as error:
            self._outbox.send(Failed(embed.request_id, error.code, error.message))
            return
        self._enter(request)
        self._scheduler.add(request)

    def _open(self, submit: Submit) -> Request:
        """Return the request of a Submit, with the matchers of its unfinished choices. If the request has a constraint, begin to compile
        it; these choices then wait for the constraint. Without a tokenizer, a constraint on tool calls is ignored. Raise RequestError if
        the request cannot be served: for example, if it has a constraint on the whole answer and there is no tokenizer."""
        self._require_new(submit.request_id)
        request = open_request(submit, self._num_arrived, limits=self._limits, eos_ids=self._eos_ids)
        constraint = submit.params.constraint
        if constraint is not None and constraint.trigger is None and self._constraints is None:
            raise RequestError(ErrorCode.INVALID_SCHEMA, "this model was loaded without a tokenizer, which constraints need")
        bans = Bans(submit.params, request.ender_ids, self._limits.vocab_size)
        for seq in request.sequences:
            if seq.stage is Stage.WAITING:
                emitted = seq.token_ids[seq.num_prompt :]
                grammar = None
                if submit.params.stamps is not None:
                    grammar = StampMatcher(submit.params.stamps, self._limits.vocab_size, emitted)
                elif constraint is not None and self._constraints is not None:
                    self._compiling[seq] = None
                    grammar = self._constraints.open(constraint, emitted, salt=submit.cache_salt, key=submit.fairness_key)
                seq.matcher = matcher_of(bans, grammar, emitted)
        return request

    def _require_new(self, request_id: str) -> None:
        """Raise RequestError if a request with this id is unfinished."""
        if request_id in self.living:
            raise RequestError(ErrorCode.GENERATION_FAILED, f"request_id {request_id} is running already")

    def _enter(self, request: Request) -> None:
        """Add a request to the unfinished ones, and note its deadline."""
        submit = request.submit
        self._num_arrived += 1
        self.living[submit.request_id] = request
        if submit.deadline is not None:
            heapq.heappush(self._deadlines, (submit.deadline, request.arrival, submit.request_id))

    def admit(self) -> None:
        """End expired requests, schedule requests whose constraints are compiled or whose pages have arrived, and resume parked sequences
        whose matchers have answered. Fail requests whose constraints cannot be compiled or followed."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            request = self.living.get(request_id)
            for seq in request.sequences if request is not None and request.arrival == arrival else ():
                self._end(seq, FinishReason.DEADLINE)
        for request in self._exchange.arrived() if self._exchange is not None else ():
            if not request.is_finished:
                self._schedule(request)
        for seq in list(self._compiling):
            if seq in self._compiling:  # an earlier iteration may have failed the request
                try:
                    self._constrain(seq)
                except ConstraintError as error:
                    self._fail(seq.request, _whose(error), str(error))
        for seq in list(self._parked):
            if seq in self._parked:
                try:
                    self._go_on(seq)
                except ConstraintError as error:
                    self.give_up(seq, error)

    def _constrain(self, seq: Sequence) -> None:
        """If the constraint of `seq` is compiled, let `seq` no longer wait for it, and end `seq` if it has all its tokens. Schedule the
        request once no choice waits for its constraint. Raise ConstraintError if the constraint cannot be compiled. Forced tokens are
        appended only after the prompt has run: until then the choices share the prompt, and the first event can report how many tokens of
        the prompt were cached."""
        assert seq.matcher is not None
        if not seq.matcher.poll():
            return
        del self._compiling[seq]
        if (reason := seq.ending) is not None:
            self._end(seq, reason)  # an earlier worker died before it sent the last event of `seq`
        if seq.choosing is not None:
            # The earlier worker has sent tokens of this selection of a tool. Tokens are held back during a selection, so that worker had
            # given the selection up, and this one does the same.
            seq.choosing.let_go()
        self._schedule(seq.request)

    # --- tokens ----------------------------------------------------------------------------------------------------------

    def take(self, seq: Sequence, drawn: Drawn) -> None:
        """Add a drawn token to a sequence, and send what may be sent. Park the sequence if its matcher is late. Fail its request if the
        constraint cannot be followed, or if no token was drawn and no constraint can be dropped."""
        try:
            self._take(seq, drawn)
        except ConstraintError as error:
            self.give_up(seq, error)
        else:
            if seq.is_late:
                self.park(seq)

    def _take(self, seq: Sequence, drawn: Drawn) -> None:
        """Add a drawn token to a sequence, and send what may be sent. If no token was drawn, drop the constraint of a tool call or, if
        there is none, fail the request. If the token cannot continue the selection of a tool, take back the tokens of the selection
        instead. Raise ConstraintError if the constraint cannot be followed."""
        if drawn.error is not None and seq.matcher is not None and seq.matcher.let_go():
            self._take_back(seq, 0)  # the constraint of a tool call left no token to draw, so it is dropped; the request continues
            return
        if drawn.error is not None:
            self._fail(seq.request, drawn.error.code, str(drawn.error))
            return
        if seq.choosing is not None and seq.choosing.refuses(drawn.token_id):
            self._take_back(seq, seq.choosing.take_back())
            return
        reason = seq.append(drawn.token_id)
        joined = [] if seq.stop_token_id is not None else [drawn.token_id]
        logprobs = () if drawn.logprob is None else (drawn.logprob,)
        if seq.matcher is None:
            self._send(seq, tuple(joined), reason, logprobs)
            return
        if reason is None:
            forced, reason = seq.follow()
            joined += forced
        self._tell(seq, joined, reason, logprobs)

    def take_prompt(self, seq: Sequence, logprobs: list[TokenLogprob]) -> None:
        """Collect the log-probabilities of the prompt tokens that come next in `seq`."""
        assert seq.prompt_logprobs is not None, seq
        seq.prompt_logprobs += logprobs

    def park(self, seq: Sequence) -> None:
        """Take `seq` out of the batch until its matcher answers. Other sequences continue."""
        self._scheduler.park(seq)
        self._parked.add(seq)

    def _go_on(self, seq: Sequence) -> None:
        """Continue or end a parked sequence if its matcher has answered. If the matcher has answered with a mask, queue the sequence again.
        If the matcher has answered with its state after the last token, first append the tokens that the matcher forces, or end the
        sequence. The sequence stays parked while the matcher is late; the matcher may be late again after forced tokens. Raise
        ConstraintError if the constraint cannot be followed."""
        assert seq.matcher is not None
        if not seq.matcher.poll():
            return
        forced: list[int] = []
        if not seq.matcher.has_mask:
            reason = seq.ending
            if reason is None:
                forced, reason = seq.follow()
            self._tell(seq, forced, reason)
        if seq.stage is Stage.PARKED and not seq.is_late:
            self._parked.remove(seq)
            self._scheduler.resume(seq)

    def _take_back(self, seq: Sequence, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens, which were not sent to the client, and continue from the token before them."""
        seq.drop(num_tokens)
        self._scheduler.rewind(seq)
        seq.row = seq.row.anew(seq.choice, seq.token_ids[seq.num_prompt :])
        self._tell(seq, *seq.follow())

    def _tell(
        self,
        seq: Sequence,
        token_ids: list[int],
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Send new tokens, after those that were held back. While the matcher selects a tool, hold all of them back."""
        token_ids, logprobs = [*seq.unsent_ids, *token_ids], (*seq.unsent_logprobs, *logprobs)
        if reason is None and seq.choosing is not None:
            seq.unsent_ids, seq.unsent_logprobs = token_ids, logprobs
            return
        seq.unsent_ids, seq.unsent_logprobs = [], ()
        self._send(seq, tuple(token_ids), reason, logprobs)

    def _send(self, seq: Sequence, token_ids: tuple[int, ...], reason: FinishReason | None, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Send tokens of a choice, and end the choice if there is a reason."""
        if reason is not None:
            self._end(seq, reason, token_ids, logprobs)
        elif token_ids:
            self._outbox.add(self._event(seq, token_ids, logprobs))

    def _event(self, seq: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> TokenEvent:
        """Return the event that sends tokens of a choice. The first event of a choice also has the log-probabilities of the prompt, if they
        are complete. Later events have none."""
        request, prompt_logprobs = seq.request, seq.prompt_logprobs
        seq.prompt_logprobs = None
        is_complete = prompt_logprobs is not None and len(prompt_logprobs) == seq.num_prompt
        return TokenEvent(
            request.submit.request_id,
            seq.choice,
            token_ids,
            logprobs,
            seq.finish_reason,
            seq.stop_token_id,
            request.num_cached or 0,
            tuple(prompt_logprobs) if prompt_logprobs is not None and is_complete else (),
        )

    # --- endings ---------------------------------------------------------------------------------------------------------

    def abort(self, abort: Abort) -> None:
        """End one choice of a request, or all of them. Do nothing if the request has ended already."""
        request = self.living.get(abort.request_id)
        if request is None:
            return  # the request has just ended
        for seq in list(request.sequences):
            if abort.choice in (None, seq.choice):
                self._end(seq, FinishReason.ABORT)

    def take_vectors(self, seq: Sequence, rows: NDArray[np.float32], *, is_last: bool) -> None:
        """Collect the vectors of the next tokens of a text, or the vector of its last token. After the last token, end the request and send
        its vectors."""
        request, known = seq.request, seq.prompt_vectors
        assert request.embed is not None, request
        if known is not None:
            known += list(rows.copy())
        if is_last:
            self._drop(request)
            self._outbox.send(embedding_of(request.embed, rows if known is None else known))

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """End a choice for a reason, send its last tokens, and free its pages within this step. If the request is a text to embed, end the
        request. Do nothing if the choice has ended already."""
        if seq.stage is Stage.FINISHED:
            return
        if seq.request.embed is not None:
            self._end_text(seq.request, reason)
            return
        is_compiling = seq in self._compiling
        self._finish(seq)
        seq.finish_reason = reason
        self._outbox.add(self._event(seq, token_ids, logprobs))
        if seq.request.is_finished:
            self._forget(seq.request)
        elif is_compiling:
            self._schedule(seq.request)  # the other choices may have waited only for the constraint of this choice

    def _end_text(self, request: Request, reason: FinishReason) -> None:
        """End a text to embed, whose deadline has passed or which was aborted."""
        if reason is FinishReason.DEADLINE:
            self._fail(request, ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the text was embedded")
        else:
            self._drop(request)  # aborted: nobody waits for an answer

    def give_up(self, seq: Sequence, error: ConstraintError) -> None:
        """Fail the request of `seq`, whose constraint allows no continuation or has lost its process."""
        self._fail(seq.request, _whose(error), f"the constraint cannot be followed: {error}")

    def _fail(self, request: Request, code: ErrorCode, message: str) -> None:
        """Drop a request, and send its failure."""
        self._drop(request)
        self._outbox.send(Failed(request.submit.request_id, code, message))

    def _drop(self, request: Request) -> None:
        """Free the slots, pages and matchers of a request's choices, and forget the request."""
        for seq in request.sequences:
            if seq.stage is not Stage.FINISHED:
                self._finish(seq)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Forget a request that has ended. Remove its references to its sequences: the sequences refer to the request, and only the garbage
        collector, which rarely examines old objects, would free such a cycle. Drop its images and audio, because data kept between steps,
        such as the records of which sequence a page-table row shows, may refer to its sequences for long."""
        del self.living[request.submit.request_id]
        request.sequences.clear()
        request.leader = None
        request.excerpts, request.submit = (), msgspec.structs.replace(request.submit, excerpts=(), audio=None)

    def _finish(self, seq: Sequence) -> None:
        """Free what a sequence holds: its slot, its pages and its matcher. Stop fetching pages for its request if no choice is left."""
        self._compiling.pop(seq, None)
        self._parked.discard(seq)
        self._scheduler.finish(seq)
        if self._exchange is not None and seq.request.is_finished:
            self._exchange.drop(seq.request)
        seq.matcher = None  # this drops the last reference, which may end the matcher's process


def _whose(error: ConstraintError) -> ErrorCode:
    """Return the error code for a failed constraint. The failure is the client's fault, unless the constraint's process was lost."""
    return ErrorCode.GENERATION_FAILED if isinstance(error, ConstraintLost) else ErrorCode.INVALID_SCHEMA
