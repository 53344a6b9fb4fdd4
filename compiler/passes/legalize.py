"""Replace operators by the loop nests (or host routines) that compute them.

Before: operators with known shapes. After: an operator with a nest is a `CallTir` of an outlined function with safe indices
(safe_indices.py), and one with a host routine is a `CallLibrary`. Views stay operators, since they compute nothing, and so do operators
that the virtual machine itself executes. If deduction could not prove that operands agree, a match_cast checks them. If a nest needs the
shape of an operand and the annotation does not have it, UnknownShape is raised, which names the remedy.
"""

from __future__ import annotations

from collections.abc import Hashable

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call, CallLibrary, CallTir, MakeTuple
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Const, ScalarParam
from compiler.ir.module import IRModule
from compiler.ir.types import ScalarType, TensorType, TupleType, Type
from compiler.ops.tables import LEGALIZE, Fit, Library, Nest, Operands, Place, UnknownShape, View
from compiler.passes.check_facts import require_broadcast, require_equal, require_tensors, require_type
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import rewrite_module
from compiler.passes.safe_indices import with_safe_indices
from compiler.passes.share_subexpressions import freeze


def legalize(module: IRModule) -> IRModule:
    outliner: list[Outliner] = []
    known: dict[Hashable, tuple[CallTir, tuple[Atom, ...]]] = {}

    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        if not isinstance(value, Call) or value.op.name not in LEGALIZE:
            return None
        if not outliner:
            outliner.append(Outliner(builder, module))
        safe = with_safe_indices(builder, outliner[0], binding.var, value)
        return _repeated(builder, outliner[0], binding.var, safe, known)

    return rewrite_module(module, replace)


def _repeated(
    builder: Builder, outliner: Outliner, var: Var, call: Call, known: dict[Hashable, tuple[CallTir, tuple[Atom, ...]]]
) -> Value | None:
    """Return a call of the function that was made for an earlier call with the same operator, types, attributes and literal numbers, since
    the layers of a model repeat calls. If there is none, legalize the call, and remember its function if it reads only operands of the
    call. Return None for a view that needs no check."""
    attrs = tuple((name, freeze(value)) for name, value in sorted(call.attrs.items()))
    literals = tuple(freeze(a.value) if isinstance(a, ScalarValue) and not isinstance(a.value, Dim) else None for a in call.args)
    same = tuple(call.args.index(a) for a in call.args)
    types = tuple(a.dtype if isinstance(a, ScalarValue) else type_of(a, builder.signature) for a in call.args)
    key = (call.op.name, attrs, types, literals, same, var.type)
    if key in known:
        made, args = known[key]
        new = dict(zip(args, call.args, strict=True))
        return CallTir(made.func, tuple(new.get(a, a) for a in made.args), made.out, made.inplace)
    value = _legalize(builder, outliner, var, call)
    if isinstance(value, CallTir) and not any(isinstance(a, Var) and a not in call.args for a in value.args):
        known[key] = value, call.args
    return value


def _legalize(builder: Builder, outliner: Outliner, var: Var, call: Call) -> Value | None:
    """Return the value that replaces the call of an operator, and emit the call's checks. Return None for a view that needs no check."""
    name, args = call.op.name, call.args
    types = tuple(type_of(a, builder.signature) for a in args)
    places = tuple(_place(_letter(i), a, t) for i, (a, t) in enumerate(zip(args, types, strict=True)))
    operands = Operands(args, types, places, {**call.op.attributes, **call.attrs}, var.type)
    try:
        legal = LEGALIZE[name](operands)
    except UnknownShape as error:
        raise UnknownShape(f"{name} ({var.name}): {error}") from None
    boundary = f"{name} {var.name!r}"
    if isinstance(legal, Library):
        return CallLibrary(legal.name, require_tensors(builder.emit, args, boundary), _fields(var.type), legal.attrs)
    if isinstance(legal, View):
        for wanted, given in legal.equal:
            require_equal(builder.emit, wanted, given, boundary)
        return call if legal.equal else None
    for fit in legal.fits:
        require_broadcast(builder.emit, fit.wanted, fit.given, _fit_text(boundary, fit, args[fit.operand]))
    args = _checked(builder, args, legal, boundary)
    pairs: list[tuple[Buffer | ScalarParam, Atom]] = []
    numbers: dict[int, int] = {}  # index of an operand -> index among the operands that the function reads
    for i, (place, atom) in enumerate(zip(places, args, strict=True)):
        if isinstance(place, Buffer | ScalarParam):
            numbers[i] = len(pairs)
            pairs.append((place, atom))
    inplace = tuple(None if i is None else numbers[i] for i in legal.inplace)
    made = outliner.call(name, pairs, legal.outputs, legal.body, inplace=inplace, attrs=dict(legal.attrs))
    alone = isinstance(var.type, TupleType) and len(legal.outputs) == 1  # the operator returns a tuple that has only one field
    if alone:
        return MakeTuple((builder.emit(made),))
    # emitted here, so that no other call reuses the value without its checks
    return builder.emit(made) if legal.fits else made


def _fit_text(boundary: str, fit: Fit, operand: Atom) -> str:
    name = f" {operand.name!r}" if isinstance(operand, Var) else ""
    return f"{boundary}, operand {fit.operand}{name}, dimension {fit.axis}: {fit.given} is neither 1 nor the extent of the result"


def _checked(builder: Builder, args: tuple[Atom, ...], nest: Nest, boundary: str) -> tuple[Atom, ...]:
    checked = list(args)
    for index, type_ in nest.checks:
        checked[index] = require_type(builder.emit, checked[index], type_, f"{boundary}, operand {index}")
    return tuple(checked)


def _place(name: str, atom: Atom, type_: Type) -> Place | None:
    """Return what stands for an operand in the nest: a buffer or a scalar parameter with this name, or a literal number. Return None for a
    shape, a tensor of unknown extents or element type, and a value of any other type."""
    match atom, type_:
        case ScalarValue(value=Dim()), ScalarType(dtype=dtype) if dtype is not None:
            # an i64 becomes a parameter even if it is a literal: calls that differ only in the literal (a layer's index) share the function
            return ScalarParam(name, dtype)
        case ScalarValue(value=bool() | int() | float() as value, dtype=dtype), _:
            return Const(value, DType(dtype))
        case _, TensorType(shape=shape, dtype=dtype) if shape is not None and dtype is not None:
            return Buffer(name, shape, dtype)
        case _, ScalarType(dtype=dtype) if dtype is not None:
            return ScalarParam(name, dtype)
        case _:
            return None


def _letter(index: int) -> str:
    return "abcdefghijklmnopqrstuvw"[index] if index < 23 else f"x{index}"


def _fields(type_: Type) -> tuple[Type, ...]:
    return type_.fields if isinstance(type_, TupleType) else (type_,)
