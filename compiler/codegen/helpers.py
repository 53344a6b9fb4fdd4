"""Compile kernels in other processes, the helpers, while this process emits the next kernels. A helper runs `python -m
compiler.codegen.helpers`. LLVM takes half the time of a compilation, and its Python binding lets only one thread of a process call LLVM.

A helper has the same code as this process, so a kernel's machine code does not depend on the process that compiles it. If a helper fails,
another helper or this process compiles the kernel.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Self

from compiler.codegen.machine_code import emitted
from compiler.machine.target import Target
from runtime import generated_code
from runtime.launch import command

COMMAND = command("compiler.codegen.helpers")
SIZE_BYTES = 8


class Helpers:
    """Processes that compile kernels. Each of the first `count` kernels starts a process. All processes have ended when `finish` returns or
    the `with` statement ends. The end of the `with` statement drops the kernels that no process has begun."""

    def __init__(self, count: int, target: Target) -> None:
        """`count` is the maximum number of processes, which `begin` starts."""
        self._count = count
        self._target = target
        self._waiting: deque[tuple[str, str]] = deque()  # names and LLVM IR of kernels that no process compiles yet
        self.finished: dict[str, bytes] = {}  # machine code of kernels by name
        self._changed = threading.Condition()
        self._is_complete = False  # whether no further kernel will come
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the kernels that no helper has begun, and wait until all helpers have ended."""
        with self._changed:
            self._waiting.clear()
            self._is_complete = True
            self._changed.notify_all()
        for thread in self.threads:
            thread.join()

    def begin(self, name: str, text: str) -> None:
        """Let a helper compile kernel `name`, whose LLVM IR is `text`, as soon as a helper is idle. If no helper begins the kernel before
        `finish` is called, `finish` may compile it."""
        with self._changed:
            self._waiting.append((name, text))
            self._changed.notify()
        if len(self.threads) < self._count:
            thread = threading.Thread(target=self._follow, name="helper", daemon=True)
            thread.start()
            self.threads.append(thread)

    def finish(self, emit: Callable[[str, Target], bytes]) -> dict[str, bytes]:
        """Compile with `emit` the kernels that no helper has begun or that a helper failed to compile, and wait for the helpers. Return the
        machine code of all kernels by name."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        while True:
            for name, text in iter(self._last, None):
                self.finished[name] = emit(text, self._target)
            for thread in self.threads:
                thread.join()
            if not self._waiting:  # otherwise a helper failed, and put its kernel back
                return self.finished

    def _last(self) -> tuple[str, str] | None:
        """Remove and return the kernel that was added last, or return None if no kernel waits."""
        with self._changed:
            return self._waiting.pop() if self._waiting else None

    def _first(self) -> tuple[str, str] | None:
        """Wait until there is a kernel, and remove and return the one that was added first. Return None if no further kernel will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_complete)
            return self._waiting.popleft() if self._waiting else None

    def _follow(self) -> None:
        """Start a helper, and send it kernels, one at a time, until no further kernel will come. Return early if the helper cannot start or
        fails. The kernel at which it failed then waits again, for other helpers or for `finish`."""
        try:
            process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        except OSError:
            return
        with suppress(OSError), process:
            assert process.stdin is not None and process.stdout is not None
            for name, text in iter(self._first, None):
                try:
                    _write(process.stdin, (text, self._target))
                    self.finished[name] = _read(process.stdout)
                except Exception:  # whatever is wrong with the helper, another helper or `finish` compiles the kernel
                    with self._changed:
                        self._waiting.append((name, text))
                    process.kill()
                    return


def _write(stream: IO[bytes], value: object) -> None:
    content = pickle.dumps(value)
    stream.write(len(content).to_bytes(SIZE_BYTES, "little") + content)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    """Return the next value. Raise EOFError if the other process closes the stream before the value is complete."""
    size = int.from_bytes(stream.read(SIZE_BYTES), "little")
    content = stream.read(size)
    if not size or len(content) < size:
        raise EOFError
    return pickle.loads(content)


def main() -> None:
    """Compile modules from standard input until it is closed, and write their machine code to standard output."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # text that a library prints goes to standard error, not among the answers
    with suppress(EOFError, BrokenPipeError):
        while True:
            text, target = _read(sys.stdin.buffer)
            _write(answers, emitted(text, target))
    generated_code.keep()


if __name__ == "__main__":
    main()
