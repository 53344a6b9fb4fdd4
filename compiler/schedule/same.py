"""Whether two expressions of one function are the same computation: equal up to the names of reduction axes."""

from __future__ import annotations

from compiler.ir.dims import Dim, DimVar
from compiler.ir.loops import Apply, Cast, Const, DimScalar, Guard, Load, Reduce, Scalar, ScalarParam


def same_scalar(a: Scalar, b: Scalar) -> bool:
    return a is b or _same(a, b, {}, set())


def _same(a: Scalar, b: Scalar, renamed: dict[DimVar, Dim], known: set[tuple[Scalar, Scalar]]) -> bool:
    """`renamed` gives the axes of `b` the names that they have in `a`; under these names the pairs in `known` were compared before, and
    one that differs ends the comparison."""
    if (a, b) in known:
        return True
    known.add((a, b))

    def same(x: Scalar, y: Scalar) -> bool:
        return _same(x, y, renamed, known)

    def dim(x: Dim, y: Dim) -> bool:
        return x == (y.substitute(renamed) if renamed else y)

    match a, b:
        case Const(), Const():
            return repr(a.value) == repr(b.value) and a.dtype is b.dtype  # -0.0 is not 0.0, a NaN is itself
        case DimScalar(), DimScalar():
            return dim(a.dim, b.dim)
        case ScalarParam(), ScalarParam():
            return a is b
        case Load(), Load():
            return a.buffer is b.buffer and all(dim(x, y) for x, y in zip(a.indices, b.indices, strict=True))
        case Apply(), Apply():
            return a.fn is b.fn and len(a.args) == len(b.args) and all(same(x, y) for x, y in zip(a.args, b.args, strict=True))
        case Cast(), Cast():
            return a.dtype is b.dtype and same(a.value, b.value)
        case Guard(), Guard():
            conditions = list(zip(a.conditions, b.conditions, strict=False))
            return (
                len(a.conditions) == len(b.conditions)
                and all(dim(x, y) for p, q in conditions for x, y in zip(p, q, strict=True))
                and same(a.value, b.value)
                and same(a.otherwise, b.otherwise)
            )
        case Reduce(), Reduce():
            if a.fn is not b.fn or len(a.axes) != len(b.axes):
                return False
            if not all(dim(x, y) for (_, x), (_, y) in zip(a.axes, b.axes, strict=True)):
                return False
            axes = {w: Dim.of(v) for (v, _), (w, _) in zip(a.axes, b.axes, strict=True)}
            return _same(a.value, b.value, {**renamed, **axes}, set())
        case _:
            return False
