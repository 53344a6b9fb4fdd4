"""Fixtures that run a pass on the text of a program, and fixtures that run a program with the interpreter and with the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import compiler.ops
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.equal import assert_equal
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.types import ObjectType
from compiler.ir.verify.module import verify
from compiler.machine.target import Target, host
from compiler.passes.base import Pass, Verify
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.native import run_native

assert compiler.ops  # importing compiler.ops registers all operators
assert run_native  # importing run_native makes it a fixture of all tests of kernels


@pytest.fixture
def becomes() -> Callable[[Pass, str, str], None]:
    """`becomes(legalize, BEFORE, EXPECTED)` requires that the pass turns the program BEFORE into EXPECTED. Where EXPECTED annotates a
    result as `object`, any annotation is accepted."""

    def check(step: Pass, before: str, expected: str) -> None:
        wanted = parse(expected)
        verify(wanted)
        module = parse(before)
        verify(module)
        result = step(module)
        verify(result)
        coarse = [n for n, f in wanted.graph_functions.items() if f.result_type == ObjectType()]
        found = {n: replace(result.graph(n), result_type=ObjectType()) for n in coarse if n in result.functions}
        assert_equal(result.update(found), wanted)

    return check


@pytest.fixture
def stays() -> Callable[[Pass, str], None]:
    """`stays(legalize, TEXT)` requires that the pass changes nothing and returns the same module object."""

    def check(step: Pass, text: str) -> None:
        module = parse(text)
        verify(module)
        assert step(module) is module

    return check


@pytest.fixture(scope="session")
def compiled_once() -> Callable[..., Executable]:
    """`compiled_once(module, target=host())` returns the compiled module. It compiles each text only once per target."""
    known: dict[tuple[str, str], Executable] = {}

    def call(module: IRModule, target: Target | None = None) -> Executable:
        target = target or host()
        key = print_module(module), target.key
        if key not in known:
            known[key] = compile_module(module, Options(target))
        return known[key]

    return call


@pytest.fixture(scope="session")
def verified() -> Callable[[IRModule], Executable]:
    """Return a function that compiles a module and verifies the IR after each pass. It compiles each text only once."""
    known: dict[str, Executable] = {}

    def call(module: IRModule) -> Executable:
        text = print_module(module)
        if text not in known:
            known[text] = compile_module(module, Options(instruments=(Verify(),)))
        return known[text]

    return call


@pytest.fixture
def compute(verified: Callable[[IRModule], Executable]) -> Callable[..., Any]:
    """`compute(program, *arguments)` compiles a program and returns the result of `main`. It requires that the result is close to the
    interpreter's, and has the same bits with 1, 2 and 3 threads."""

    def call(program: str | IRModule, *args: Any, rtol: float = 1e-5) -> Any:
        module = parse(program) if isinstance(program, str) else program
        verify(module)
        expected = Interpreter(module).call("main", *map(_copied, args))
        executable = verified(module)
        results: list[Any] = []
        for num_threads in (1, 2, 3):
            session = Session(executable, device_threads=num_threads)
            results.append(session.call("main", *map(_copied, args)))
            session.close()
        _close(results[0], expected, rtol)
        for other in results[1:]:
            _close(other, results[0], 0.0)
        return results[0]

    return call


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _close(actual: Any, expected: Any, rtol: float) -> None:
    if isinstance(expected, tuple):
        for a, e in zip(actual, expected, strict=True):
            _close(a, e, rtol)
        return
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * np.max(np.abs(e), initial=0.0, where=np.isfinite(e)))
