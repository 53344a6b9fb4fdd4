"""Shape functions: the integers that follow from those a match has found, computed natively in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.codegen.indices import Index, Indices
from compiler.codegen.ssa import Code
from compiler.ir.dims import Dim, DimVar


def emit_shape_function(symbol: str, variables: Mapping[DimVar, int], derived: Sequence[tuple[Dim, int]]) -> str:
    """`void symbol(i64 *heap)`: read the slots of the variables, write the slots of the derived dimensions."""
    code = Code()
    indices = Indices(code)
    used = dict.fromkeys(v for dim, _ in derived for v in dim.vars())
    for var in used:
        pointer = code.hoist(0, f"getelementptr i64, ptr %heap, i64 {variables[var]}")
        indices.env[var] = Index(code.hoist(0, f"load i64, ptr {pointer}, align 8"))
    for dim, slot in derived:
        value = indices.operand(dim)
        pointer = code.hoist(0, f"getelementptr i64, ptr %heap, i64 {slot}")
        code.do(f"store i64 {value}, ptr {pointer}, align 8")
    return f"define void @{symbol}(ptr %heap) #0 {{\nentry:\n{code.text()}\n  ret void\n}}"
