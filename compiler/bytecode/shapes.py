"""Emit shape functions. A shape function computes, in one native call, all integers that depend on the dimensions of a match, and detects
overflows and divisions by zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.ir.dims import Dim, DimVar
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code

INT64_MIN = -(2**63)


def emit_shape_function(symbol: str, variables: Mapping[DimVar, int], derived: Sequence[tuple[Dim, int]]) -> str:
    """Emit `i64 symbol(i64 *heap)`, which reads the slots of the variables and writes the slots of the derived dimensions. It returns 0 if
    all dimensions have a value. Otherwise it returns 1 + the slot of a dimension whose computation overflows 64 bits, or -1 - the slot of a
    dimension that divides by zero."""
    code = Code()
    indices = _CheckedIndices(code)
    used = dict.fromkeys(v for dim, _ in derived for v in dim.vars())
    for var in used:
        pointer = code.hoist(0, f"getelementptr i64, ptr %heap, i64 {variables[var]}")
        indices.env[var] = Index(code.hoist(0, f"load i64, ptr {pointer}, align 8"))
    status = "0"
    for dim, slot in derived:
        indices.overflows, indices.zeros = {}, {}
        value = indices.operand(dim)
        pointer = code.hoist(0, f"getelementptr i64, ptr %heap, i64 {slot}")
        code.do(f"store i64 {value}, ptr {pointer}, align 8")
        for flags, code_of_failure in ((indices.overflows, 1 + slot), (indices.zeros, -1 - slot)):
            for flag in flags:
                status = code.op(f"select i1 {flag}, i64 {code_of_failure}, i64 {status}")
    return f"define i64 @{symbol}(ptr %heap) #0 {{\nentry:\n{code.text()}\n  ret i64 {status}\n}}"


class _CheckedIndices(Indices):
    """Index arithmetic on operands that may be any 64-bit integers. It collects the conditions under which the current dimension has no
    value."""

    def __init__(self, code: Code) -> None:
        super().__init__(code)
        self.overflows: dict[str, None] = {}
        self.zeros: dict[str, None] = {}

    def binary(self, op: str, a: Index, b: Index) -> Index:
        """Combine two indices. If a sum or a product is computed at run time, note the condition that it overflows."""
        known = isinstance(a.value, int) and isinstance(b.value, int)
        neutral = (op == "add nsw" and 0 in (a.value, b.value)) or (op == "mul nsw" and {a.value, b.value} & {0, 1})
        if known or neutral or op not in ("add nsw", "mul nsw"):
            return super().binary(op, a, b)
        fn = "sadd" if op == "add nsw" else "smul"
        both = self.code.hoist(0, f"call {{i64, i1}} @llvm.{fn}.with.overflow.i64(i64 {a.value}, i64 {b.value})")
        self.overflows[self.code.hoist(0, f"extractvalue {{i64, i1}} {both}, 1")] = None
        return Index(self.code.hoist(0, f"extractvalue {{i64, i1}} {both}, 0"))

    def division(self, numerator: Index, divisor: Index, *, quotient: bool, unsigned: bool) -> Index:
        """Divide without traps. A divisor of zero is replaced, and so is the least integer as numerator, because dividing it by -1
        overflows. In both cases the dimension counts as having no value."""
        if not isinstance(divisor.value, int):
            zero = self.code.hoist(0, f"icmp eq i64 {divisor.value}, 0")
            self.zeros[zero] = None
            divisor = Index(self.code.hoist(0, f"select i1 {zero}, i64 1, i64 {divisor.value}"))
        if not isinstance(numerator.value, int):
            least = self.code.hoist(0, f"icmp eq i64 {numerator.value}, {INT64_MIN}")
            self.overflows[least] = None
            numerator = Index(self.code.hoist(0, f"select i1 {least}, i64 0, i64 {numerator.value}"))
        return super().division(numerator, divisor, quotient=quotient, unsigned=unsigned)
