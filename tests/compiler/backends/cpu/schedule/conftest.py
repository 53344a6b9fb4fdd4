"""Fixtures that schedule loop nests for any target, and run them on every target that this machine supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cpu.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import NAMED, Target, get, host
from runtime.executable import Executable
from runtime.session import Session

assert compiler.ops

ABLE = [t for t in NAMED.values() if t.can_run_here]
# All named targets that can run here. The host's own target replaces the named target with the most features.
HERE = [host(), *(t for t in ABLE if t != max(ABLE, key=lambda t: len(t.features)))]


@pytest.fixture(scope="module")
def kernels() -> Callable[..., dict[str, PrimFunc]]:
    """`kernels(program, "avx512")` returns the program's scheduled loop nests, as a dictionary from name to nest."""

    @cache
    def call(program: str, target: str = "avx512") -> dict[str, PrimFunc]:
        module = pipeline(get(target)).until("schedule_kernels")(parse(program))
        verify(module)
        return module.prim_functions

    return call


@pytest.fixture(scope="session")
def compiled(compiled_once: Callable[..., Executable]) -> Callable[[str, Target], Executable]:
    """Return a function that compiles a program for a target. It compiles each program only once per target in a test run."""
    return cache(lambda program, target: compiled_once(parse(program), target))


@pytest.fixture(scope="module")
def session_of(compiled: Callable[[str, Target], Executable]) -> Iterator[Callable[[str, Target, int], Session]]:
    """`session_of(program, target, num_threads)` returns a session. Tests of a module that pass equal arguments share one session."""
    with ExitStack() as opened:

        @cache
        def call(program: str, target: Target, num_threads: int) -> Session:
            session = Session(compiled(program, target), device_threads=num_threads)
            opened.callback(session.close)
            return session

        yield call


@pytest.fixture
def agree(session_of: Callable[[str, Target, int], Session]) -> Callable[..., Any]:
    """`agree(program, *args)` returns the result of `main`. It requires that the result is close to the interpreter's, and has the same
    bits on every target, with 1 and with 3 threads."""

    def call(program: str, *args: Any, rtol: float = 2e-5) -> Any:
        results: list[Any] = []
        for target in HERE:
            for num_threads in (1, 3):
                results.append(session_of(program, target, num_threads).call("main", *(np.array(a) for a in args)))
        expected = Interpreter(parse(program)).call("main", *(np.array(a) for a in args))
        scale = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
        np.testing.assert_allclose(results[0], expected, rtol=rtol, atol=rtol * scale)
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])
        return results[0]

    return call
