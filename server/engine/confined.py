"""Grammars that clients wrote, as the worker sees them: each compiled and followed in processes of its own (`server.engine.grammars`).

A matcher here asks and waits no longer than a step can bear. What takes longer is late: the engine goes on without the sequence until
it is there. So a clock decides when a row is drawn, and never what.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.engine.grammars import ANSWER, MOST_BYTES, QUESTION, Ask, Tell, Terms, write_text
from server.engine.matcher import TOO_SLOW, ConstraintError, ConstraintLost, ConstraintTooHeavy

COMMAND = (sys.executable, "-P", "-m", "server.engine.grammars")
PATIENCE_S = 0.05  # from question to answer
_BY_SIGNAL = {signal.SIGPROF: Tell.TOO_SLOW, signal.SIGABRT: Tell.TOO_LARGE}  # the latter by code that is not Python's


class GrammarProcess:
    """The process that all of them come from. It is started with the first grammar, and again if it ended."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def compile(self, source: str) -> ConfinedGrammar:
        """Waits for it. Raises ConstraintError."""
        try:
            near = _hand_over(self._started())
        except OSError as error:
            raise ConstraintLost(f"the process of grammars cannot be started: {error}") from error
        line = Line(near)
        with suppress(OSError):  # it has told why
            write_text(near, source.encode())
        line.receive(None)
        if line.tell is Tell.TOO_SLOW:
            raise ConstraintError(f"compiling the grammar took more than {self._terms.compile_s:g} s of the processor: simplify it")
        if (error := line.error(self._terms)) is not None:
            raise error
        return ConfinedGrammar(line, self._terms)

    def close(self) -> None:
        """With all that came of it, whatever it does: who is about to start it hears of that first."""
        self._is_closed = True
        self._kill()
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        with self._lock:
            if self._control is not None and self._process is not None and self._process.poll() is None:
                return self._control
            self._end()
            if self._is_closed:
                raise ConnectionError("the model is being unloaded")
            near, far = socket.socketpair()
            with far:
                # In a group of its own, to be ended with all its descendants.
                self._process = subprocess.Popen(COMMAND, stdin=far.fileno(), process_group=0)
            self._control = near
            write_text(near, msgspec.msgpack.encode(self._terms))
            return near

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self._kill()
        if self._process is not None:
            self._process.wait()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None


class ConfinedGrammar:
    """One that is compiled. Its process stays until this is let go of, and its last sequence has ended."""

    def __init__(self, line: Line, terms: Terms) -> None:
        self.terms = terms
        self._line = line

    @property
    def is_alive(self) -> bool:
        """It says nothing more unless its process has ended."""
        return not self._line.has_more

    def begin(self) -> socket.socket:
        """A process for a sequence of it."""
        return _hand_over(self._line.sock)


class ConfinedMatcher:
    """How far one sequence has come in a client's grammar. Its process begins with the first question, and ends when this is let go of."""

    def __init__(self, grammar: ConfinedGrammar) -> None:
        self.is_complete = False
        self.has_mask = False
        self._grammar = grammar
        self._line: Line | None = None
        self._asked: Ask | None = None  # and not answered
        self._give_way_s = 0.0
        self._is_slow = {Ask.STATE: False, Ask.MASK: False}  # the last time
        self._comes_mask = False  # unasked
        self._forced: list[int] | None = None  # None: not known
        self._unsent: list[int] = []
        self._foreseen: list[int] = []

    @property
    def is_late(self) -> bool:
        """What was asked is not answered; until it is, nothing else may be asked."""
        return self._asked is not None

    def ask_mask(self) -> None:
        """Let it be made. Those of a step are made side by side."""
        if self.has_mask or self._asked is not None:
            return
        if self._comes_mask and not self._unsent:
            self._expect(Ask.MASK)
        else:
            self._ask(Ask.MASK)

    def mask(self) -> NDArray[np.int32] | None:
        """One bit per token, set where it may come next. Valid until the next call; None if it is late."""
        self.ask_mask()
        self._wait()
        return self._line.mask if self.has_mask and self._line is not None else None

    def advance(self, token_ids: Sequence[int]) -> None:
        if self._foreseen == list(token_ids):
            self._foreseen = []
        else:
            self._take(token_ids)
        self._wait()

    def foresee(self, token_id: int) -> None:
        """It will be advanced by this token, unless it ends. Those of a step are taken in side by side."""
        self._take([token_id])
        self._foreseen = [token_id]

    def forced(self) -> list[int]:
        """The tokens that must come next, where there is no choice; none as long as the answer is late."""
        if self._forced is None and self._asked is None:
            self._ask(Ask.STATE)
            self._wait()
        return list(self._forced or [])

    def poll(self) -> bool:
        """Whether what was late is there."""
        self._wait(0.0)
        return self._asked is None

    def _take(self, token_ids: Sequence[int]) -> None:
        self.has_mask = False
        self._unsent += token_ids
        num_known, forced = len(token_ids), self._forced or []
        if len(forced) > num_known and forced[:num_known] == list(token_ids):
            self._forced = forced[num_known:]  # it goes on, and how is known
        else:
            self._ask(Ask.STATE)

    def _ask(self, ask: Ask) -> None:
        assert self._asked is None, "one question at a time"
        if self._line is None:
            self._line = Line(self._grammar.begin(), self._grammar.terms.vocab_size)
        if ask is Ask.STATE:
            self._forced = None
        self._line.send(QUESTION.pack(ask, len(self._unsent)) + array("i", self._unsent).tobytes())
        self._unsent = []
        self._expect(ask)

    def _expect(self, ask: Ask) -> None:
        self._asked = ask
        # One that was slow is not waited for: it would hold up the others with each of its tokens.
        self._give_way_s = time.monotonic() + (0.0 if self._is_slow[ask] else PATIENCE_S)

    def _wait(self, patience_s: float | None = None) -> None:
        if self._asked is None:
            return
        assert self._line is not None
        if patience_s is None:
            patience_s = max(self._give_way_s - time.monotonic(), 0.0)
        while self._line.receive(patience_s):
            if (error := self._line.error(self._grammar.terms)) is not None:
                raise error
            is_slow = self._line.took_s > self._grammar.terms.slow_s
            if self._line.tell is Tell.STATE:
                self._is_slow[Ask.STATE] = is_slow
                self.is_complete, self._forced = bool(self._line.detail), self._line.token_ids
                self._comes_mask = not self.is_complete and not self._forced
            else:
                self._is_slow[Ask.MASK] = is_slow
                self._comes_mask = False
            if (self._line.tell is Tell.MASK) == (self._asked is Ask.MASK):
                self.has_mask = self._asked is Ask.MASK
                self._asked = None
                return


