"""The process that holds the grammars clients write: `python -m server.engine.grammars`, started by a worker with the first of them.

    worker ── this process ── a process per grammar ── a process per sequence

A grammar is input of a stranger, and nothing but the kernel interrupts a mask that is being made: so each process below this one may
use so much of the processor and of memory, and ends where it takes more. All are forks: they share the tokenizer's memory and have no
threads. Each serves the socket that is its standard input, whose other end the worker has, and goes when that is closed.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import struct
import time
import traceback
from array import array
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

QUESTION = struct.Struct("<BxxxI")  # what is asked, the number of tokens to take in before
ANSWER = struct.Struct("<BBxxfI")  # what it is, a detail of it, seconds of the processor, bytes that follow
MOST_BYTES = 4096  # of what follows an answer, unless it is a mask
SLACK_S = 0.01  # a timer is no more exact than that, and none at 0


class Ask(IntEnum):
    STATE = 1
    MASK = 2


class Tell(IntEnum):
    STATE = 1  # detail: whether the grammar is complete; the tokens that are forced follow
    MASK = 2
    ERROR = 3  # its text follows
    TOO_SLOW = 4
    TOO_LARGE = 5
    ENDED = 6  # said by the parent of who should have answered; detail: the signal that ended it


class Terms(msgspec.Struct, frozen=True):
    """What all grammars share, and what each may use."""

    tokenizer_json: str
    eos_ids: list[int]
    vocab_size: int
    grammar_size: int
    initial_fuel: int
    compile_s: float
    slow_s: float  # for a token
    excess_s: float  # beyond that, in all tokens of a sequence
    memory_bytes: int  # of a process, beyond what it shares


def main() -> None:
    control = socket.socket(fileno=0)
    terms = msgspec.msgpack.decode(read_text(control), type=Terms)
    try:
        tokenizer = open_tokenizer(terms.tokenizer_json, terms.eos_ids, terms.vocab_size)
    except ValueError as error:
        tokenizer = str(error)
    _bound_memory(terms.memory_bytes)
    gc.freeze()
    gc.disable()
    Parent(control, lambda sock: _serve_grammar(sock, tokenizer, terms)).run(outlasted=True)
    os.killpg(0, signal.SIGKILL)  # the worker is gone: with all that may still be at work


def open_tokenizer(tokenizer_json: str, eos_ids: list[int], vocab_size: int) -> LLTokenizer:
    """Raises ValueError."""
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_ids or None)
    except ValueError as error:
        raise ValueError(f"this model's tokenizer cannot be constrained: {error}") from error


def open_matcher(tokenizer: LLTokenizer, kind: str, grammar: str, bounds: LLParserLimits) -> LLMatcher:
    """Raises ValueError."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=bounds)
    if matcher.is_error():
        raise ValueError(f"the {kind} cannot be compiled: {matcher.get_error()}")
    return matcher


