"""Compatibility of annotations: whether a value annotated `given` may be used where `wanted` is required, and what two annotations have in
common.

Four levels, from best to worst:

    PASS       every value of `given` is one of `wanted`
    SYMBOLIC   only values of dimensions are unproved: accepted, checked at run time
    COARSE     `given` lacks a fact that `wanted` states, such as a rank: an error for an argument
    DISJOINT   no value can have both annotations, or an impure function is given where a pure one is wanted: always an error
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from compiler.ir.dims import Dim, DimVar
from compiler.ir.prove import prove_eq, prove_le, prove_ne
from compiler.ir.types import FuncType, ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type, substitute


class Level(IntEnum):
    DISJOINT = 0
    COARSE = 1
    SYMBOLIC = 2
    PASS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    reason: str = ""  # what differs or is unproved, and where: "dimension 1: n against 4"

    def at(self, place: str) -> Verdict:
        return self if self.level is Level.PASS else Verdict(self.level, f"{place}{self.reason}")


PASS = Verdict(Level.PASS)


def subsumes(wanted: Type, given: Type) -> Verdict:
    """Return whether values annotated `given` can be used where `wanted` is required, as one of the four levels, with the reason. If
    several parts of the annotations differ, return the worst verdict."""
    match wanted, given:
        case ObjectType(), _:
            return PASS
        case _, ObjectType():
            return Verdict(Level.COARSE, "nothing is known of the value")
        case TensorType(), TensorType():
            dtype = _dtypes(wanted.dtype, given.dtype)
            return worst(dtype, _shapes(wanted.shape, wanted.ndim, given.shape, given.ndim))
        case ShapeType(), ShapeType():
            return _shapes(wanted.dims, wanted.ndim, given.dims, given.ndim)
        case ScalarType(), ScalarType():
            dtype = _dtypes(wanted.dtype, given.dtype)
            if wanted.value is None:
                return dtype
            if given.value is None:
                return worst(dtype, Verdict(Level.SYMBOLIC, f"value: {wanted.value} against an unknown one"))
            return worst(dtype, _dims(wanted.value, given.value).at("value: "))
        case TupleType(), TupleType():
            if len(wanted.fields) != len(given.fields):
                return Verdict(Level.DISJOINT, f"{len(wanted.fields)} fields against {len(given.fields)}")
            pairs = zip(wanted.fields, given.fields, strict=True)
            return worst(*(subsumes(w, g).at(f"field {i}: ") for i, (w, g) in enumerate(pairs)))
        case FuncType(), FuncType():
            return _functions(wanted, given)
        case _:
            return Verdict(Level.DISJOINT, f"{_kind(wanted)} against {_kind(given)}")


def worst(*verdicts: Verdict) -> Verdict:
    """Return the first verdict with the lowest level, or PASS if there are no verdicts."""
    return min(verdicts, key=lambda v: v.level, default=PASS)


def join(a: Type, b: Type) -> Type:
    """Return an annotation that holds for the values of `a` and the values of `b`. The result states what both annotations state: the kind,
    the element type, the rank, and the shape or the value if all its dimensions are proved equal. Unless one of two signatures is proved to
    fit the other, the parameters of their join are unknown."""
    match a, b:
        case TensorType(), TensorType():
            dtype = a.dtype if a.dtype == b.dtype else None
            if a.shape is not None and b.shape is not None and _same_dims(a.shape, b.shape):
                return TensorType(a.shape, dtype)
            return TensorType(None, dtype, a.ndim if a.ndim == b.ndim else None)
        case ShapeType(), ShapeType():
            if a.dims is not None and b.dims is not None and _same_dims(a.dims, b.dims):
                return a
            return ShapeType(None, a.ndim if a.ndim == b.ndim else None)
        case ScalarType(), ScalarType():
            dtype = a.dtype if a.dtype == b.dtype else None
            same = a.value is not None and b.value is not None and prove_eq(a.value, b.value)
            return ScalarType(dtype, a.value if same else None)
        case TupleType(), TupleType() if len(a.fields) == len(b.fields):
            return TupleType(tuple(join(x, y) for x, y in zip(a.fields, b.fields, strict=True)))
        case FuncType(), FuncType():
            if subsumes(a, b).level is Level.PASS:
                return a
            if subsumes(b, a).level is Level.PASS:
                return b
            return FuncType(None, join(a.result, b.result), a.pure and b.pure)
        case _:
            return ObjectType()


def unify(params: tuple[Type, ...], args: tuple[Type, ...]) -> dict[DimVar, Dim]:
    """Bind the variables of a signature to dimensions of the arguments. The first dimension of a parameter that is a single variable binds
    the variable. Other expressions bind nothing, since a later parameter may define their variables. An argument whose kind differs from
    that of its parameter, or whose dimensions are not known, binds nothing. There must be as many arguments as parameters."""
    found: dict[DimVar, Dim] = {}
    for param, arg in zip(params, args, strict=True):
        _unify(param, arg, found)
    return found


def _unify(param: Type, arg: Type, found: dict[DimVar, Dim]) -> None:
    match param, arg:
        case TensorType(shape=wanted), TensorType(shape=given):
            _unify_dims(wanted, given, found)
        case ShapeType(dims=wanted), ShapeType(dims=given):
            _unify_dims(wanted, given, found)
        case ScalarType(value=wanted), ScalarType(value=given):
            if wanted is not None and given is not None:
                _unify_dims((wanted,), (given,), found)
        case TupleType(fields=wanted), TupleType(fields=given) if len(wanted) == len(given):
            for w, g in zip(wanted, given, strict=True):
                _unify(w, g, found)
        case _:
            return


def _unify_dims(wanted: tuple[Dim, ...] | None, given: tuple[Dim, ...] | None, found: dict[DimVar, Dim]) -> None:
    if wanted is None or given is None or len(wanted) != len(given):
        return
    for w, g in zip(wanted, given, strict=True):
        if (var := w.var) is not None:
            found.setdefault(var, g)


def _functions(wanted: FuncType, given: FuncType) -> Verdict:
    """Compare two signatures. Each signature has its own variables, so the parameters of `wanted` bind the variables of `given`."""
    if wanted.pure and not given.pure:
        return Verdict(Level.DISJOINT, "an impure function where a pure one is wanted")
    if wanted.params is None:
        return subsumes(wanted.result, given.result).at("result: ")
    if given.params is None:
        result = subsumes(wanted.result, given.result).at("result: ")
        return worst(result, Verdict(Level.COARSE, "the parameters are not known"))
    if len(wanted.params) != len(given.params):
        return Verdict(Level.DISJOINT, f"{len(wanted.params)} parameters against {len(given.params)}")
    found = unify(given.params, wanted.params)
    verdicts = [subsumes(wanted.result, substitute(given.result, found)).at("result: "), *_ranges(found)]
    for i, (w, g) in enumerate(zip(wanted.params, given.params, strict=True)):
        # Compare in the opposite direction: `given` must accept every argument that `wanted` accepts.
        verdict = subsumes(substitute(g, found), w).at(f"parameter {i}: ")
        # The function checks its arguments when it is entered, so a COARSE parameter counts as SYMBOLIC, like an unproved dimension.
        verdicts.append(Verdict(Level.SYMBOLIC, verdict.reason) if verdict.level is Level.COARSE else verdict)
    return worst(*verdicts)


def _ranges(found: dict[DimVar, Dim]) -> Iterator[Verdict]:
    """Yield a SYMBOLIC verdict for each variable whose value is not proved to be in its range. The range is checked when the function is
    entered."""
    for var, value in found.items():
        upper = var.upper.substitute(found) if isinstance(var.upper, Dim) else var.upper
        above, below = prove_le(var.lower, value), upper is None or prove_le(value, upper)
        if not (above and below and prove_eq(value % var.multiple_of, 0)):
            yield Verdict(Level.SYMBOLIC, f"{value} against the range of {var.name}")


def _dtypes(wanted: str | None, given: str | None) -> Verdict:
    if wanted is None or wanted == given:
        return PASS
    if given is None:
        return Verdict(Level.COARSE, f"element type: {wanted} against an unknown one")
    return Verdict(Level.DISJOINT, f"element type: {wanted} against {given}")


def _shapes(wanted: tuple[Dim, ...] | None, wanted_ndim: int | None, given: tuple[Dim, ...] | None, given_ndim: int | None) -> Verdict:
    if wanted_ndim is None:
        return PASS
    if given_ndim is None:
        return Verdict(Level.COARSE, f"rank: {wanted_ndim} against an unknown one")
    if wanted_ndim != given_ndim:
        return Verdict(Level.DISJOINT, f"rank: {wanted_ndim} against {given_ndim}")
    if wanted is None:
        return PASS
    if given is None:
        return Verdict(Level.SYMBOLIC, "the dimensions are not known")
    pairs = zip(wanted, given, strict=True)
    return worst(*(_dims(w, g).at(f"dimension {i}: ") for i, (w, g) in enumerate(pairs)))


def _dims(wanted: Dim, given: Dim) -> Verdict:
    if prove_eq(wanted, given):
        return PASS
    if prove_ne(wanted, given):
        return Verdict(Level.DISJOINT, f"{wanted} against {given}")
    return Verdict(Level.SYMBOLIC, f"{wanted} against {given}")


def _same_dims(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    return len(a) == len(b) and all(prove_eq(x, y) for x, y in zip(a, b, strict=True))


def _kind(type_: Type) -> str:
    return type(type_).__name__.removesuffix("Type").lower()
