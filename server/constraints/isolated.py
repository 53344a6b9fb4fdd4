"""A matcher whose grammar runs in a separate process. For each answer of that process, a step waits at most PATIENCE_S, so that a slow
grammar does not hold up other sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from server.constraints.grammar import Grammar
from server.constraints.matcher import LATE, ConstraintError, ConstraintLost, Late, Mask, Matcher
from server.constraints.process.process_socket import ProcessSocket, no_socket
from server.constraints.process.wire import Answer, Question, question
from server.constraints.retries import Retries

PATIENCE_S = 0.02  # longest time that a step waits for an answer


class IsolatedMatcher(Matcher):
    """Follows a grammar in a process that serves only this sequence. The process starts with the first question and ends with the matcher.
    If the process is lost, a new process gets all tokens again, since only the tokens decide what may come next."""

    def __init__(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> None:
        self.refused: list[int] = []  # the last tokens, from the first one that the grammar refused on; empty: it refused none
        self._grammar = grammar
        self._socket: ProcessSocket | None = None
        self._retries = Retries()
        self._token_ids = list(token_ids)
        self._num_sent = 0  # number of tokens sent to the current process
        self._asked: Question | None = None  # the question that is not answered yet
        self._is_put = False  # the current process has the question, or will send the answer, a mask, without being asked
        self._give_way_s = 0.0  # monotonic time until which the present step waits for the answer
        self._is_slow = {Question.STATE: False, Question.MASK: False}  # by kind of question: whether the last answer was slow
        self._comes_mask = False  # the process will send a mask without being asked
        self._forced: list[int] | None = None  # tokens that must come next; None: unknown
        self._prefetched: list[int] = []  # the token that `prefetch` has added, until `advance` is called with it
        self._has_mask = False  # `_socket.mask` is the mask after the present tokens
        self._is_complete = False
        if token_ids:
            self._ask(Question.STATE)

    @property
    def num_followed(self) -> int:
        """The number of tokens before the first one that the grammar refused."""
        return len(self._token_ids) - len(self.refused)

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    @property
    def is_late(self) -> bool:
        return self._asked is not None

    @property
    def has_mask(self) -> bool:
        return self._has_mask

    def poll(self) -> bool:
        """Receive the answer to the open question if it has arrived, and return whether it has. If no question is open, return whether the
        grammar is compiled, or the process of the sequence has been started."""
        if self._asked is None:
            return self._socket is not None or self._grammar.poll()
        self._wait(0.0)
        return not self.is_late

    def prefetch_mask(self) -> None:
        if not self._has_mask and self._asked is None:
            self._ask(Question.MASK)

    def prefetch(self, token_id: int) -> None:
        self._take([token_id])
        self._prefetched = [token_id]

    def mask(self) -> Mask | Literal[Late.LATE]:
        """Return the mask of the next token. Return LATE if it does not arrive in time: within PATIENCE_S of the question or, if the last
        mask was slow, at once."""
        self.prefetch_mask()
        self._wait()
        return self._socket.mask if self._has_mask and self._socket is not None else LATE

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow further tokens, unless `prefetch` has added them already. Wait at most PATIENCE_S for the answer about the state after
        these tokens."""
        if self._prefetched == list(token_ids):
            self._prefetched = []
        else:
            self._take(token_ids)
        self._wait()

    def forced(self) -> list[int]:
        """Return the tokens that must come next, or none if they do not arrive in time: within PATIENCE_S of the question or, if the last
        answer about the state was slow, at once."""
        if self._forced is None and self._asked is None:
            self._ask(Question.STATE)
            self._wait()
        return list(self._forced or [])

    # --- questions -------------------------------------------------------------------------------------------------------

    def _take(self, token_ids: Sequence[int]) -> None:
        """Add tokens, and ask for the state after these. Do not ask if the new tokens are the first of several forced tokens: the other
        forced tokens then stay known."""
        self._has_mask = False
        self._token_ids += token_ids
        num_known, forced = len(token_ids), self._forced or []
        if len(forced) > num_known and forced[:num_known] == list(token_ids):
            self._forced = forced[num_known:]  # the new tokens are the first forced ones, so the other forced tokens stay known
        else:
            self._ask(Question.STATE)

    def _ask(self, kind: Question) -> None:
        """Ask the process a question, and decide how long the present step may wait for the answer."""
        assert self._asked is None, "one question at a time"
        self._asked = kind
        # Do not wait for a sequence whose last answer was slow: each of its tokens would delay all other sequences.
        self._give_way_s = time.monotonic() + (0.0 if self._is_slow[kind] else PATIENCE_S)
        # After an answer about the state, the process sends the next mask unasked. The mask is valid unless tokens were added meanwhile.
        self._is_put = kind is Question.MASK and self._comes_mask and self._num_sent == len(self._token_ids)
        if kind is Question.STATE:
            self._forced = None
        with suppress(ConstraintError):  # `_wait` raises it
            self._put()

    def _put(self) -> None:
        """Send the open question to the process, unless the process has it or will answer it unasked. If there is no process, start one; do
        nothing while the grammar is being compiled, or while it is too early to replace a lost process. Raise ConstraintError if the
        grammar cannot be compiled, or if too many processes were lost."""
        if self._socket is None:
            if not self._retries.is_due:
                return
            try:
                self._socket = self._grammar.open_child()
            except OSError as error:
                self._lose(no_socket(error))
                return
            self._num_sent, self._is_put, self._comes_mask = 0, False, False
        if self._socket is not None and not self._is_put:
            assert self._asked is not None
            self._socket.send(question(self._asked, self._token_ids[self._num_sent :]))
            self._num_sent = len(self._token_ids)
            self._is_put = True

    # --- answers ---------------------------------------------------------------------------------------------------------

    def _wait(self, patience_s: float | None = None) -> None:
        """Wait for the answer to the open question, if there is one: for `patience_s` seconds or, if that is None, until `_give_way_s`.
        Raise ConstraintError if the constraint cannot be followed."""
        while self._asked is not None:
            self._put()
            socket = self._socket
            if socket is None:
                return  # the grammar is being compiled, or a lost process has not been replaced yet
            if not socket.receive(max(self._give_way_s - time.monotonic(), 0.0) if patience_s is None else patience_s):
                if socket.is_stalled:
                    if socket.pid is None:
                        self._grammar.compile_again()  # the grammar's process did not fork, so that process is stopped or stuck
                    self._lose(ConstraintLost("the process of the constraint was stopped; try again"))
                return
            if socket.answer is Answer.ENDED:
                error = socket.error(self._grammar.settings)
                assert error is not None
                self._lose(error)
            else:
                self._hear(socket)

    def _hear(self, socket: ProcessSocket) -> None:
        """Handle an answer, which may be the mask that the process sends unasked. Raise ConstraintError if the grammar refuses a token,
        fails or exceeds a limit."""
        if (error := socket.error(self._grammar.settings)) is not None:
            raise error
        is_slow = socket.took_s > self._grammar.settings.slow_s
        answered = Question.MASK if socket.answer is Answer.MASK else Question.STATE
        self._is_slow[answered] = is_slow
        if answered is Question.STATE:
            self._is_complete, self._forced = socket.answer is Answer.COMPLETE, socket.token_ids
            self.refused = self._token_ids[len(self._token_ids) - socket.number :] if socket.number else []
            self._comes_mask = not (self._is_complete or self._forced or self.refused)
        else:
            self._comes_mask = False
        if answered is self._asked:
            self._has_mask = answered is Question.MASK
            self._asked = None
            self._retries.answered()
        if self.refused:
            raise ConstraintError("the grammar does not allow the tokens drawn so far")

    def _lose(self, error: ConstraintError) -> None:
        """Give up the process; `_put` starts another one later. Raise `error` if too many processes were lost."""
        self._socket = None
        self._retries.lost(error)
