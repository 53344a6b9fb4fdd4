"""Deduce a value's annotation from the annotations of its operands. Deduction is forward and local: it looks at one value at a time. The
builder deduces the annotation of every value that it emits, so a pass that rebuilds a function with the builder gets new annotations for
the bindings that it changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Set
from functools import lru_cache
from math import prod
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.function import If, Value
from compiler.ir.graph.values import Alloc, Call, CallFunc, CallLibrary, CallTir, Copy, Launch, MakeTuple, MatchCast, TupleGet
from compiler.ir.op import REQUIRED, OpDef
from compiler.ir.subsume import Level, join, subsumes, unify
from compiler.ir.types import (
    FuncType,
    ObjectType,
    ScalarType,
    ShapeType,
    TensorType,
    TupleType,
    Type,
    binders_of,
    erase,
    substitute,
)
from runtime.library import LIBRARY

MOST_BYTES = 1 << 48  # limit for one tensor; the address space of a process is smaller

Signature = Callable[[str], FuncType]  # returns the signature of a graph-level function, by name


def type_of(atom: Atom, signature: Signature | None = None) -> Type:
    """Return the annotation of an atom. Without `signature`, the parameters and the result of a FuncRef count as unknown."""
    match atom:
        case Var(type=type_):
            return type_
        case Constant(data=data):
            return TensorType(tuple(Dim.of(n) for n in data.shape), DType.from_numpy(data.dtype))
        case ShapeValue(dims=dims):
            return ShapeType(dims)
        case ScalarValue(value=value, dtype=dtype):
            return ScalarType(DType(dtype), value if isinstance(value, Dim) else None)
        case FuncRef(name=name):
            return signature(name) if signature else FuncType(None, ObjectType())


def deduce(value: Value, signature: Signature, scope: Set[DimVar]) -> Type:
    """Return the annotation of a value. `scope` has the symbolic variables that are defined before the value. Raise AnnotationError if the
    value cannot have one, for example because an operator refuses its operands."""
    match value:
        case Var() | Constant() | ShapeValue() | ScalarValue() | FuncRef():
            return type_of(value, signature)
        case Copy(value=atom):
            return type_of(atom, signature)
        case Call():
            return _operator(value, signature)
        case CallTir(out=out) | CallLibrary(out=out):
            if isinstance(value, CallLibrary):
                require_library(value)
            return out[0] if len(out) == 1 else TupleType(out)
        case CallFunc():
            return _function(value, signature)
        case MakeTuple(fields=fields):
            return TupleType(tuple(type_of(f, signature) for f in fields))
        case TupleGet(value=atom, index=index):
            return _field(type_of(atom, signature), index)
        case MatchCast(value=atom, type=type_):
            given = type_of(atom, signature)
            verdict = subsumes(type_, given)
            if verdict.level is Level.DISJOINT:
                raise AnnotationError(f"match_cast can never succeed: the value is {given}, expected {type_} ({verdict.reason})")
            return type_
        case If(then=then, orelse=orelse):
            keep = set(scope)
            sides = (erase(type_of(b.result, signature), keep) for b in (then, orelse))
            return join(*sides)
        case Alloc(type=type_):
            return type_
        case Launch():
            return TupleType(())


def require_library(call: CallLibrary) -> None:
    """Raise AnnotationError if a routine of the runtime cannot be called with these operands, attributes and outputs. A call of an unknown
    routine is not checked."""
    known = LIBRARY.get(call.name)
    sized = all(isinstance(t, TensorType) and t.shape is not None for t in call.out)
    if known is not None and (problem := known.problem(len(call.args), call.attrs, len(call.out), sized=sized)):
        raise AnnotationError(f"call_library {problem}")


def _operator(call: Call, signature: Signature) -> Type:
    """Deduce the annotation of a call of an operator. Attributes that the call leaves out get their defaults. Raise AnnotationError if the
    operator does not have an attribute of the call, if an attribute without a default is missing, or if the operator cannot take the
    operands."""
    op = call.op
    unknown = set(call.attrs) - set(op.attributes)
    if unknown:
        raise AnnotationError(f"{op.name} has no attribute {', '.join(sorted(unknown))}; it has {', '.join(op.attributes)}")
    attrs = {**op.attributes, **call.attrs}
    missing = [name for name, default in attrs.items() if default is REQUIRED]
    if missing:
        raise AnnotationError(f"{op.name} needs the attribute {', '.join(missing)}")
    return operator_type(op, tuple(type_of(a, signature) for a in call.args), attrs)


def operator_type(op: OpDef, args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    """Deduce the annotation of a call from the annotations of its operands and all attributes of the operator. Raise AnnotationError if the
    operator cannot take these operands."""
    try:
        # Do not cache calls with an attribute that is a tuple, since tuples of 1, of 1.0 and of True are equal keys, or that has no hash.
        if any(isinstance(value, tuple) or not isinstance(value, Hashable) for value in attrs.values()):
            return _related(op, args, attrs)
        return _remembered(op, args, tuple((name, type(value), value) for name, value in attrs.items()))
    except AnnotationError as error:
        raise AnnotationError(f"{op.name}({', '.join(map(str, args))}): {error}") from None


@lru_cache(maxsize=4096)
def _remembered(op: OpDef, args: tuple[Type, ...], attrs: tuple[tuple[str, type, Any], ...]) -> Type:
    """Deduce the annotation of a call and cache it. The result depends only on annotations and attributes, and layers repeat the same
    calls. The key has the types of the attributes, because 1, 1.0 and True are equal, and an operator may refuse two of them."""
    return _related(op, args, {name: value for name, _, value in attrs})


def _related(op: OpDef, args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    """Deduce the annotation of a call. Raise AnnotationError if the operator's own rule refuses the operands, if a relation of the operator
    is proved not to hold, or if the result is too large."""
    type_ = op.deduce(args, attrs)
    for relation in op.relations(args, attrs):
        if relation.is_violated:
            raise AnnotationError(relation.sentence)
    require_size(type_)
    return type_


def require_alike(value: If, signature: Signature) -> None:
    """Raise AnnotationError if the annotations of the branches' results state different kinds, element types, ranks or numbers of fields.
    The join of these annotations would lose the difference. A program that wants such branches must state the annotation of the binding."""
    sides = tuple(type_of(b.result, signature) for b in (value.then, value.orelse))
    if difference := _difference(*sides):
        given = f"the branches give {sides[0]} and {sides[1]}, whose {difference} differ"
        raise AnnotationError(f"{given}; make them equal, or annotate the binding, for example with `object`")


def _difference(a: Type, b: Type) -> str:
    """Return what differs between two annotations, in the plural, or "". A part that is unknown in one annotation does not count as
    different; neither do extents and signatures."""
    match a, b:
        case (ObjectType(), _) | (_, ObjectType()):
            return ""
        case (TensorType(), TensorType()) | (ScalarType(), ScalarType()) if None not in (a.dtype, b.dtype) and a.dtype != b.dtype:
            return "element types"
        case (TensorType(), TensorType()) | (ShapeType(), ShapeType()) if None not in (a.ndim, b.ndim) and a.ndim != b.ndim:
            return "ranks"
        case TupleType(), TupleType() if len(a.fields) == len(b.fields):
            return next((d for x, y in zip(a.fields, b.fields, strict=True) if (d := _difference(x, y))), "")
        case TupleType(), TupleType():
            return "numbers of fields"
        case _:
            return "" if type(a) is type(b) else "kinds"


def require_size(type_: Type) -> None:
    """Raise AnnotationError if a tensor whose extents are all constants, also one inside a tuple, has more than MOST_BYTES bytes, or if an
    extent is 0 and the product of the others does not fit 64 bits. Symbolic extents are not checked."""
    match type_:
        case TensorType(shape=tuple() as shape, dtype=DType() as dtype) if all(d.is_const for d in shape):
            if (num_bytes := prod(d.const for d in shape) * dtype.num_bytes) > MOST_BYTES:
                raise AnnotationError(f"the result {type_} has {num_bytes} bytes, expected at most {MOST_BYTES}")
            if prod(d.const or 1 for d in shape) * dtype.num_bytes >= 1 << 63:
                raise AnnotationError(f"the result {type_} has no elements, but its other extents are too large together")
        case TupleType(fields=fields):
            for inner in fields:
                require_size(inner)
        case _:
            pass


def _function(call: CallFunc, signature: Signature) -> Type:
    """Deduce the annotation of a call from the callee's signature and the arguments, without looking at the callee's body. The arguments
    bind the variables of the signature; dimensions of the result with other variables are erased. Raise AnnotationError if the callee is no
    function, if the number of arguments is wrong, or if an argument cannot have the annotation of its parameter or lacks a fact that the
    parameter states, such as a rank. If the callee's parameters are unknown, the arguments are not checked."""
    callee = type_of(call.callee, signature)
    if not isinstance(callee, FuncType):
        raise AnnotationError(f"{call.callee} is called, but it is {callee}; expected a function")
    if callee.params is None:
        return callee.result
    args = tuple(type_of(a, signature) for a in call.args)
    if len(args) != len(callee.params):
        raise AnnotationError(f"{call.callee} takes {len(callee.params)} arguments; it is called with {len(args)}")
    found = unify(callee.params, args)
    for i, (param, arg) in enumerate(zip(callee.params, args, strict=True)):
        wanted = substitute(param, found)
        verdict = subsumes(wanted, arg)
        if verdict.level in (Level.DISJOINT, Level.COARSE) and not _opaque(wanted):
            raise AnnotationError(f"argument {i} is {arg}, expected {wanted} ({verdict.reason})")
    own = {v for p in callee.params for v in binders_of(p)}
    known = {v for v in own if v in found}
    result = erase(callee.result, known)
    return substitute(result, found)


def _opaque(type_: Type) -> bool:
    """Return whether the annotation is that of a function with unknown parameters. Arguments for such a parameter are not checked."""
    return isinstance(type_, FuncType) and type_.params is None


def _field(type_: Type, index: int) -> Type:
    """Return the annotation of a field of a tuple. A field of an object is an object. Raise AnnotationError if the value is neither an
    object nor a tuple, or has no such field."""
    if isinstance(type_, ObjectType):
        return type_
    if not isinstance(type_, TupleType):
        raise AnnotationError(f"field {index} is read from {type_}, expected a tuple")
    if not 0 <= index < len(type_.fields):
        raise AnnotationError(f"field {index} is read from a tuple of {len(type_.fields)} fields")
    return type_.fields[index]
