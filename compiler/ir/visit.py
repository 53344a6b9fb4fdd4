"""Walking and rewriting programs: the toolkit of passes.

What is read: `walk_*` go through nodes outside in; `used_vars` and `free_vars` tell on which variables a thing depends, symbolic
ones included. What is rewritten: `map_*` rebuild inside out. A function that changes nothing returns the object it was given, so
`is` tells whether anything happened.
"""

from __future__ import annotations

from typing import TypeVar

from compiler.ir.graph import Function
from compiler.ir.loops import PrimFunc
from compiler.ir.visit_graph import (
    Uses,
    atom_dims,
    attr_dims,
    free_vars,
    fresh_function,
    map_atoms,
    map_bindings,
    map_operands,
    operands,
    stated_types,
    used_vars,
)
from compiler.ir.visit_loops import (
    ScalarFn,
    StmtFn,
    bound_dims,
    free_dims,
    fresh_prim,
    loads,
    map_scalar,
    map_scalars,
    map_stmt,
    rename_buffers,
    replace_loads,
    rewrite_dims,
    scalars_of,
    sequence,
    statements,
    subscalars,
    substatements,
    substitute_scalar,
    walk_scalar,
    walk_scalars,
    walk_stmts,
)

F = TypeVar("F", Function, PrimFunc)


def rename_fresh(func: F) -> F:
    """A copy that shares no variable and no buffer with the original."""
    return fresh_prim(func) if isinstance(func, PrimFunc) else fresh_function(func)


__all__ = [
    "ScalarFn",
    "StmtFn",
    "Uses",
    "atom_dims",
    "attr_dims",
    "bound_dims",
    "free_dims",
    "free_vars",
    "loads",
    "map_atoms",
    "map_bindings",
    "map_operands",
    "map_scalar",
    "map_scalars",
    "map_stmt",
    "operands",
    "rename_buffers",
    "rename_fresh",
    "replace_loads",
    "rewrite_dims",
    "scalars_of",
    "sequence",
    "stated_types",
    "statements",
    "subscalars",
    "substatements",
    "substitute_scalar",
    "used_vars",
    "walk_scalar",
    "walk_scalars",
    "walk_stmts",
]
