"""Replace the index operands of a call by safe ones, as `compiler/ops/indices.py` declares. `legalize` does this before it lowers a call.

A scalar index is checked where it is not proved to be in range. A tensor whose declaration states `ahead` is replaced by a safe copy; for
other tensors, the operator's own loops make indices safe. Copies of the same operand with the same bound are equal calls, of which
`share_subexpressions` keeps one. If there are indices to clamp or owners to find (`Treatment`), a check fails if there is nothing to which
they could refer.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.ir.dims import Dim, DimVar, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.values import Call, MatchCast
from compiler.ir.loops.buffers import Buffer
from compiler.ir.types import ScalarType, TensorType
from compiler.ops.indices import Extent, Index, Treatment, safe_nest
from compiler.ops.operands import num_elements
from compiler.ops.tables import INDICES, OPERANDS
from compiler.passes.check_facts import require_equal
from compiler.passes.outline import Outliner

NAMES = {
    Treatment.CLAMPED: "clamp_indices",
    Treatment.ZEROED: "zero_indices",
    Treatment.STARTS: "order_starts",
    Treatment.OWNERS: "find_owners",
}


def with_safe_indices(builder: Builder, outliner: Outliner, var: Var, call: Call) -> Call:
    """Emit the checks of the index operands, and return the call with safe copies of those tensors whose declaration states `ahead`. Other
    index operands are passed unchanged, and so are index operands with an unknown bound or type. If no operand is replaced, return the call
    itself."""
    names = OPERANDS[call.op.name]
    args = dict(zip(names, call.args, strict=False))
    shapes = {name: _shape(builder, atom) for name, atom in args.items()}
    changed = False
    for name, declared in INDICES.get(call.op.name, {}).items():
        if name not in args:
            continue
        bound = declared.bound_of(shapes, {**call.op.attributes, **call.attrs})
        if bound is None:
            continue  # without the extent, the nest cannot be made either, and its error says so
        place = f"{call.op.name} {var.name!r}, operand {name}"
        if declared.treatment is Treatment.CHECKED:
            _check(builder, args[name], Dim.of(bound), place)
        elif (type_ := _known(builder, args[name])) is not None:
            if declared.treatment in (Treatment.CLAMPED, Treatment.OWNERS):
                _something_to_read(builder, Dim.of(bound) - (declared.treatment is Treatment.OWNERS), type_, place)
            if declared.ahead:  # otherwise the nest itself makes the indices safe
                args[name] = _safe_copy(builder, outliner, args, name, declared, type_, Dim.of(bound))
                changed = True
    return replace(call, args=(*args.values(), *call.args[len(args) :])) if changed else call


def _shape(builder: Builder, atom: Atom) -> tuple[Dim, ...] | None:
    type_ = type_of(atom, builder.signature)
    return type_.shape if isinstance(type_, TensorType) else None


def _known(builder: Builder, atom: Atom) -> TensorType | None:
    type_ = type_of(atom, builder.signature)
    return type_ if isinstance(type_, TensorType) and type_.shape is not None and type_.dtype is not None else None


def _check(builder: Builder, atom: Atom, bound: Dim, place: str) -> None:
    """Require that a scalar is in 0 .. `bound` - 1. A scalar of unknown value gets a variable for its value first."""
    type_ = type_of(atom, builder.signature)
    value = type_.value if isinstance(type_, ScalarType) else None
    if isinstance(atom, ScalarValue) and isinstance(atom.value, Dim):
        value = atom.value
    if value is None:
        value = Dim.of(DimVar("index", -(2**63)))
        dtype = type_.dtype if isinstance(type_, ScalarType) and type_.dtype is not None else DType.I64
        builder.emit(MatchCast(atom, ScalarType(dtype, value), place))
    require_equal(builder.emit, dim_min(value, bound - 1), value, f"{place} (less than {bound})")
    require_equal(builder.emit, dim_max(value, 0), value, f"{place} (at least 0)")


def _something_to_read(builder: Builder, count: Dim, type_: TensorType, place: str) -> None:
    """Require that `count` is not 0 if there are indices. `count` is the number of things to which the indices can refer, and `type_` is
    the annotation of the indices."""
    assert type_.shape is not None
    wanted = dim_max(count, dim_min(num_elements(type_.shape), 1))
    require_equal(builder.emit, wanted, count, f"{place} (what the indices number)")


def _safe_copy(
    builder: Builder, outliner: Outliner, args: dict[str, Atom], name: str, declared: Index, type_: TensorType, bound: Dim
) -> Atom:
    """Return a safe copy of the operand `name`. Return the operand itself if its safe copy is computed from a list of starts whose extent
    is unknown."""
    assert type_.shape is not None
    assert type_.dtype is not None
    given, ordered = Buffer("indices", type_.shape, type_.dtype), None
    operands = [(given, args[name])]
    if declared.treatment is Treatment.OWNERS:
        assert isinstance(declared.bound, Extent)
        starts = args[declared.bound.operand]
        known = _known(builder, starts)
        if known is None:
            return args[name]  # without the extent, the nest cannot be made either, and its error says so
        assert known.shape is not None
        assert known.dtype is not None
        ordered = Buffer("starts", known.shape, known.dtype)
        operands = [(ordered, starts)]
    out, body = safe_nest(declared.treatment, given, bound, ordered)
    return builder.emit(outliner.call(NAMES[declared.treatment], operands, (out,), body), name)
