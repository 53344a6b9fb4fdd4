"""The zygote of a model's constraints: `python -m server.constraints.process.main FD PARENT`, started by the worker.

    worker ── zygote ── a process per grammar ── a process per sequence

Constraints come from untrusted clients, and only the kernel can interrupt native code that computes a mask. So each grammar is compiled,
and each sequence followed, in a process with limited CPU time and memory, which ends when it exceeds them. All these processes are forks of
the zygote. So they share the tokenizer without a copy, and the processes of sequences share the compiled grammar. Each process has one
thread. Each process serves a socket, which is its standard input; the worker has the other end.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from array import array
from itertools import takewhile
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runtime import generated_code
from server.constraints.process.fork_server import ForkServer, die_with
from server.constraints.process.sources import grammar_of, without_faults
from server.constraints.process.vocabulary import tokenizer_of
from server.constraints.process.wire import (
    MAX_TEXT_BYTES,
    Answer,
    GrammarSettings,
    Question,
    Source,
    num_mask_words,
    read_framed,
    read_question,
    write_answer,
)
from server.free_memory import return_free_memory
from server.isolated.cpu_timer import CpuTimer
from server.isolated.limits import bound_memory

TIMER_SLACK_S = 0.01  # added to every timer, for its resolution and because a timer of 0 seconds would be off


def main(settings_fd: str, parent_pid: str) -> None:
    """Run the zygote until the worker closes its socket. `settings_fd` is the descriptor of a file with the settings and tokenizer.json."""
    die_with(int(parent_pid))
    generated_code.keep()
    # When the zygote ends, the kernel sends SIGHUP and SIGCONT to its stopped descendants. SIGHUP must end them, so let it do so even if
    # this process was started under nohup, which makes processes ignore it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    tokenizer, settings = _read(Path(f"/proc/self/fd/{settings_fd}"))
    return_free_memory()
    bound_memory(settings.memory_bytes)
    gc.freeze()
    gc.disable()
    ForkServer(socket.socket(fileno=0), lambda sock: _serve_grammar(sock, tokenizer, settings)).run()


def _read(file: Path) -> tuple[LLTokenizer | str, GrammarSettings]:
    """Return the tokenizer, or an error message if it cannot be used, and the settings."""
    settings, tokenizer_json = msgspec.msgpack.decode(file.read_bytes(), type=tuple[GrammarSettings, bytes])
    return tokenizer_of(tokenizer_json, settings), settings


def _serve_grammar(sock: socket.socket, tokenizer: LLTokenizer | str, settings: GrammarSettings) -> None:
    """Compile the grammar that arrives on a socket. If it cannot be compiled, or if `tokenizer` is an error message, answer with the error
    and return. Otherwise answer that it is compiled, and fork a process for each sequence until the worker closes the socket."""
    source = msgspec.msgpack.decode(read_framed(sock), type=Source)
    timer = CpuTimer()
    timer.start(settings.compile_s)
    try:
        if isinstance(tokenizer, str):
            raise ValueError(tokenizer)
        matcher, faults = _compiled(tokenizer, source, settings)
    except ValueError as error:
        write_answer(sock, Answer.ERROR, str(error).encode())
        return
    finally:
        timer.stop()
    write_answer(sock, Answer.COMPILED, "; ".join(faults).encode(), number=_own_memory_kib())
    ForkServer(sock, lambda own: _serve_sequence(own, matcher, settings)).run()


def _compiled(tokenizer: LLTokenizer, source: Source, settings: GrammarSettings) -> tuple[LLMatcher, list[str]]:
    """Compile a grammar. Return its matcher, and the faults of schemas that were weakened because the source is lenient. Raise ValueError
    if the grammar is faulty or too large."""
    bounds = LLParserLimits(
        initial_lexer_fuel=settings.initial_fuel,
        max_grammar_size=settings.grammar_size,
        max_items_in_row=settings.row_items,
        step_max_items=settings.step_items,
        verbose_errors=False,
    )

    def fault_of(schema: str) -> str:
        """Return why a schema cannot be compiled, or an empty text if it can be."""
        alone = LLMatcher.grammar_from_json_schema(schema)
        is_faulty, told = LLMatcher.validate_grammar_with_warnings(alone, tokenizer, limits=bounds)
        return told[0] if is_faulty else ""

    matcher, faults = LLMatcher(tokenizer, grammar_of(source), log_level=0, limits=bounds), list[str]()
    if matcher.is_error() and source.is_lenient:
        weaker, faults = without_faults(source.source, fault_of)
        if faults:
            matcher = LLMatcher(tokenizer, grammar_of(msgspec.structs.replace(source, source=weaker)), log_level=0, limits=bounds)
    if not matcher.is_error():
        matcher.compute_bitmask()  # expands the grammar's expressions once, so that all sequences share the result
    if matcher.is_error():
        raise ValueError(f"the {source.kind} cannot be compiled: {matcher.get_error()}")
    return matcher, faults


def _serve_sequence(sock: socket.socket, matcher: LLMatcher, settings: GrammarSettings) -> None:
    """Answer the questions about one sequence. After the answer about a state that allows several tokens, also send the mask: it is
    computed while the worker does other things."""
    meter, mask_bytes = _Meter(settings), 4 * num_mask_words(settings.vocab_size)
    while found := read_question(sock):
        question, token_ids = found
        meter.start(len(token_ids) + 1)
        num_refused = len(token_ids) - matcher.try_consume_tokens(token_ids)
        num_tokens = len(token_ids)
        if question == Question.STATE:
            is_complete = matcher.is_stopped()
            forced = [*takewhile(lambda token_id: token_id < settings.vocab_size, matcher.compute_ff_tokens())]
            meter.count(num_tokens)
            answer = Answer.COMPLETE if is_complete else Answer.GOES_ON
            payload = array("i", forced[: MAX_TEXT_BYTES // 4]).tobytes()
            if not _reply(sock, answer, payload, matcher, meter, number=num_refused) or is_complete or forced or num_refused:
                continue
            num_tokens = 0
        mask = matcher.compute_bitmask()[:mask_bytes]  # the result may have more words than the mask
        meter.count(num_tokens + 1)
        _reply(sock, Answer.MASK, mask, matcher, meter)


class _Meter:
    """Limits the CPU time of a sequence. The kernel ends a process that has used all of it, even in native code, because the process has no
    handler for the timer's signal."""

    def __init__(self, settings: GrammarSettings) -> None:
        self.took_s = 0.0  # CPU seconds that the last `count` charged
        self._settings = settings
        self._timer = CpuTimer()
        self._left_s = settings.excess_s  # CPU time left beyond slow_s per token
        self._began_s = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether the sequence has used more time than is allowed."""
        return self._left_s < 0.0

    def start(self, num_tokens: int) -> None:
        """Allow the time of `num_tokens` tokens, and begin to count."""
        self._timer.start(max(self._left_s, 0.0) + num_tokens * self._settings.slow_s + TIMER_SLACK_S)
        self._began_s = time.process_time()

    def count(self, num_tokens: int) -> None:
        """Charge the CPU time since the last `start` or `count`, in which `num_tokens` tokens were processed."""
        now_s = time.process_time()
        self.took_s, self._began_s = now_s - self._began_s, now_s
        self._left_s -= max(self.took_s - num_tokens * self._settings.slow_s, 0.0)


def _reply(sock: socket.socket, answer: Answer, payload: bytes, matcher: LLMatcher, meter: _Meter, *, number: int = 0) -> bool:
    """Send an answer, or an error if the matcher failed or a limit is exceeded. Return False after an error."""
    if matcher.is_error():
        write_answer(sock, Answer.ERROR, matcher.get_error().encode())
    elif meter.is_spent:
        write_answer(sock, Answer.TOO_SLOW)
    else:
        write_answer(sock, answer, payload, number=number, took_s=meter.took_s)
        return True
    return False


def _own_memory_kib() -> int:
    """Return the memory in KiB that this process does not share with the zygote."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main(*sys.argv[1:])
