"""What a program means at any point of the pipeline, and an instrument that asks for it after each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from compiler.interpret.graph import Interpreter
from compiler.ir.module import IRModule
from compiler.ir.text.printer import print_module
from compiler.ir.verify.module import verify
from runtime.executable import PREPARATION


def interpret(module: IRModule, inputs: Sequence[Any], weights: Mapping[str, Any]) -> Any:
    """Of `main`, before and after the pass that moves work on weights into functions of their own."""
    interpreter = Interpreter(module)
    prepared: list[Any] = []
    for name in takewhile(module.functions.__contains__, (f"main{PREPARATION}{number}" for number in count())):
        prepared += interpreter.call(name, *(weights[p.name] for p in module.graph(name).params))
    names = [p.name for p in module.graph("main").weights]
    return interpreter.call("main", *inputs, *(weights[name] for name in names[: len(names) - len(prepared)]), *prepared)


@dataclass(frozen=True, slots=True)
class MeaningCheck:
    """An instrument: the module is well formed after the pass and means what it meant."""

    require_meaning: Callable[[IRModule], None]

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        if module is before:
            return
        try:
            verify(module)
            self.require_meaning(module)
        except Exception as error:
            error.add_note(f"after pass {name}:\n{print_module(module)}")
            raise
