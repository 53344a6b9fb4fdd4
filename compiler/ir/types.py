"""The six annotations. An annotation states what is known about a value at compile time.

    ObjectType      anything
      ScalarType    one number; `value` if it is a known integer expression
      ShapeType     a list of integers, as a value
      TensorType    an array of known shape, of known rank, or of unknown rank
      TupleType     a fixed number of values
      FuncType      a function

An argument is checked against the annotation of its parameter at run time. The annotation of any other value may state more than deduction
proves; the pass `check_facts` then adds a run-time check. An If is an exception: its annotation must be proved. `None` stands for "not
known". An operator that becomes a loop nest needs the extents of its operands; if deduction does not find them, a match_cast in the program
can state them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compiler.ir.dims import Dim, DimLike, DimVar
from compiler.ir.dtypes import DType


@dataclass(frozen=True, slots=True)
class ObjectType:
    def __str__(self) -> str:
        return "object"


@dataclass(frozen=True, slots=True)
class ScalarType:
    dtype: DType | None
    value: Dim | None = None

    def __str__(self) -> str:
        return f"scalar[{self.dtype or '?'}{'' if self.value is None else f', {self.value}'}]"


@dataclass(frozen=True, slots=True)
class ShapeType:
    """A list of integers whose values are known (`dims`), whose number is known (`ndim`), or neither."""

    dims: tuple[Dim, ...] | None
    ndim: int | None = None

    def __post_init__(self) -> None:
        if self.dims is not None:
            object.__setattr__(self, "ndim", len(self.dims))

    def __str__(self) -> str:
        return f"shape{_extents(self.dims, self.ndim)}"


@dataclass(frozen=True, slots=True)
class TensorType:
    """An array whose shape is known, whose rank is known (`ndim`), or neither. The element type may be unknown (None)."""

    shape: tuple[Dim, ...] | None
    dtype: DType | None
    ndim: int | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "ndim", len(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype or '?'}{_extents(self.shape, self.ndim)}"


@dataclass(frozen=True, slots=True)
class TupleType:
    fields: tuple[Type, ...]

    def __str__(self) -> str:
        return f"tuple[{', '.join(map(str, self.fields))}]"


@dataclass(frozen=True, slots=True)
class FuncType:
    """A function. `params` is None if only the result is known. The variables in a signature belong to the function; no other function
    uses them."""

    params: tuple[Type, ...] | None
    result: Type
    pure: bool = True

    def __str__(self) -> str:
        params = "" if self.params is None else f"({', '.join(map(str, self.params))})"
        return f"fn{'' if self.pure else '!'}{params} -> {self.result}"


Type = ObjectType | ScalarType | ShapeType | TensorType | TupleType | FuncType


def tensor(shape: tuple[DimLike, ...] | list[DimLike], dtype: DType) -> TensorType:
    """Return the annotation of an array whose extents are known."""
    return TensorType(tuple(Dim.of(d) for d in shape), dtype)


def dims_of(type_: Type) -> Iterator[Dim]:
    """Yield every dimension that the annotation mentions, left to right. Dimensions inside function types are left out, because they belong
    to the function's own signature."""
    match type_:
        case TensorType(shape=shape) if shape is not None:
            yield from shape
        case ShapeType(dims=dims) if dims is not None:
            yield from dims
        case ScalarType(value=value) if value is not None:
            yield value
        case TupleType(fields=fields):
            for field in fields:
                yield from dims_of(field)
        case _:
            return


def vars_of(type_: Type) -> tuple[DimVar, ...]:
    """Return the variables that the annotation mentions, in order of first appearance."""
    return tuple(dict.fromkeys(v for d in dims_of(type_) if not d.is_const for v in d.vars()))


def binders_of(type_: Type) -> tuple[DimVar, ...]:
    """Return the variables that become known if a value is matched against the annotation: every dimension that is a single variable.
    Dimensions inside function types do not count."""
    return tuple(dict.fromkeys(v for d in dims_of(type_) if (v := d.var) is not None))


def substitute(type_: Type, mapping: Mapping[DimVar, DimLike]) -> Type:
    """Replace variables in the dimensions of the annotation. Function types stay the same, because their variables are their own."""
    match type_:
        case TensorType(shape=shape, dtype=dtype) if shape is not None:
            return TensorType(tuple(d.substitute(mapping) for d in shape), dtype)
        case ShapeType(dims=dims) if dims is not None:
            return ShapeType(tuple(d.substitute(mapping) for d in dims))
        case ScalarType(dtype=dtype, value=value) if value is not None:
            return ScalarType(dtype, value.substitute(mapping))
        case TupleType(fields=fields):
            return TupleType(tuple(substitute(f, mapping) for f in fields))
        case _:
            return type_


def erase(type_: Type, keep: set[DimVar]) -> Type:
    """Replace a shape or a value that mentions a variable outside `keep` by None (not known). Keep the rank and the element type. Function
    types stay the same."""
    match type_:
        case TensorType(shape=shape, dtype=dtype) if shape is not None:
            return type_ if _known(shape, keep) else TensorType(None, dtype, len(shape))
        case ShapeType(dims=dims) if dims is not None:
            return type_ if _known(dims, keep) else ShapeType(None, len(dims))
        case ScalarType(dtype=dtype, value=value) if value is not None:
            return type_ if _known((value,), keep) else ScalarType(dtype)
        case TupleType(fields=fields):
            return TupleType(tuple(erase(f, keep) for f in fields))
        case _:
            return type_


def _extents(dims: tuple[Dim, ...] | None, ndim: int | None) -> str:
    if dims is not None:
        return f"[{', '.join(map(str, dims))}]"
    return "" if ndim is None else f"[ndim={ndim}]"


def _known(dims: tuple[Dim, ...], keep: set[DimVar]) -> bool:
    return all(v in keep for d in dims for v in d.vars())
