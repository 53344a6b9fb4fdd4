"""Interprets a program after any pass, and checks that passes keep its results."""

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


def interpret(module: IRModule, inputs: Sequence[Any], weights: Mapping[str, Any], preparing: IRModule | None = None) -> Any:
    """Run `main` with the interpreter. If work on weights was already moved into preparation functions, these run first. They are taken
    from `preparing`, in case a later pass has removed them from `module`."""
    preparing = preparing or module
    prepared: list[Any] = []
    for name in takewhile(preparing.functions.__contains__, (f"main{PREPARATION}{number}" for number in count())):
        prepared += Interpreter(preparing).call(name, *(weights[p.name] for p in preparing.graph(name).params))
    names = [p.name for p in module.graph("main").weights]
    return Interpreter(module).call("main", *inputs, *(weights[name] for name in names[: len(names) - len(prepared)]), *prepared)


@dataclass(slots=True)
class MeaningCheck:
    """An instrument of pass pipelines. After each pass that changed the module, it verifies the module, and requires that the module's
    results are still the same."""

    # called with the module, and with the latest module that has the preparation functions
    require_meaning: Callable[[IRModule, IRModule], None]
    preparing: IRModule | None = None  # the latest module that had preparation functions

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        if f"main{PREPARATION}0" in module.functions:
            self.preparing = module
        if module is before:
            return
        try:
            verify(module)
            self.require_meaning(module, self.preparing or module)
        except Exception as error:
            error.add_note(f"after pass {name}:\n{print_module(module)}")
            raise
