"""The worker's end of a socket to one constraint process. No call waits longer than the caller allows."""

from __future__ import annotations

import select
import signal
import socket
import time
import weakref
from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import numpy as np

from server.constraints.matcher import ConstraintError, ConstraintLost, ConstraintTooHeavy, Mask
from server.constraints.process.wire import ANSWER, MAX_TEXT_BYTES, Answer, GrammarSettings, num_mask_words
from server.process_state import TIMES, fields_of
from server.signal_names import name_of

LOOK_S = 0.25  # seconds between checks of a process that owes an answer
MAX_IDLE_LOOKS = 8  # a process found idle this often in a row is stopped or stuck
BY_SIGNAL: Mapping[int, Answer] = {
    signal.SIGPROF: Answer.TOO_SLOW,
    signal.SIGABRT: Answer.TOO_LARGE,
}  # signal that ends a process -> exceeded limit
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def no_socket(error: OSError) -> ConstraintLost:
    """Return the error of a constraint whose process cannot be started because of `error`."""
    return ConstraintLost(f"there is no process for the constraint: {error.strerror or error}; try again")


class ProcessSocket:
    """A socket to a process. When the last reference to this object is gone, the socket is closed, which ends the process."""

    def __init__(self, sock: socket.socket, parent: ProcessSocket | None = None, vocab_size: int = 0) -> None:
        """`parent` is the socket to the process that forks the process at the other end. `vocab_size` decides the size of masks."""
        self.answer = Answer.ENDED
        self.number = 0  # the number in the last answer: see `Answer`
        self.took_s = 0.0  # CPU time that the last answer took
        self.pid: int | None = None  # unknown until the process has started
        num_words = num_mask_words(vocab_size)
        sock.setblocking(False)
        self._sock = sock
        self._parent = parent
        weakref.finalize(self, sock.close)
        self._stall = _Stall()
        self._unsent = memoryview(b"")
        self._buffer = bytearray(ANSWER.size + max(4 * num_words, MAX_TEXT_BYTES))
        self._view = memoryview(self._buffer)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._num_read = self._num_payload = 0
        self.mask: Mask = np.frombuffer(self._buffer, np.int32, num_words, ANSWER.size)  # the payload of the last answer, if it is a mask

    @property
    def text(self) -> str:
        """The payload of the last answer as a text."""
        return self._payload.decode(errors="replace")

    @property
    def token_ids(self) -> list[int]:
        """The payload of the last answer as token ids."""
        return array("i", self._payload).tolist()

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. Valid only while no answer is expected."""
        return bool(self._poll.poll(0))

    @property
    def is_stalled(self) -> bool:
        """True if the process that owes an answer is stopped, stuck or gone. Before the process has started, its parent is checked instead.
        Reading this property checks the process, at most once in LOOK_S."""
        return self._stall.look(self.pid or (self._parent.pid if self._parent is not None else None))

    def send(self, data: bytes) -> None:
        """Send `data`. Later calls of `receive` send the bytes that the socket does not accept now."""
        self._unsent = memoryview(bytes(self._unsent) + data)
        self._stall.begin()
        self._flush()

    def open_child(self, vocab_size: int = 0) -> Self:
        """Return a socket to a new child of the process at the other end. If that process cannot be reached, the new socket receives
        `ENDED` at once. Raise OSError if the calling process has no free descriptors now."""
        near, far = socket.socketpair()
        with far, suppress(OSError):
            socket.send_fds(self._sock, [b"\0"], [far.fileno()], socket.MSG_DONTWAIT)
        return type(self)(near, self, vocab_size)

    def receive(self, patience_s: float) -> bool:
        """Receive the next answer into `answer`, `number` and the payload, and return True. Return False if no answer comes within
        `patience_s`. `BORN` only sets `pid`: the answer after it is awaited. `ENDED`, which also stands for a lost connection, is the last
        answer."""
        end_s = time.monotonic() + patience_s
        while True:
            self._flush()
            try:
                self._read()
            except BlockingIOError:
                left_s = end_s - time.monotonic()
                if left_s <= 0.0 or not self._poll.poll(1000 * left_s):
                    return False
            except OSError:
                self.answer, self.number = Answer.ENDED, 0
                return True
            else:
                if self.answer is not Answer.BORN:
                    return True
                self.pid = self.number

    def error(self, settings: GrammarSettings) -> ConstraintError | None:
        """Return the error that the last answer reports, or None if it reports none."""
        match self.answer:
            case Answer.ERROR:
                return ConstraintError(self.text)
            case Answer.TOO_SLOW:
                return ConstraintTooHeavy(
                    f"the tokens took {settings.excess_s:g} s more than the {1000 * settings.slow_s:g} ms allowed each; write the "
                    'constraint so that a text can be parsed in one way only, and repeat with `x*` or `xs: x | xs "," x`'
                )
            case Answer.TOO_LARGE:
                return ConstraintTooHeavy(
                    f"the constraint took more than {settings.memory_bytes >> 20} MiB of memory; use fewer repetitions"
                )
            case Answer.ENDED if self.number in CRASHES:
                return ConstraintTooHeavy(f"the constraint crashes the process that evaluates it ({name_of(self.number)}); simplify it")
            case Answer.ENDED:
                how = f" by {name_of(self.number)}" if self.number else ""
                return ConstraintLost(f"the process of the constraint was ended{how}; try again")
            case _:
                return None

    @property
    def _payload(self) -> bytes:
        """The payload of the last answer."""
        return bytes(self._buffer[ANSWER.size : ANSWER.size + self._num_payload])

    def _flush(self) -> None:
        """Send as many of the unsent bytes as the socket accepts."""
        with suppress(OSError):  # the socket is full or closed; `receive` finds out which
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]

    def _read(self) -> None:
        """Read an answer. If a signal for an exceeded limit has ended the process, the answer names that limit. Raise BlockingIOError if
        the answer has not arrived whole, or another OSError if the process is gone."""
        self._fill(ANSWER.size)
        answer, self.number, self.took_s, self._num_payload = ANSWER.unpack_from(self._buffer)
        self._fill(ANSWER.size + self._num_payload)
        self._num_read = 0
        self.answer = BY_SIGNAL.get(self.number, Answer.ENDED) if answer == Answer.ENDED else Answer(answer)

    def _fill(self, num_bytes: int) -> None:
        """Read until the buffer has `num_bytes` bytes of the answer. Raise BlockingIOError if they have not arrived, or another OSError if
        the process is gone."""
        while self._num_read < num_bytes:
            num_more = self._sock.recv_into(self._view[self._num_read : num_bytes])
            if not num_more:
                raise ConnectionResetError
            self._num_read += num_more


class _Stall:
    """Detects a stalled process by counting checks, not seconds: seconds would also pass while the whole machine is suspended."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start to count again, because a question was sent."""
        self._looked_s = time.monotonic()
        self._num_idle = 0
        self._seen: tuple[int, str] | None = None

    def look(self, pid: int | None) -> bool:
        """Check the process if the last check was LOOK_S ago or earlier. Return whether the process is stalled. `pid` is None while it is
        unknown: the process then counts as not stalled."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            seen = None if pid is None else _cpu_ticks_if_idle(pid)
            is_idle = pid is not None and seen is not None and self._seen in (None, (pid, seen))
            self._seen = (pid, seen) if pid is not None and seen is not None else None
            self._num_idle = self._num_idle + 1 if is_idle else 0
        return self._num_idle >= MAX_IDLE_LOOKS


def _cpu_ticks_if_idle(pid: int) -> str | None:
    """Return the CPU time that a process has used, as a text, or "gone" if it has ended. Return None while it runs, waits for the CPU, or
    waits for a disk."""
    try:
        fields = fields_of(pid)
    except OSError:
        return "gone"  # the process has ended, and so has its parent, the fork server, which should have written Answer.ENDED
    return None if fields[0] in "RD" else " ".join(fields[TIMES][:2])
