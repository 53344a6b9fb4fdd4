"""Compute products of quantised weights on the integer units.

Before: `linear(x, dequantize(q, scale))`, or `expert_linear`. After, where the machine multiplies bytes fast: the rows of x are quantised,
to 16 bits beside weights of 8 and to 8 bits beside weights of 4, and `integer_linear` multiplies integers; q and its scales are laid out
in panels, which for weights is work of load time. This is the one pass that changes what a program computes, within the errors that
docs/decisions states; products over the same rows share what it quantises.

Rows of 16 bits are two planes of bytes, or words where two bytes cannot be multiplied without loss. Sums of 512 words stay within 32 bits;
a weight with one scale for more of them is taken in parts that share it.

A weight with an offset per group, (q - zero) * scale or q * scale - shift, is multiplied without it; of what comes out is subtracted the
product of the groups' sums of rows with the offsets, which has a group's length less to sum.

Where a matrix unit multiplies bytes, weights of 4 bits in groups become `widened_linear`: widened to 8 bits with one scale per channel,
beside rows with one scale each, which have 8 bits or, where those are too few, 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call, TupleGet
from compiler.ir.loops.scalars import Format
from compiler.ir.module import IRModule
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType
from compiler.machine.formats import FOUR, PANEL4
from compiler.machine.products import ProductTiles
from compiler.ops.elementwise import ADD, CAST, MULTIPLY, SUBTRACT
from compiler.ops.manipulate import BROADCAST_TO, RESHAPE, SLICE
from compiler.ops.products.experts import EXPERT_INTEGER_LINEAR, EXPERT_LINEAR
from compiler.ops.products.integer import INTEGER_LINEAR, PANEL_INTEGERS, PANEL_SCALES
from compiler.ops.products.integer_rows import QUANTIZE_ROWS, ROW_PLANES
from compiler.ops.products.matmul import LINEAR
from compiler.ops.products.quantize import MIDDLE
from compiler.ops.products.widened import PANEL_MULTIPLIERS, WIDENED_LINEAR
from compiler.passes.rewrite import rewrite_module

ACTIVATION_BITS: Final = {8: 16, 4: 8}  # by bits of the weight
LONGEST: Final = {DType.I8: 1 << 16, DType.I16: 1 << 9}  # groups whose sums i32 holds for certain, by what rows hold
SHORTEST_PART: Final = 64  # of a group: each costs a conversion and a multiply-add


@dataclass(frozen=True, slots=True)
class IntegerProducts:
    tiles: ProductTiles

    @property
    def columns(self) -> int:
        """The columns of a panel. All tiles of a target have panels of one width."""
        (columns,) = {tile.op.columns for tile in self.tiles.integers}
        return columns

    def __call__(self, module: IRModule) -> IRModule:
        values = {b.var: b.value for f in module.graph_functions.values() for b in f.body.bindings}

        def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
            if not isinstance(value, Call) or value.op not in (LINEAR, EXPERT_LINEAR):
                return None
            weight = _quantised(value, values)
            if weight is None:
                return None
            if value.op is LINEAR and self._is_widened(weight):
                return self._widened(builder, value, weight)
            format = next((tile.format for tile in self.tiles.integers if tile.format.bits == weight.bits), None)
            if format is None:
                return None
            group = _part(weight, LONGEST[format.rows])
            if group is None or (weight.offset is not None and value.op is not LINEAR):
                return None
            return self._integer(builder, value, weight, group, format)

        return rewrite_module(module, replace)

    def _is_widened(self, weight: _Weight) -> bool:
        """Whether the weight is widened to 8 bits, so that its sum runs over the whole channel."""
        tile = self.tiles.widened
        if tile is None or weight.offset is not None or weight.bits != tile.format.bits or weight.length > LONGEST[tile.rows]:
            return False
        return tile.widens(weight.length, weight.group)

    def _integer(self, builder: Builder, linear: Call, weight: _Weight, group: int, format: Format) -> Value:
        x, _, *rest = linear.args
        bits, each = ACTIVATION_BITS[weight.bits], 0 if group == weight.length else group
        rows = builder.call(QUANTIZE_ROWS, x, bits=bits, group=each, dtype=str(format.rows))
        panels = builder.call(PANEL_INTEGERS, weight.q, format=format.name, columns=self.columns)
        scales = builder.call(PANEL_SCALES, _for_parts(builder, weight, weight.scale, group), columns=self.columns)
        parts = [builder.emit(TupleGet(rows, i)) for i in range(3)]
        attrs = {"format": format.name, "size": weight.size, "dtype": weight.out_dtype if weight.offset is None else "f32"}
        op = INTEGER_LINEAR if linear.op is LINEAR else EXPERT_INTEGER_LINEAR
        product = Call(op, (*parts, panels, scales, *rest), attrs)
        if weight.offset is None:
            return product
        offsets = _for_parts(builder, weight, _offsets(builder, weight, weight.offset), group)
        beyond = builder.call(LINEAR, _sums(builder, parts[1], parts[2]), offsets)
        found = Call(SUBTRACT, (builder.emit(product), beyond), {})
        return found if weight.out_dtype == "f32" else Call(CAST, (builder.emit(found),), {"dtype": weight.out_dtype})

    def _widened(self, builder: Builder, linear: Call, weight: _Weight) -> Value:
        x, *rest = linear.args
        rows = builder.call(ROW_PLANES, x)
        panels = builder.call(PANEL_INTEGERS, weight.q, format=PANEL4.name, columns=self.columns)
        scales = builder.call(PANEL_MULTIPLIERS, weight.scale, columns=self.columns)
        parts, made = ([builder.emit(TupleGet(several, i)) for i in range(count)] for several, count in ((rows, 3), (scales, 2)))
        return Call(WIDENED_LINEAR, (*parts, panels, *made, *rest[1:]), {"size": weight.size, "dtype": weight.out_dtype})


@dataclass(frozen=True, slots=True)
class _Weight:
    q: Atom
    scale: Atom
    bits: int
    group: int
    length: int  # of the rows
    size: int  # columns of the product
    out_dtype: str
    offset: Atom | None  # per group: a zero, or a shift
    is_shifted: bool
    matrices: tuple[int, ...]  # how many, where rows choose


def _part(weight: _Weight, longest: int) -> int | None:
    """The length that is summed in i32: a group, or the longest part of a single group that i32 holds. None where that is too short."""
    if weight.group <= longest:
        return weight.group
    step = FOUR * 8 // weight.bits
    parts = (p for p in range(longest, SHORTEST_PART - 1, -step) if weight.group % p == 0)
    return next(parts, None) if weight.group == weight.length else None


def _quantised(linear: Call, values: Mapping[Var, Value]) -> _Weight | None:
    """The quantised weight of a product, if the length of a group is a multiple of 4."""
    weight, x = linear.args[1], type_of(linear.args[0])
    made = values.get(weight) if isinstance(weight, Var) else None
    if not isinstance(made, Call) or made.op.name != "dequantize":
        return None
    given = type_of(weight)
    if not isinstance(given, TensorType) or given.shape is None or not all(d.is_const for d in given.shape):
        return None
    if not isinstance(x, TensorType) or x.shape is None or x.dtype is None:
        return None
    *matrices, size, length = (d.const for d in given.shape)
    attrs = {**made.op.attributes, **made.attrs}
    bits, group = attrs["bits"], attrs["group"]
    if not prove_divisible(group or length, FOUR * 8 // bits):
        return None
    dtype = str(linear.attrs.get("out_dtype") or x.dtype)
    q, scale, *offset = made.args
    return _Weight(q, scale, bits, group or length, length, size, dtype, offset[0] if offset else None, attrs["shifted"], tuple(matrices))


def _for_parts(builder: Builder, weight: _Weight, of_groups: Atom, length: int) -> Atom:
    """Broadcast the value of a single group to the parts into which it is cut."""
    if length == weight.group:
        return of_groups
    shape = (*map(Dim.of, weight.matrices), Dim.of(weight.size), Dim.of(weight.length // length))
    return builder.call(BROADCAST_TO, of_groups, ShapeValue(shape))


def _offsets(builder: Builder, weight: _Weight, offset: Atom) -> Atom:
    """[size, groups] in f32, which x = q * scale - offset has where q lies around 0, as in panels."""
    wide, scale = _as_f32(builder, offset), _as_f32(builder, weight.scale)
    middle = ScalarValue(float(MIDDLE if weight.bits == 4 else 0), "f32")
    if weight.is_shifted:
        return builder.call(SUBTRACT, wide, builder.call(MULTIPLY, scale, middle))
    return builder.call(MULTIPLY, scale, builder.call(SUBTRACT, wide, middle))


def _sums(builder: Builder, scale: Atom, total: Atom) -> Atom:
    """[..., groups]: the sum of each group of a row, of all planes."""
    found, groups = type_of(total), type_of(scale)
    assert isinstance(found, TensorType) and found.shape is not None and isinstance(groups, TensorType) and groups.shape is not None
    wide, axis = builder.call(CAST, total, dtype="f32"), len(found.shape) - 2
    planes = [builder.call(SLICE, wide, axis=axis, begin=i, end=i + 1) for i in range(found.shape[axis].const)]
    *upper, lowest = (builder.call(RESHAPE, plane, ShapeValue(groups.shape)) for plane in planes)
    for plane in upper:
        lowest = builder.call(ADD, lowest, builder.call(MULTIPLY, plane, ScalarValue(256.0, "f32")))
    return builder.call(MULTIPLY, scale, lowest)


def _as_f32(builder: Builder, x: Atom) -> Atom:
    given = type_of(x)
    return x if isinstance(given, TensorType) and given.dtype is DType.F32 else builder.call(CAST, x, dtype="f32")
