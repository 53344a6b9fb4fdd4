"""Call the functions of a program with the weights of a source: in the interpreter, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compiler.bind import bind_weights
from compiler.driver import compile_module
from compiler.frontend.weights import WeightSource
from compiler.interpret.graph import Interpreter
from compiler.ir.module import IRModule
from runtime.session import Session

Call = Callable[..., Any]  # takes the name of a function, and its arguments except weights


def interpreted_call(module: IRModule, weights: WeightSource) -> Call:
    interpreter = Interpreter(module)

    def call(entry: str, *args: Any) -> Any:
        return interpreter.call(entry, *args, *(weights.read(param.name) for param in module.graph(entry).weights))

    return call


def bound_session(module: IRModule, weights: WeightSource, entries: Sequence[str]) -> Session:
    """Compile a program, and bind the weights of some of its functions."""
    executable = compile_module(module)
    session = Session(executable, device_threads=2)
    for entry in entries:
        bind_weights(session, executable, entry, weights)
    return session