class Line:
    """To one process, which goes when this does: its answers as they come, in pieces or at once."""

    def __init__(self, sock: socket.socket, vocab_size: int = 0) -> None:
        self.tell = Tell.ENDED
        self.detail = 0
        self.took_s = 0.0
        num_words = -(-vocab_size // 32)
        self.sock = sock
        weakref.finalize(self, sock.close)
        self._buffer = bytearray(ANSWER.size + max(4 * num_words, MOST_BYTES))
        self._view = memoryview(self._buffer)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._num_read = self._num_told = 0
        self.mask = np.frombuffer(self._buffer, np.int32, num_words, ANSWER.size)

    @property
    def token_ids(self) -> list[int]:
        return array("i", self._told).tolist()

    @property
    def _told(self) -> bytes:
        return bytes(self._buffer[ANSWER.size : ANSWER.size + self._num_told])

    @property
    def has_more(self) -> bool:
        return bool(self._poll.poll(0))

    def send(self, question: bytes) -> None:
        with suppress(OSError):  # it has ended: that is what it answers
            self.sock.sendall(question)

    def receive(self, patience_s: float | None) -> bool:
        """False if the answer is not there yet. No answer is the last one."""
        try:
            return self._read()
        except BlockingIOError:
            ready = self._poll.poll(None if patience_s is None else 1000 * patience_s) if patience_s != 0.0 else []
            return bool(ready) and self.receive(patience_s)
        except ConnectionError:
            self.tell, self.detail = Tell.ENDED, 0
            return True

    def error(self, terms: Terms) -> ConstraintError | None:
        match self.tell:
            case Tell.STATE | Tell.MASK:
                return None
            case Tell.ERROR:
                return ConstraintError(self._told.decode(errors="replace"))
            case Tell.TOO_SLOW:
                return ConstraintTooHeavy(TOO_SLOW)
            case Tell.TOO_LARGE:
                return ConstraintTooHeavy(f"it took more than {terms.memory_bytes >> 20} MiB of memory")
            case Tell.ENDED:
                how = f" by {signal.Signals(self.detail).name}" if self.detail else ""
                return ConstraintLost(f"the process of this grammar was ended{how}")

    def _read(self) -> bool:
        self._fill(ANSWER.size)
        tell, self.detail, self.took_s, self._num_told = ANSWER.unpack_from(self._buffer)
        self.tell = _BY_SIGNAL.get(self.detail, Tell.ENDED) if tell == Tell.ENDED else Tell(tell)
        self._fill(ANSWER.size + self._num_told)
        self._num_read = 0
        return True

    def _fill(self, num_bytes: int) -> None:
        while self._num_read < num_bytes:
            num_more = self.sock.recv_into(self._view[self._num_read : num_bytes], 0, socket.MSG_DONTWAIT)
            if not num_more:
                raise ConnectionResetError
            self._num_read += num_more


def _hand_over(control: socket.socket) -> socket.socket:
    """One end of a new pair of sockets goes to the process behind `control`, for a child of it to serve. Nobody does if that is gone."""
    near, far = socket.socketpair()
    with far, suppress(OSError):
        socket.send_fds(control, [b"\0"], [far.fileno()])
    return near
