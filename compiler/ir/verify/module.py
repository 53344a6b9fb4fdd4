"""Verification of a module. Each rule is a small function that yields problems. `LOOP_RULES` and `GRAPH_RULES` list the rules of one
function; the rules about names and about variables of several functions are here. `verify` raises the first problem with its function,
place, line and rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from compiler.ir.dims import DimVar
from compiler.ir.errors import CompileError
from compiler.ir.graph.function import Binding, Function
from compiler.ir.graph.visit import stated_types, used_vars
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.visit import bound_dims, free_dims
from compiler.ir.module import IRModule
from compiler.ir.text.printer import print_node
from compiler.ir.types import vars_of
from compiler.ir.verify.graph import GRAPH_RULES, Problem, bound_sites
from compiler.ir.verify.loops import LOOP_RULES

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_TAKEN: Final = ("lib", "llvm", "vm")  # first parts of the names of library routines, LLVM's own functions and the VM's instructions


class VerifyError(CompileError):
    """Raised if a program breaks a rule of the IR, because its author or a pass made a mistake. `rule` is the name of the rule."""

    def __init__(self, message: str, *, rule: str = "", function: str = "") -> None:
        super().__init__(message)
        self.rule, self.function = rule, function


def verify(module: IRModule) -> None:
    """Check all rules. Raise VerifyError for the first problem."""
    for name, func in module.functions.items():
        _raise_first("functions_have_plain_names", name, functions_have_plain_names(name))
        if isinstance(func, PrimFunc):
            for rule in LOOP_RULES:
                _raise_first(rule.__name__, name, rule(func))
        else:
            for rule in GRAPH_RULES:
                _raise_first(rule.__name__, name, rule(module, func))
    owners: dict[DimVar, str] = {}
    for name, func in module.functions.items():
        _raise_first("dims_have_one_function", name, dims_have_one_function(name, func, owners))


def _raise_first(rule: str, function: str, problems: Iterator[Problem]) -> None:
    """Raise VerifyError for the first problem, if there is one."""
    for problem in problems:
        place, line = f"function {function!r}", ""
        if isinstance(problem.place, Binding):
            place += f", binding {problem.place.var.name!r}"
        if problem.place is not None:
            line = f"\n  {print_node(problem.place).splitlines()[0]}"
        raise VerifyError(f"{place}: {problem.message} (rule {rule}){line}", rule=rule, function=function)


def functions_have_plain_names(name: str) -> Iterator[Problem]:
    """Names of functions become names of symbols in LLVM IR and PTX, and names of callees in the program that the virtual machine runs."""
    if not _PLAIN.fullmatch(name):
        yield Problem(None, "the name must begin with a letter or _, and consist of ASCII letters, digits, _ and dots; rename the function")
    if (taken := name.partition(".")[0]) in _TAKEN:
        yield Problem(None, f"names that begin with {taken} belong to the compiler; rename the function")


def dims_have_one_function(name: str, func: Function | PrimFunc, owners: dict[DimVar, str]) -> Iterator[Problem]:
    """No two functions share a variable, because a variable has one value per call of one function."""
    for var in _dims_of_function(func):
        owner = owners.setdefault(var, name)
        if owner != name:
            yield Problem(None, f"dimension {var.name} belongs to function {owner!r}; give each function variables of its own")


def _dims_of_function(func: Function | PrimFunc) -> set[DimVar]:
    """Return the variables that the function defines or uses."""
    if isinstance(func, PrimFunc):
        return {*func.dim_vars, *free_dims(func.body), *bound_dims(func.body)}
    found = {v for p in func.params for v in vars_of(p.type)}
    for binding, _ in bound_sites(func):
        found.update(used_vars(binding.value).dims, *map(vars_of, stated_types(binding.value)))
    return found
