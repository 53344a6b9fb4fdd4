"""Broadcasting by NumPy's rule, for extents that may be symbolic.

An extent of 1 is broadcast even if it is known to be 1 only at run time. If one of two extents is proved not to be 1, the result has this
extent. The other extent must then be 1 or the same; a run-time check verifies that, unless it is proved. If both extents may be 1, the
extent of the result is an expression that is right for every pair that the check accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from compiler.ir.dims import Dim, Max, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Const, Load, Scalar, ScalarParam
from compiler.ir.loops.write import cast, const
from compiler.ir.prove import prove_eq, prove_ne
from compiler.ir.types import ObjectType, ScalarType, TensorType, Type
from compiler.ops.tables import Fit, Operands, Place, UnknownShape

ZERO, ONE = Dim.of(0), Dim.of(1)

Shape = tuple[Dim, ...]


# --- annotations -------------------------------------------------------------------------------------------------------


def broadcast_dims(a: Dim, b: Dim) -> Dim:
    """Return the extent to which `a` and `b` broadcast. Raise AnnotationError if they are proved not to broadcast."""
    if prove_eq(a, b) or prove_eq(b, 1):
        return a
    if prove_eq(a, 1):
        return b
    wide = [d for d in (a, b) if prove_ne(d, 1)]
    if len(wide) == 2 and prove_ne(a, b):
        raise AnnotationError(f"extents {a} and {b} do not broadcast")
    return min(wide, key=lambda d: not d.is_const) if wide else _largest_but_zero(_stretched(a) | _stretched(b))


def _largest_but_zero(dims: frozenset[Dim]) -> Dim:
    """Return the extent to which `dims` broadcast: the largest, or 0 if any is 0. All extents other than 1 must be equal."""
    return dim_max(*dims) * dim_min(*dims, 1)


def _stretched(dim: Dim) -> frozenset[Dim]:
    """Return the extents from which `_largest_but_zero` made `dim`, or `dim` alone if that function did not make it. Without this function,
    chains of operators would nest ever deeper expressions of the same extents."""
    for atom in dim.atoms():
        if isinstance(atom, Max) and _largest_but_zero(found := frozenset(atom.operands)) == dim:
            return found
    return frozenset({dim})


def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    rank = max(len(a), len(b))
    padded = zip((ONE,) * (rank - len(a)) + a, (ONE,) * (rank - len(b)) + b, strict=True)
    dims: list[Dim] = []
    for i, (x, y) in enumerate(padded):
        try:
            dims.append(broadcast_dims(x, y))
        except AnnotationError as error:
            raise AnnotationError(f"dimension {i}: {error}") from None
    return tuple(dims)


def agree_stretched(given: Shape, wanted: Shape) -> None:
    """Raise AnnotationError if an extent of `given`, which is stretched to `wanted`, is proved to be neither 1 nor the wanted extent."""
    for g, w in zip(reversed(given), reversed(wanted), strict=False):
        if prove_ne(g, w) and prove_ne(g, 1):
            raise AnnotationError(f"extent {g} does not broadcast to {w}")


def broadcast_tensors(args: Sequence[Type], dtype: DType | None) -> TensorType:
    """Return the annotation of an elementwise result whose element type is `dtype`. The annotation has no shape if the shape of a tensor is
    unknown. Raise AnnotationError if an operand is neither a tensor nor a scalar, if no operand is a tensor, or if the shapes do not
    broadcast."""
    tensors: list[TensorType] = []
    for arg in args:
        match arg:
            case TensorType():
                tensors.append(arg)
            case ObjectType():
                tensors.append(TensorType(None, None))
            case ScalarType():
                pass
            case _:
                raise AnnotationError(f"an operand is {arg}, expected tensors and scalars")
    if not tensors:
        raise AnnotationError(f"operands are {', '.join(map(str, args))}, expected at least one tensor")
    if any(t.ndim is None for t in tensors):
        return TensorType(None, dtype)
    shape: Shape | None = ()
    for t in tensors:
        shape = None if shape is None or t.shape is None else broadcast_shapes(shape, t.shape)
    return TensorType(shape, dtype, max(t.ndim or 0 for t in tensors))


# --- loops -------------------------------------------------------------------------------------------------------------


def output(operands: Operands, name: str = "out") -> Buffer:
    """Make the buffer of an operator's only result."""
    return sized_buffer(operands.out, name)


def sized_buffer(type_: Type, name: str) -> Buffer:
    """Make a buffer for a result of this type. Raise UnknownShape if its extents or element type are unknown."""
    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is None:
        raise UnknownShape(f"the result is {type_}, and a loop nest needs all extents; state those of the operands with match_cast")
    return Buffer(name, type_.shape, type_.dtype)


def element(place: Place | None, ijk: Sequence[Dim], dtype: DType, shape: Shape = ()) -> Scalar:
    """Return the element of the operand that is broadcast to index `ijk` of a result with this shape. A scalar is cast to `dtype`; a
    literal float of another type is first rounded to its own type. Without `shape`, each extent of the operand must be proved to be 1, or
    equal that of the result. Raise UnknownShape if `place` is None."""
    if isinstance(place, Const) and dtype.holds(number := place.value if place.dtype is dtype else _rounded(place)):
        return const(number, dtype)
    if isinstance(place, Const | ScalarParam):
        return cast(place, dtype)
    if place is None:
        raise UnknownShape("the type or the extents of an operand are not known; state them with match_cast")
    rank = len(place.shape)
    inner, extents = ijk[len(ijk) - rank :], shape[len(shape) - rank :] or place.shape
    return Load(place, tuple(_index(d, i, s) for d, i, s in zip(place.shape, inner, extents, strict=True)))


def _rounded(literal: Const) -> float | int | bool:
    """Return the number that a literal has in its type. A literal float is stored with more digits than its type has."""
    if not literal.dtype.is_float:
        return literal.value
    with np.errstate(over="ignore"):
        return float(literal.dtype.numpy.type(literal.value))


def _index(extent: Dim, i: Dim, wanted: Dim) -> Dim:
    if prove_eq(extent, 1):
        return ZERO
    return i if prove_eq(extent, wanted) else dim_min(i, extent - 1)  # 0 if the extent is 1 at run time


def broadcast_fits(operands: Operands, shape: Shape) -> tuple[Fit, ...]:
    """Return the run-time checks for the extents that are not proved to broadcast to `shape`."""
    tensors = [(i, place) for i, place in enumerate(operands.places) if isinstance(place, Buffer)]
    return tuple(fit for i, place in tensors for fit in fits(i, place.shape, shape))


def fits(operand: int, given: Shape, shape: Shape) -> Iterator[Fit]:
    """Yield the run-time checks for those extents of one operand that are not proved to be 1, or to equal the extent of `shape`. `operand`
    is the index of the operand, and `given` its shape."""
    for axis, (g, s) in enumerate(zip(given, shape[len(shape) - len(given) :], strict=True)):
        if not prove_eq(g, 1) and not prove_eq(g, s):
            yield Fit(operand, axis, s, g)
