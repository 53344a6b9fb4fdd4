"""Emit index arithmetic: the value of a `Dim` in an iteration of a loop nest.

Each part of an index is computed in the outermost scope in which all its variables are known, so the innermost loop computes only the parts
that change there. The variable of an unrolled loop is a constant, and that of a vector loop is a vector with one number per lane. Other
variables are scalar operands, unless they were computed from a vector or always have the same value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from compiler.ir.dims import Atom, Dim, DimVar, FloorDiv, Max, Min, Mod
from compiler.ir.prove import bounds
from compiler.llvm.ssa import Code, broadcast, suffix, vec


@dataclass(frozen=True, slots=True)
class Index:
    """An i64: a Python integer or an operand. An operand is known in scope `level` and in all scopes inside it. If `lanes` is above 1,
    the index is a vector with one number per lane."""

    value: int | str
    level: int = 0  # number of a scope of `Code`: 0 is the whole function, and inner scopes have higher numbers
    lanes: int = 1


class Indices:
    """Writes the instructions that compute dimensions. `env` has the index of each variable that is in scope."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.env: dict[DimVar, Index] = {}

    def value(self, dim: Dim) -> Index:
        """Return the value of a dimension."""
        return self.total(self.term(c, m) for c, m in dim.terms)

    def operand(self, dim: Dim) -> str:
        """Return the value of a dimension that is the same in every lane, as an operand of LLVM IR."""
        value = self.value(dim)
        assert value.lanes == 1, f"{dim} differs between lanes"
        return str(value.value)

    def term(self, coefficient: int, monomial: tuple[Atom, ...]) -> Index:
        """Return the product of a coefficient and the atoms of a monomial."""
        product = Index(coefficient)
        for atom in sorted((self.atom(a) for a in monomial), key=_outermost_first):
            product = self.binary("mul nsw", product, atom)
        return product

    def total(self, parts: Iterable[Index]) -> Index:
        """Add the parts. The outermost parts come first, so that each partial sum can stay as far out as possible."""
        total = Index(0)
        for part in sorted(parts, key=_outermost_first):
            total = self.binary("add nsw", total, part)
        return total

    def atom(self, atom: Atom) -> Index:
        """Return the value of a variable, a quotient, a remainder, a minimum or a maximum."""
        match atom:
            case DimVar():
                return self.env[atom]
            case FloorDiv() | Mod():
                return self._division(atom)
            case Min() | Max():
                fn = "smin" if isinstance(atom, Min) else "smax"
                first, *rest = (self.value(o) for o in atom.operands)
                for value in rest:
                    first = self.extreme(fn, first, value)
                return first

    def binary(self, op: str, a: Index, b: Index) -> Index:
        """Combine two indices by an LLVM instruction `op`: add or mul with flags, sub, a division, a shift or a bitwise operation. No
        instruction is written if `op` is "add nsw" or "mul nsw" and the result is known: both indices are integers, one summand is 0, or
        one factor is 0 or 1."""
        if op == "add nsw":
            if isinstance(a.value, int) and isinstance(b.value, int):
                return Index(a.value + b.value)
            if a.value == 0 or b.value == 0:
                return b if a.value == 0 else a
        if op == "mul nsw":
            if isinstance(a.value, int) and isinstance(b.value, int):
                return Index(a.value * b.value)
            if a.value in (0, 1):
                return b if a.value == 1 else a
            if b.value in (0, 1):
                return a if b.value == 1 else b
        return self._instruction(f"{op} {{type}} {{a}}, {{b}}", a, b)

    def extreme(self, fn: str, a: Index, b: Index) -> Index:
        """Return the lesser of two indices if `fn` is "smin", or the greater one if it is "smax". Write no instruction if both are
        integers."""
        if isinstance(a.value, int) and isinstance(b.value, int):
            return Index(min(a.value, b.value) if fn == "smin" else max(a.value, b.value))
        name = suffix("i64", max(a.lanes, b.lanes))
        return self._instruction(f"call {{type}} @llvm.{fn}.{name}({{type}} {{a}}, {{type}} {{b}})", a, b)

    def _division(self, atom: FloorDiv | Mod) -> Index:
        """Return a quotient, rounded down, or a remainder. If both operands are Python integers, write no instruction. If the divisor is a
        constant power of two, write a shift or a mask instead of a division."""
        numerator, divisor = self.value(atom.numerator), self.value(atom.divisor)
        quotient = isinstance(atom, FloorDiv)
        if isinstance(numerator.value, int) and isinstance(divisor.value, int):
            whole, rest = divmod(numerator.value, divisor.value)
            return Index(whole if quotient else rest)
        if isinstance(divisor.value, int) and divisor.value > 0 and divisor.value & (divisor.value - 1) == 0:
            if quotient:
                return self.binary("ashr", numerator, Index(divisor.value.bit_length() - 1))
            return self.binary("and", numerator, Index(divisor.value - 1))
        unsigned = _not_negative(atom.numerator) and _not_negative(atom.divisor)
        return self.division(numerator, divisor, quotient=quotient, unsigned=unsigned)

    def division(self, numerator: Index, divisor: Index, *, quotient: bool, unsigned: bool) -> Index:
        """Return the quotient, rounded down, if `quotient` is true, otherwise the remainder. `unsigned` states that neither operand can be
        negative."""
        if unsigned:
            return self.binary("udiv" if quotient else "urem", numerator, divisor)
        return self._floor_division(numerator, divisor, quotient=quotient)

    def _floor_division(self, x: Index, d: Index, *, quotient: bool) -> Index:
        """Divide and round down. Hardware rounds toward zero. So if the remainder is not zero and differs from the divisor in its sign,
        subtract 1 from the quotient, or add the divisor to the remainder."""
        rest = self.binary("srem", x, d)
        # All ones if remainder and divisor differ in sign and the remainder is not zero.
        differ = self.binary("ashr", self.binary("xor", rest, d), Index(63))
        some = self.binary("ashr", self.binary("or", rest, self.binary("sub", Index(0), rest)), Index(63))
        wrong = self.binary("and", differ, some)
        if quotient:
            return self.binary("add nsw", self.binary("sdiv", x, d), wrong)
        return self.binary("add nsw", rest, self.binary("and", wrong, d))

    def _instruction(self, template: str, a: Index, b: Index) -> Index:
        """Write an instruction in the outermost scope in which both operands are known. `template` has the places {type}, {a} and {b}."""
        level, lanes = max(a.level, b.level), max(a.lanes, b.lanes)
        text = template.format(type=vec("i64", lanes), a=self.spread(a, lanes), b=self.spread(b, lanes))
        return Index(self.code.hoist(level, text), level, lanes)

    def spread(self, x: Index, lanes: int) -> str:
        """Return the operand as a vector of `lanes` lanes: a scalar is repeated, and a vector is returned as it is."""
        return str(x.value) if x.lanes == lanes else broadcast(self.code, str(x.value), "i64", lanes, x.level)


def _outermost_first(x: Index) -> tuple[int, int]:
    """Sort key: scalars before vectors, and outer scopes before inner ones."""
    return (x.lanes, x.level)


def _not_negative(dim: Dim) -> bool:
    """Return whether a dimension is provably at least 0."""
    low, _ = bounds(dim)
    return low is not None and low >= 0
