"""Broadcasting: NumPy's rule, for extents that may be symbolic.

An extent stretches only if it is known to be 1 when the program is compiled. So where one of two is known not to be 1, the other must
equal it, which is checked at run time where it is not proved; and of two that may both be 1 nothing can be said.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Buffer, Const, Load, Scalar, ScalarParam
from compiler.ir.prove import prove_eq, prove_ne
from compiler.ir.types import ObjectType, ScalarType, TensorType, Type
from compiler.ops.nest import cast, const
from compiler.ops.operands import unproved
from compiler.ops.tables import Operands, Place, UnknownShape

ZERO, ONE = Dim.of(0), Dim.of(1)

Shape = tuple[Dim, ...]


# --- annotations -------------------------------------------------------------------------------------------------------


def broadcast_dims(a: Dim, b: Dim) -> Dim | None:
    """The extent that both broadcast to; None when it depends on values."""
    if prove_eq(a, b) or prove_eq(b, 1):
        return a
    if prove_eq(a, 1):
        return b
    wide = [d for d in (a, b) if prove_ne(d, 1)]
    if len(wide) == 2 and prove_ne(a, b):
        raise AnnotationError(f"extents {a} and {b} do not broadcast")
    return min(wide, key=lambda d: not d.is_const, default=None)


def broadcast_shapes(a: Shape, b: Shape) -> Shape | None:
    rank = max(len(a), len(b))
    padded = zip((ONE,) * (rank - len(a)) + a, (ONE,) * (rank - len(b)) + b, strict=True)
    dims: list[Dim | None] = []
    for i, (x, y) in enumerate(padded):
        try:
            dims.append(broadcast_dims(x, y))
        except AnnotationError as error:
            raise AnnotationError(f"dimension {i}: {error}") from None
    return tuple(d for d in dims if d is not None) if None not in dims else None


def broadcast_tensors(args: Sequence[Type], dtype: DType | None) -> TensorType:
    """The annotation of an elementwise result of this element type."""
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
                raise AnnotationError(f"an operand is {arg}, wants tensors and scalars")
    if not tensors:
        raise AnnotationError(f"wants a tensor among its operands, has {', '.join(map(str, args))}")
    if any(t.ndim is None for t in tensors):
        return TensorType(None, dtype)
    shape: Shape | None = ()
    for t in tensors:
        shape = broadcast_shapes(shape, t.shape) if shape is not None and t.shape is not None else None
    return TensorType(shape, dtype, max(t.ndim or 0 for t in tensors))


# --- loops -------------------------------------------------------------------------------------------------------------


def output(operands: Operands, name: str = "out") -> Buffer:
    """The buffer of an operator's only result."""
    return sized_buffer(operands.out, name)


def sized_buffer(type_: Type, name: str) -> Buffer:
    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is None:
        raise UnknownShape(f"the result is {type_}, and a loop nest needs all extents; state those of the operands with match_cast")
    return Buffer(name, type_.shape, type_.dtype)


def element(place: Place | None, ijk: Sequence[Dim], dtype: DType) -> Scalar:
    """The operand's element that broadcasting puts at `ijk` of the result; a scalar takes the type of the tensors."""
    if isinstance(place, Const):
        return const(place.value, dtype)
    if isinstance(place, ScalarParam):
        return cast(place, dtype)
    assert place is not None, "a shape has no elements"
    inner = ijk[len(ijk) - len(place.shape) :]
    return Load(place, tuple(ZERO if prove_eq(d, 1) else i for d, i in zip(place.shape, inner, strict=True)))


def broadcast_checks(operands: Operands, shape: Shape) -> tuple[tuple[int, Type], ...]:
    """What tensors must match because it is not proved that they broadcast to `shape`."""
    tensors = {i: place for i, place in enumerate(operands.places) if isinstance(place, Buffer)}
    return unproved(operands, {i: broadcast_from(shape, place.shape) for i, place in tensors.items()})


def broadcast_from(shape: Shape, given: Shape) -> Shape:
    """The extents that `given` must have to broadcast to `shape`."""
    inner = shape[len(shape) - len(given) :]
    return tuple(g if prove_eq(g, 1) else s for s, g in zip(inner, given, strict=True))
