"""A grammar that a separate process compiles and keeps. If that process is lost, the grammar is compiled again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from server.constraints.compile_slots import CompileSlots
from server.constraints.matcher import ConstraintError, ConstraintLost, ConstraintTooHeavy
from server.constraints.process.process_socket import ProcessSocket, no_socket
from server.constraints.process.wire import Answer, GrammarSettings, Source, framed
from server.constraints.process.zygote import Zygote
from server.constraints.retries import Retries

log = logging.getLogger(__name__)


class Grammar:
    """A grammar and its process. The process starts with the first `poll` that gets a slot for compiling (see `CompileSlots`). The process
    ends with the last reference to the grammar, or if the grammar cannot be compiled."""

    def __init__(
        self,
        source: Source,
        settings: GrammarSettings,
        zygote: Zygote,
        slots: CompileSlots,
        on_compiled: Callable[[Grammar], None],
        *,
        salt: str = "",
        key: str = "",
    ) -> None:
        """`on_compiled` is called each time the grammar has been compiled. `salt`: only requests with this salt use the grammar. `key`
        identifies the API key whose request was the first with this grammar."""
        self.source = source
        self.salt = salt
        self.key = key
        self.settings = settings
        self.memory_bytes = 0  # memory of the grammar's process that it does not share with the zygote
        self.error: ConstraintError | None = None  # why it cannot be compiled, or why its process was lost too often; `poll` raises it
        self._zygote = zygote
        self._slots = slots
        self._on_compiled = on_compiled
        self._socket: ProcessSocket | None = None
        self.is_compiled = False
        self._retries = Retries()

    def poll(self) -> bool:
        """Do the steps of compiling that are possible without waiting. Return whether the grammar is compiled. Raise ConstraintError if it
        cannot be compiled, or if its process was lost too often; each later call then raises the same error."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        try:
            while not self.is_compiled and self._proceed():
                pass
        except ConstraintError as error:
            self.error = error
            self._socket = None
            self._slots.give_back(self)
            raise
        return self.is_compiled

    def open_child(self) -> ProcessSocket | None:
        """Return the socket to a new process for a sequence, or None while the grammar is being compiled. If the grammar's own process has
        ended, compile the grammar again. Raise ConstraintError if the grammar cannot be compiled, or OSError if the calling process has no
        free descriptors now."""
        if self.is_compiled and self._socket is not None and self._socket.has_ended:
            self.compile_again()
        return self._socket.open_child(self.settings.vocab_size) if self.poll() and self._socket is not None else None

    def compile_again(self) -> None:
        """Give up the grammar's process. A later `poll` starts another one."""
        self._socket = None
        self.is_compiled = False

    def _proceed(self) -> bool:
        """Do the next step of compiling: start the grammar's process if there is none, and receive its answer if that has arrived. Return
        False if the step has to wait. Raise ConstraintError if the grammar cannot be compiled, or if too many processes were lost."""
        socket = self._socket
        if socket is None:
            if not self._retries.is_due or not self._slots.take(self, self.key):
                return False
            try:
                self._socket = socket = self._zygote.open_child()
            except OSError as error:
                self._lose(no_socket(error))
                return False
            socket.send(framed(msgspec.msgpack.encode(self.source)))
        if socket.receive(0.0):
            self._hear(socket)
            return True
        if socket.is_stalled:
            if socket.pid is None:
                self._zygote.kill()  # the zygote did not fork, so the zygote itself is stopped or stuck
            self._lose(ConstraintLost("the process of the constraint was stopped; try again"))
        return False

    def _hear(self, socket: ProcessSocket) -> None:
        """Handle the answer of the grammar's process. If the process has ended, give it up, and let a later `poll` start another one. Raise
        ConstraintError if the grammar cannot be compiled, or if too many processes were lost."""
        if socket.answer is Answer.COMPILED:
            self.memory_bytes = socket.number << 10
            if faults := socket.text:
                log.warning(
                    "schemas of offered tools cannot be compiled, so the arguments that they describe are not held to them: %s", faults
                )
            self.is_compiled = True
            self._retries.answered()
            self._slots.give_back(self)
            self._on_compiled(self)
            return
        if socket.answer is Answer.TOO_SLOW:
            raise ConstraintTooHeavy(
                f"compiling the {self.source.kind} took more than {self.settings.compile_s:g} s of CPU time: simplify it"
            )
        error = socket.error(self.settings)
        assert error is not None, socket.answer
        if socket.answer is not Answer.ENDED:
            raise error
        self._lose(error)

    def _lose(self, error: ConstraintError) -> None:
        """Give up the grammar's process; a later `poll` starts another one. Raise `error` if too many processes were lost."""
        self._socket = None
        self._retries.lost(error)
