"""A program: names mapped to functions of the graph level and of the loop level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.ir.graph.function import Function
from compiler.ir.loops.prim_func import PrimFunc


@dataclass(frozen=True, slots=True, eq=False)
class IRModule:
    functions: Mapping[str, Function | PrimFunc]

    def graph(self, name: str) -> Function:
        """Return the function with this name, which must be of the graph level."""
        func = self.functions[name]
        assert isinstance(func, Function), name
        return func

    def prim(self, name: str) -> PrimFunc:
        """Return the function with this name, which must be of the loop level."""
        func = self.functions[name]
        assert isinstance(func, PrimFunc), name
        return func

    @property
    def graph_functions(self) -> dict[str, Function]:
        return {n: f for n, f in self.functions.items() if isinstance(f, Function)}

    @property
    def prim_functions(self) -> dict[str, PrimFunc]:
        return {n: f for n, f in self.functions.items() if isinstance(f, PrimFunc)}

    def update(self, functions: Mapping[str, Function | PrimFunc]) -> IRModule:
        """Return a new module in which these functions are added, or replace functions with the same names."""
        return IRModule({**self.functions, **functions})