class Parent:
    """Forks a child for every socket that comes over `control`, and sees to its end: one whose socket was closed is told to go, and
    for one that ends before its time a last word is said."""

    def __init__(self, control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._control = control
        self._serve = serve
        self._children: dict[int, socket.socket] = {}
        self._poll = select.poll()

    def run(self, *, outlasted: bool) -> None:
        """Until `control` is closed, and unless children may outlast it, until none is left."""
        wakened, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(wakened, select.POLLIN)
        self._poll.register(self._control, select.POLLIN)
        is_open = True
        while is_open or (self._children and not outlasted):
            ready = {fd for fd, _ in self._poll.poll()}
            # In this order: a number that is let go of may be taken again at once.
            for fd in ready - {wakened, self._control.fileno()}:
                self._dismiss(fd)
            if self._control.fileno() in ready:
                is_open = self._receive()
            if wakened in ready:
                os.read(wakened, 4096)
                self._reap()

    def _receive(self) -> bool:
        """False when nothing will come any more."""
        try:
            _, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            fds = []
        if not fds:
            self._poll.unregister(self._control)
            return False
        sock = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError as error:
            _answer(sock, Tell.ERROR, f"no process for it: {error}".encode())
            sock.close()
            return True
        if pid == 0:
            _become(sock, self._serve)
        self._children[pid] = sock
        self._poll.register(sock, 0)  # when its other end is closed, and nothing else
        return True

    def _dismiss(self, fd: int) -> None:
        self._poll.unregister(fd)
        for pid, sock in self._children.items():
            if sock.fileno() == fd:
                os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                sock = self._children.pop(pid)
                with suppress(KeyError):
                    self._poll.unregister(sock)
                _answer(sock, Tell.ENDED, detail=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
                sock.close()


def _become(sock: socket.socket, serve: Callable[[socket.socket], None]) -> NoReturn:
    """A child's life: nothing is left of its parent's sockets."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(sock.fileno(), 0)
        os.closerange(3, 1 << 20)
        own = socket.socket(fileno=0)
        try:
            serve(own)
        except MemoryError:
            _answer(own, Tell.TOO_LARGE)
        status = 0
    except ConnectionError:
        pass  # the worker has hung up
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve_grammar(sock: socket.socket, tokenizer: LLTokenizer | str, terms: Terms) -> None:
    source = read_text(sock).decode()
    if isinstance(tokenizer, str):
        _answer(sock, Tell.ERROR, tokenizer.encode())
        return
    bounds = LLParserLimits(initial_lexer_fuel=terms.initial_fuel, max_grammar_size=terms.grammar_size, verbose_errors=False)
    signal.setitimer(signal.ITIMER_PROF, terms.compile_s)
    try:
        matcher = open_matcher(tokenizer, "grammar", LLMatcher.grammar_from_lark(source), bounds)
    except ValueError as error:
        _answer(sock, Tell.ERROR, str(error).encode())
        return
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on it stays for as long as a sequence does
    _answer(sock, Tell.STATE)
    Parent(sock, lambda own: _serve_sequence(own, matcher, terms)).run(outlasted=False)


def _serve_sequence(sock: socket.socket, matcher: LLMatcher, terms: Terms) -> None:
    """Behind a state comes the mask unasked, unless there is no choice: so it is made while the worker does other things."""
    meter = _Meter(terms)
    while question := _read_question(sock):
        ask, token_ids = question
        meter.start(len(token_ids) + 1)
        matcher.consume_tokens(token_ids)
        num_tokens = len(token_ids)
        if ask == Ask.STATE:
            is_complete, forced = matcher.is_stopped(), matcher.compute_ff_tokens()
            meter.count(num_tokens)
            told = array("i", forced[: MOST_BYTES // 4]).tobytes()
            if not _tell(sock, Tell.STATE, told, matcher, meter, detail=is_complete) or is_complete or forced:
                continue
            num_tokens = 0
        mask = matcher.compute_bitmask()
        meter.count(num_tokens + 1)
        _tell(sock, Tell.MASK, mask, matcher, meter)


def _read_question(sock: socket.socket) -> tuple[int, list[int]] | None:
    """What is asked, and the tokens to take in before; None where the other end was closed."""
    found = sock.recv(4096)  # as a rule all of it
    if not found:
        return None
    found += _read(sock, QUESTION.size - len(found))
    ask, num_tokens = QUESTION.unpack_from(found)
    found += _read(sock, QUESTION.size + 4 * num_tokens - len(found))
    return ask, array("i", found[QUESTION.size :]).tolist()


class _Meter:
    """Of the processor's time that a sequence takes. Where it has no more, the process ends, in native code too: so a signal does that no
    handler is set for."""

    def __init__(self, terms: Terms) -> None:
        self.took_s = 0.0  # what was counted last
        self._terms = terms
        self._left_s = terms.excess_s  # beyond what tokens regularly take
        self._began_s = 0.0

    @property
    def is_spent(self) -> bool:
        return self._left_s < 0.0

    def start(self, num_tokens: int) -> None:
        signal.setitimer(signal.ITIMER_PROF, max(self._left_s, 0.0) + num_tokens * self._terms.slow_s + SLACK_S)
        self._began_s = time.process_time()

    def count(self, num_tokens: int) -> None:
        """What was done since then, for so many tokens."""
        now_s = time.process_time()
        self.took_s, self._began_s = now_s - self._began_s, now_s
        self._left_s -= max(self.took_s - num_tokens * self._terms.slow_s, 0.0)


def _tell(sock: socket.socket, tell: Tell, told: bytes, matcher: LLMatcher, meter: _Meter, *, detail: int = 0) -> bool:
    """False where it is an error that is told instead."""
    if matcher.is_error():
        _answer(sock, Tell.ERROR, matcher.get_error().encode())
    elif meter.is_spent:
        _answer(sock, Tell.TOO_SLOW)
    else:
        _answer(sock, tell, told, detail=detail, took_s=meter.took_s)
        return True
    return False


def _answer(sock: socket.socket, tell: Tell, told: bytes = b"", *, detail: int = 0, took_s: float = 0.0) -> None:
    if tell is not Tell.MASK:
        told = told[:MOST_BYTES]
    with suppress(ConnectionError):  # who hangs up is seen by the next look
        sock.sendall(ANSWER.pack(tell, detail, took_s, len(told)) + told)


def _bound_memory(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def write_text(sock: socket.socket, text: bytes) -> None:
    sock.sendall(len(text).to_bytes(8, "little"))
    sock.sendall(text)


def read_text(sock: socket.socket) -> bytes:
    return _read(sock, int.from_bytes(_read(sock, 8), "little"))


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    """Fewer where the other end was closed."""
    found = bytearray()
    while len(found) < num_bytes and (more := sock.recv(num_bytes - len(found))):
        found += more
    return bytes(found)


if __name__ == "__main__":
    main()
