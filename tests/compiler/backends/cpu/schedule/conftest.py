"""Loop nests under the schedules of all machines that this one can stand in for."""

from __future__ import annotations

from collections.abc import Callable
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
HERE = [host(), *(t for t in ABLE if t != max(ABLE, key=lambda t: len(t.features)))]  # of those, the host is the most able itself


@pytest.fixture
def kernels() -> Callable[..., dict[str, PrimFunc]]:
    """`kernels(program, "avx512")`: the scheduled nests by name."""

    def call(program: str, target: str = "avx512") -> dict[str, PrimFunc]:
        module = pipeline(get(target)).until("schedule_kernels")(parse(program))
        verify(module)
        return module.prim_functions

    return call


@pytest.fixture(scope="session")
def compiled(compiled_once: Callable[..., Executable]) -> Callable[[str, Target], Executable]:
    """Each program once per machine, whatever sizes it is called with."""
    return lambda program, target: compiled_once(parse(program), target)


@pytest.fixture
def agree(compiled: Callable[[str, Target], Executable]) -> Callable[..., Any]:
    """`agree(program, *args)`: what `main` returns: near the interpreter, and the same bits on every machine with 1 and 3 threads."""

    def call(program: str, *args: Any, rtol: float = 2e-5) -> Any:
        results: list[Any] = []
        for target in HERE:
            for num_threads in (1, 3):
                session = Session(compiled(program, target), device_threads=num_threads)
                results.append(session.call("main", *(np.array(a) for a in args)))
                session.close()
        expected = Interpreter(parse(program)).call("main", *(np.array(a) for a in args))
        scale = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
        np.testing.assert_allclose(results[0], expected, rtol=rtol, atol=rtol * scale)
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])
        return results[0]

    return call
