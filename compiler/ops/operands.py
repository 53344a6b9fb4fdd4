"""Checks of operands and attributes in deductions. A failed check raises an AnnotationError with the value found and the value expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.prove import prove_eq, prove_ne
from compiler.ir.types import ObjectType, ShapeType, TensorType, Type
from compiler.ops.tables import Operands

# --- operands ----------------------------------------------------------------------------------------------------------


def tensor_operand(args: Sequence[Type], index: int, name: str, *, ndim: int | None = None, layout: str = "") -> TensorType:
    """Return the annotation of a tensor operand. An object counts as a tensor of unknown shape and element type.
    `name` and `layout` describe the operand in errors."""
    match args[index]:
        case ObjectType():
            return TensorType(None, None, ndim)
        case TensorType() as type_:
            if ndim is not None and type_.ndim not in (None, ndim):
                raise AnnotationError(f"{name} has rank {type_.ndim}, expected {ndim}{layout and ': '}{layout}")
            return type_
        case other:
            raise AnnotationError(f"{name} is {other}, expected a tensor")


def shape_operand(args: Sequence[Type], index: int, name: str) -> ShapeType:
    match args[index]:
        case ObjectType():
            return ShapeType(None)
        case ShapeType() as type_:
            return type_
        case other:
            raise AnnotationError(f"{name} is {other}, expected a shape")


def wants_float(type_: TensorType, name: str) -> TensorType:
    if type_.dtype is not None and not type_.dtype.is_float:
        raise AnnotationError(f"{name} holds {type_.dtype}, expected floats; cast it first")
    return type_


def wants_int(type_: TensorType, name: str) -> TensorType:
    if type_.dtype is not None and not type_.dtype.is_int:
        raise AnnotationError(f"{name} holds {type_.dtype}, expected integers; cast it first")
    return type_


def agree(wanted: Dim, given: Dim, what: str) -> None:
    """Raise AnnotationError if two extents are proved to differ. Extents that are neither proved equal nor proved different are left to the
    run-time checks of the legalization."""
    if prove_ne(wanted, given):
        raise AnnotationError(f"{what} is {given}, expected {wanted}")


def unproved(operands: Operands, wanted: Mapping[int, Sequence[Dim]]) -> tuple[tuple[int, Type], ...]:
    """Return a run-time check for each operand that is not proved to have its extents in `wanted`. `wanted` maps the index of an operand to
    its extents. A check is the index of the operand and the annotation that it must have."""
    given = {i: operands.buffer(i) for i in wanted}
    wrong = [i for i, shape in wanted.items() if not all(prove_eq(w, g) for w, g in zip(shape, given[i].shape, strict=True))]
    return tuple((i, TensorType(tuple(wanted[i]), given[i].dtype)) for i in wrong)


def same_dtype(types: Sequence[TensorType]) -> DType | None:
    """Return the element type that the tensors share, or None if no tensor has a known element type. Raise AnnotationError if two known
    element types differ."""
    dtypes = dict.fromkeys(t.dtype for t in types if t.dtype is not None)
    if len(dtypes) > 1:
        raise AnnotationError(f"operands have element types {', '.join(dtypes)}; cast them to one type")
    return next(iter(dtypes), None)


def num_elements(shape: Sequence[Dim]) -> Dim:
    return prod(shape, start=Dim.of(1))


# --- attributes --------------------------------------------------------------------------------------------------------


def int_attr(attrs: Mapping[str, Any], name: str, least: int | None = None) -> int:
    """Return an attribute that is an integer of 64 bits, and at least `least` if that is given."""
    value = attrs[name]
    if isinstance(value, Dim) and value.is_const:
        value = value.const
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise AnnotationError(f"attribute {name} is {value!r}, expected an integer{'' if least is None else f' of at least {least}'}")
    return _fitting(value, name)


def dim_attr(attrs: Mapping[str, Any], name: str) -> Dim:
    """Return an attribute that is an integer or an expression of symbolic variables. Raise AnnotationError if it is neither."""
    return _as_dim(attrs[name], name)


def dims_attr(attrs: Mapping[str, Any], name: str) -> tuple[Dim, ...]:
    return tuple(_as_dim(v, name) for v in _items(attrs[name], name))


def float_attr(attrs: Mapping[str, Any], name: str) -> float:
    value = attrs[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnnotationError(f"attribute {name} is {value!r}, expected a number")
    return float(value)


def bool_attr(attrs: Mapping[str, Any], name: str) -> bool:
    if not isinstance(attrs[name], bool):
        raise AnnotationError(f"attribute {name} is {attrs[name]!r}, expected true or false")
    return attrs[name]


def dtype_attr(attrs: Mapping[str, Any], name: str = "dtype") -> DType:
    try:
        return DType(attrs[name])
    except ValueError:
        raise AnnotationError(f"attribute {name} is {attrs[name]!r}, expected one of {', '.join(DType)}") from None


def axis_attr(attrs: Mapping[str, Any], ndim: int, name: str = "axis") -> int:
    """Return the attribute as an axis in 0 .. ndim - 1. A negative axis counts from the end. Raise AnnotationError if there is no such
    axis."""
    return _axis(int_attr(attrs, name), ndim, name)


def axes_attr(attrs: Mapping[str, Any], ndim: int, name: str = "axes") -> tuple[int, ...]:
    """Return the attribute as axes in the order given. A single integer stands for one axis. Raise AnnotationError if an axis does not
    exist, or is named twice."""
    value = attrs[name]
    items = [value] if isinstance(value, int) else _items(value, name)
    axes = tuple(_axis(int_attr({name: item}, name), ndim, name) for item in items)
    if len(set(axes)) != len(axes):
        raise AnnotationError(f"attribute {name} is {value!r} and names an axis twice; expected distinct axes")
    return axes


def _axis(axis: int, ndim: int, name: str) -> int:
    if not -ndim <= axis < ndim:
        raise AnnotationError(f"attribute {name} is {axis}, expected an axis of a tensor of rank {ndim}")
    return axis % ndim


def _as_dim(value: Any, name: str) -> Dim:
    if isinstance(value, bool) or not isinstance(value, int | Dim | DimVar):
        raise AnnotationError(f"attribute {name} is {value!r}, expected an integer or a dimension")
    dim = Dim.of(value)
    if dim.is_const:
        _fitting(dim.const, name)
    return dim


def _fitting(value: int, name: str) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise AnnotationError(f"attribute {name} is {value}, expected an integer of 64 bits")
    return value


def _items(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise AnnotationError(f"attribute {name} is {value!r}, expected a list")
    return value
