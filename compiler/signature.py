"""The key under which the cache keeps an executable, and the symbolic shape signature of an entry point.

The key is a digest over one struct: the program without the declared ranges of its variables, the target, the compiler's version, and the
names of parameters. Entries with the same key differ only in their ranges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

import llvmlite
import msgspec

import runtime
from compiler.cache import Key, Range
from compiler.ir.dims import Dim, DimVar
from compiler.ir.equal import structural_hash
from compiler.ir.graph.function import Body, Function
from compiler.ir.graph.values import MatchCast
from compiler.ir.graph.visit import free_vars, walk_values
from compiler.ir.module import IRModule
from compiler.ir.types import binders_of, substitute, vars_of
from runtime.files import digest_of_sources


class KeyParts(msgspec.Struct, frozen=True):
    """Everything that determines an executable, except the ranges of its variables."""

    program: str
    target: str
    version: str
    # parameter names of each function: weights are bound by name, and two families may differ only in names
    params: tuple[tuple[str, ...], ...] = ()


# The modules of the runtime on whose constants compiled programs rely, such as the size of a page and the columns of sampling parameters.
SHARED: Final = ("cache_groups.py", "executable.py", "library.py", "sampling.py")


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """Return a digest of the compiler's sources, of the runtime's modules in SHARED and of the version of llvmlite, the binding to LLVM. A
    change in any of them may change the code that the compiler emits."""
    shared = [hashlib.sha256((Path(runtime.__path__[0]) / name).read_bytes()).hexdigest() for name in SHARED]
    return digest_of_sources(Path(__file__).parent, " ".join((llvmlite.__version__, *shared)))


def key_of(module: IRModule, target: str) -> Key:
    """Return the key of a module's executable for a target. `target` is the text `Target.key` of the target."""
    functions = sorted(module.graph_functions.items())
    params = tuple(tuple(p.name for p in func.params) for _, func in functions)
    parts = KeyParts(structural_hash(module, ranges=False), target, compiler_version(), params)
    of_all = msgspec.structs.replace(parts, target="")
    return Key(_digest(parts), _digest(of_all), {name: _ranges(all_vars(func)) for name, func in functions})


def _digest(parts: KeyParts) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def signature_vars(func: Function) -> tuple[DimVar, ...]:
    """Return the variables of a function's signature in the order in which the annotations of the parameters mention them. The canonical
    name of variable `i` in this order is `n{i}`."""
    return tuple(dict.fromkeys(v for p in func.params for v in vars_of(p.type)))


def all_vars(func: Function) -> tuple[DimVar, ...]:
    """Return the variables of the signature, and after them further variables that the body uses or that its match_casts define. Planning
    uses the ranges of all these variables. The canonical names of the further variables continue the numbering of the signature."""
    return tuple(dict.fromkeys([*signature_vars(func), *free_vars(func.body).dims, *cast_vars(func.body)]))


def cast_vars(body: Body) -> Iterator[DimVar]:
    """Yield the variables that match_casts of the body define."""
    for value in walk_values(body):
        if isinstance(value, MatchCast):
            yield from binders_of(value.type)


def signature(module: IRModule, name: str) -> str:
    """Return the symbolic shape signature: the annotations of the parameters, with variables renamed n0, n1, ..., and the ranges of the
    variables."""
    func = module.graph(name)
    variables = signature_vars(func)
    renamed = {v: Dim.of(DimVar(f"n{i}", v.lower, None, v.multiple_of)) for i, v in enumerate(variables)}
    params = ", ".join(str(substitute(p.type, renamed)) for p in func.params)
    ranges = ", ".join(f"{n} in {_text(r)}" for n, r in _ranges(variables).items())
    return f"({params}) where {ranges}" if ranges else f"({params})"


def _ranges(variables: tuple[DimVar, ...]) -> dict[str, Range]:
    """Return the ranges by the canonical names of the variables. An upper bound that is an expression becomes a text of canonical names."""
    renamed = {v: Dim.of(DimVar(f"n{i}", v.lower, None, v.multiple_of)) for i, v in enumerate(variables)}
    uppers = [str(v.upper.substitute(renamed)) if isinstance(v.upper, Dim) else v.upper for v in variables]
    return {f"n{i}": Range(v.lower, u, v.multiple_of) for i, (v, u) in enumerate(zip(variables, uppers, strict=True))}


def _text(r: Range) -> str:
    return f"{r.lower}..{'' if r.upper is None else r.upper}{f' by {r.multiple_of}' if r.multiple_of != 1 else ''}"
