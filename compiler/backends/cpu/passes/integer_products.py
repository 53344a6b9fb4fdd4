"""Compute products of quantised weights on the integer units.

Before: `linear(x, dequantize(q, scale))`, or the same with `expert_linear`. After, if the machine multiplies bytes fast: rows of x are
quantised, to 16 bits for 8-bit weights and to 8 bits for 4-bit weights, and `integer_linear` multiplies integers. Products of the same rows
share the quantised rows. If rows of the weight are looked up as well, because it is the table of embeddings, they are looked up in the
product's panels. q and its scales are packed into panels; for weights, this happens when they are loaded. This is the only pass
that changes results, within the errors that docs/decisions states.

A row of 16 bits is stored as two planes of bytes, or as 16-bit words on machines that cannot multiply pairs of bytes without loss. A sum of
512 words fits in 32 bits. If a scale of a weight covers more elements, they are cut into parts that share the scale.

If each group of a weight has a zero point, (q - zero) * scale, or a shift, q * scale - shift, the product gets zero * scale or the shift as
offsets. A scale and a shift that are themselves dequantised integers stay integers, and the product decodes them. Floats of 4 bits count as
integers of 4 bits: doubled, they are integers. So do indices of a table of integers.

Rows are coarse if weights have 8 bits and one scale per channel, and if the product tolerates rows of i8 (the scheme int8-fast). A coarse
row has 8 bits and one scale per group, so it needs one plane instead of two.

If a matrix unit multiplies bytes, 4-bit weights with groups become `widened_linear`: they are widened to 8 bits with one scale per channel.
Each row has one scale, and elements of 8 bits, or of 16 bits if 8 bits are too few for that row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call, TupleGet
from compiler.ir.loops.scalars import Format
from compiler.ir.module import IRModule
from compiler.ir.numbers import Kind, num_per_byte
from compiler.ir.prove import prove_divisible, prove_le
from compiler.ir.types import TensorType
from compiler.machine.formats import FOUR, PANEL4, TablePanels
from compiler.machine.products import ProductTiles
from compiler.ops.elementwise import CAST, MULTIPLY
from compiler.ops.embedding import EMBEDDING
from compiler.ops.index import TAKE
from compiler.ops.manipulate import BROADCAST_TO
from compiler.ops.operands import num_elements
from compiler.ops.products.blocks import PANEL_BLOCKS, UNPACK_BLOCKS
from compiler.ops.products.experts import EXPERT_INTEGER_LINEAR, EXPERT_LINEAR, EXPERT_WIDENED_LINEAR
from compiler.ops.products.integer import INTEGER_LINEAR, PANEL_INTEGERS, PANEL_SCALES
from compiler.ops.products.integer_rows import QUANTIZE_ROWS, ROW_PLANES
from compiler.ops.products.look_up import LOOK_UP, ZERO
from compiler.ops.products.matmul import LINEAR
from compiler.ops.products.quantize import DEQUANTIZE
from compiler.ops.products.widened import PANEL_MULTIPLIERS, WIDENED_LINEAR
from compiler.passes.rewrite import rewrite_module

ACTIVATION_BITS: Final = {8: 16, 6: 16, 4: 8}  # from bits of an element of the weight to bits of an element of the rows
# LONGEST is the maximum number of products whose sum certainly fits in i32, by type of the rows.
LONGEST: Final = {DType.I8: 1 << 16, DType.I16: 1 << 9}
COARSE_BITS, COARSE_GROUP = 8, 64  # bits and group length of coarse rows
SHORTEST_PART: Final = 64  # minimum number of elements of a part, because each part costs a conversion and a multiply-add


@dataclass(frozen=True, slots=True)
class IntegerProducts:
    tiles: ProductTiles

    @property
    def columns(self) -> int:
        """The number of columns of a panel, which is the same for all tiles of a target."""
        (columns,) = {tile.op.columns for tile in self.tiles.integers}
        return columns

    def __call__(self, module: IRModule) -> IRModule:
        values: dict[Var, Value] = {}  # values of the new functions, by variables of the old ones
        tables = self._tables(module)

        def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
            values[binding.var], before = value, binding.value
            if isinstance(value, Call) and value.op is LOOK_UP and value.args[1] in tables:
                return self._look_up(builder, value, tables[value.args[1]])
            if not isinstance(value, Call) or not isinstance(before, Call) or value.op not in (LINEAR, EXPERT_LINEAR):
                return None
            weight = _quantised(value, values)
            if weight is None:
                return None
            rows = _Rows.of(value.args[0], values.get(before.args[0]) if isinstance(before.args[0], Var) else None)
            if self._is_widened(weight) and weight.q not in tables:
                return self._widened(builder, value, weight, rows)
            found = self._format(weight)
            return None if found is None else self._integer(builder, value, weight, rows, *found)

        return rewrite_module(module, replace)

    def _tables(self, module: IRModule) -> dict[Atom, _Weight]:
        """Return the weights of which rows are looked up as well, by their integers. Their panels serve both."""
        found: dict[Atom, _Weight] = {}
        for func in module.graph_functions.values():
            values = {b.var: b.value for b in func.body.bindings}
            calls = [value for value in values.values() if isinstance(value, Call)]
            looked_up = {call.args[1]: frozenset(call.args) for call in calls if call.op is LOOK_UP and call.attrs.get("offset") != ZERO}
            for weight in [_quantised(call, values) for call in calls if looked_up and call.op is LINEAR]:
                if weight is not None and self._format(weight) and looked_up.get(weight.q, frozenset()).issuperset(weight.parts):
                    found[weight.q] = weight
        return found

    def _format(self, weight: _Weight) -> tuple[int, Format] | None:
        """Return how many elements a product adds up in i32, and the format of the weight. Return None if there is no integer product."""
        format = next((tile.format for tile in self.tiles.integers if weight.fits(tile.format)), None)
        group = None if format is None else _part(weight, LONGEST[format.rows])
        return None if format is None or group is None else (group, format)

    def _look_up(self, builder: Builder, call: Call, weight: _Weight) -> Value:
        """Look rows up in the panels of the product."""
        found = self._format(weight)
        assert found is not None, call
        panels, scale, units, offsets = self._packed(builder, weight, *found)
        return Call(LOOK_UP, (call.args[0], panels, scale, *units, *offsets), {**call.attrs, "format": found[1].name})

    def _is_widened(self, weight: _Weight) -> bool:
        """Return whether the weight is widened to 8 bits, so that one integer sum covers the whole channel."""
        tile = self.tiles.widened
        if tile is None or weight.offset is not None or weight.kind is not Kind.INT or weight.length > LONGEST[tile.rows]:
            return False
        if weight.bits != tile.format.bits:
            return False
        return tile.widens(weight.length, weight.group)

    def _integer(self, builder: Builder, linear: Call, weight: _Weight, rows: _Rows, group: int, format: Format) -> Value:
        _, _, *rest = linear.args
        bits, each = ACTIVATION_BITS[weight.bits], 0 if group == weight.length else group
        is_coarse = self._has_coarse_rows(linear, weight, format)
        if is_coarse:
            bits, each = COARSE_BITS, COARSE_GROUP
        has_offset = weight.offset is not None
        wanted: dict[str, Any] = {"sums": True} if has_offset else {}
        quantised = builder.call(QUANTIZE_ROWS, rows.table, bits=bits, group=each, dtype=str(format.rows), **wanted)
        panels, scale, units, offsets = self._packed(builder, weight, weight.group if is_coarse else group, format)
        q, steps, total, *sums = rows.fields(builder, quantised, 3 + has_offset)
        attrs = {"format": format.name, "size": weight.size, "dtype": weight.out_dtype}
        attrs |= {} if weight.is_centred else {"centred": False}
        attrs |= ({"in_units": True} if weight.levels else {}) | ({"has_offset": True} if has_offset else {})
        op = INTEGER_LINEAR if linear.op is LINEAR else EXPERT_INTEGER_LINEAR
        experts, bias = ((), rest) if op is INTEGER_LINEAR else (rest[:1], rest[1:])
        return Call(op, (q, steps, total, panels, scale, *experts, *units, *sums, *offsets, *bias), attrs)

    def _packed(self, builder: Builder, weight: _Weight, group: int, format: Format) -> tuple[Atom, Atom, Sequence[Atom], Sequence[Atom]]:
        """Return the panels of a weight, its scales, their units, and its offsets with their units."""
        if weight.blocks is None:
            panels = builder.call(PANEL_INTEGERS, weight.q, format=format.name, columns=self.columns)
        else:
            panels = builder.call(
                PANEL_BLOCKS, weight.blocks.args[0], of=weight.blocks.attrs["format"], format=format.name, columns=self.columns
            )
        scales = weight.levels or (_for_parts(builder, weight, weight.scale, group),)
        offsets = weight.offset_levels or tuple(_for_parts(builder, weight, o, group) for o in _offsets(builder, weight))
        scale, *units = [builder.call(PANEL_SCALES, numbers, columns=self.columns) for numbers in scales]
        return panels, scale, units, [builder.call(PANEL_SCALES, numbers, columns=self.columns) for numbers in offsets]

    def _has_coarse_rows(self, linear: Call, weight: _Weight, format: Format) -> bool:
        """Return whether the product has coarse rows. A matrix unit is efficient only for long groups, so its rows are never coarse."""
        if linear.attrs.get("tolerates") != str(DType.I8) or weight.bits != 8 or weight.group != weight.length:
            return False
        return format.rows is DType.I8 and weight.length % COARSE_GROUP == 0 and weight.offset is None and not self.tiles.on_matrix_unit

    def _widened(self, builder: Builder, linear: Call, weight: _Weight, rows: _Rows) -> Value:
        _, _, *rest = linear.args
        quantised = builder.call(ROW_PLANES, rows.table)
        panels = builder.call(PANEL_INTEGERS, weight.q, format=PANEL4.name, columns=self.columns)
        scales = builder.call(PANEL_MULTIPLIERS, weight.scale, columns=self.columns)
        parts, made = rows.fields(builder, quantised, 3), _fields(builder, scales, 2)
        op = WIDENED_LINEAR if linear.op is LINEAR else EXPERT_WIDENED_LINEAR
        return Call(op, (*parts, panels, *made, *rest), {"size": weight.size, "dtype": weight.out_dtype})


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a product. If they are rows of a table with at most as many rows, such as the tokens of experts, the table is quantised,
    and its integers are looked up: each row is quantised once, and fewer bytes are copied."""

    table: Atom
    ids: Atom | None  # None: the rows are those of the table, in order

    @staticmethod
    def of(x: Atom, made: Value | None) -> _Rows:
        """Return the rows of x, which is the result of `made` if that is given."""
        if isinstance(made, Call) and made.op is EMBEDDING:
            table, ids = made.args
            given, wanted = type_of(table), type_of(ids)
            assert isinstance(given, TensorType) and isinstance(wanted, TensorType), made
            if given.shape and wanted.shape is not None and prove_le(given.shape[0], num_elements(wanted.shape)):
                return _Rows(table, ids)
        return _Rows(x, None)

    def fields(self, builder: Builder, quantised: Atom, count: int) -> list[Atom]:
        """Return the `count` results of the operator that quantised each row of the table, for the rows of the product."""
        fields = _fields(builder, quantised, count)
        return fields if self.ids is None else [builder.call(TAKE, field, self.ids, axis=0) for field in fields]


@dataclass(frozen=True, slots=True)
class _Weight:
    q: Atom
    scale: Atom
    bits: int
    group: int
    length: int  # number of elements of a channel
    size: int  # number of columns of the product
    out_dtype: str
    offset: Atom | None  # the zero point or the shift of each group; None: the weight has neither
    is_shifted: bool
    # If the scales, and the offsets if there are any, are themselves dequantised: their integers and the scales of these integers.
    # Otherwise empty.
    levels: tuple[Atom, ...]
    offset_levels: tuple[Atom, ...]
    blocks: Call | None  # the call that takes the numbers out of the blocks of a file, if they come from blocks
    matrices: tuple[int, ...]  # extents of the leading axes; their indices select a matrix for each row, such as that of an expert
    kind: Kind

    @property
    def parts(self) -> tuple[Atom, ...]:
        """The values from which the weight is dequantised."""
        offset = () if self.offset is None else self.offset_levels or (self.offset,)
        return self.q, *(self.levels or (self.scale,)), *offset

    def fits(self, format: Format) -> bool:
        """Return whether a product can read the weight in the format. Numbers of 6 bits also fit in 8 bits."""
        bits = (6, 8) if self.bits == 6 else (self.bits,)
        kind = format.kind if isinstance(format, TablePanels) else Kind.INT
        return format.bits in bits and kind is self.kind and self.group % format.depth == 0

    @property
    def is_centred(self) -> bool:
        """Whether 0 is in the middle of the range of the stored numbers. Numbers of 4 bits with an offset are multiplied as stored:
        the smallest of them is 0."""
        return self.bits != 4 or self.offset is None


def _fields(builder: Builder, several: Atom, count: int) -> list[Atom]:
    return [builder.emit(TupleGet(several, i)) for i in range(count)]


def _part(weight: _Weight, longest: int) -> int | None:
    """Return how many elements the product adds up in i32: a group or, if one group is the whole channel, the longest part that fits.
    Return None if no part is long enough."""
    if weight.group <= longest:
        return weight.group
    step = FOUR * num_per_byte(weight.bits)
    parts = (p for p in range(longest, SHORTEST_PART - 1, -step) if weight.group % p == 0)
    return next(parts, None) if weight.group == weight.length else None


def _quantised(linear: Call, values: Mapping[Var, Value]) -> _Weight | None:
    """Return the quantised weight of a product. Return None if the weight is not quantised, or if its groups do not fill whole units of 4
    bytes."""
    weight, x = linear.args[1], type_of(linear.args[0])
    made = values.get(weight) if isinstance(weight, Var) else None
    if not isinstance(made, Call) or made.op is not DEQUANTIZE:
        return None
    given = type_of(weight)
    if not isinstance(given, TensorType) or given.shape is None or not all(d.is_const for d in given.shape):
        return None
    if not isinstance(x, TensorType) or x.shape is None or x.dtype is None:
        return None
    *matrices, size, length = (d.const for d in given.shape)
    attrs = {**made.op.attributes, **made.attrs}
    if attrs["kind"] == Kind.E4M3:
        return None
    bits, group = attrs["bits"], attrs["group"]
    if not prove_divisible(group or length, FOUR * num_per_byte(bits)):
        return None
    dtype = str(linear.attrs.get("out_dtype") or x.dtype)
    q, scale, *offset = made.args
    zero = offset[0] if offset else None
    levels, offset_levels = _levels(scale, values, bool(group)), ()
    if zero is not None and levels:
        offset_levels = _levels(zero, values, bool(group)) if attrs["shifted"] else ()
        levels = levels if offset_levels else ()
    return _Weight(
        q,
        scale,
        bits,
        group or length,
        length,
        size,
        dtype,
        zero,
        attrs["shifted"],
        levels,
        offset_levels,
        _unpacking(q, values),
        tuple(matrices),
        Kind(attrs["kind"]),
    )


def _unpacking(q: Atom, values: Mapping[Var, Value]) -> Call | None:
    made = values.get(q) if isinstance(q, Var) else None
    return made if isinstance(made, Call) and made.op is UNPACK_BLOCKS else None


def _levels(scale: Atom, values: Mapping[Var, Value], has_groups: bool) -> tuple[Atom, ...]:
    """Return the 8-bit integers, and their scales, from which a scale was itself dequantised. Return () for other scales."""
    made = values.get(scale) if isinstance(scale, Var) else None
    if not has_groups or not isinstance(made, Call) or made.op is not DEQUANTIZE or len(made.args) != 2:
        return ()
    return made.args if {**made.op.attributes, **made.attrs}["bits"] == 8 else ()


def _for_parts(builder: Builder, weight: _Weight, of_groups: Atom, length: int) -> Atom:
    """Repeat the value of a channel's only group, once for each part of the group."""
    if length == weight.group:
        return of_groups
    shape = (*map(Dim.of, weight.matrices), Dim.of(weight.size), Dim.of(weight.length // length))
    return builder.call(BROADCAST_TO, of_groups, ShapeValue(shape))


def _offsets(builder: Builder, weight: _Weight) -> tuple[Atom, ...]:
    """Return the offsets [size, groups] for which each weight is q * scale - offset. Return () if the weight has none."""
    if weight.offset is None:
        return ()
    if weight.is_shifted:
        return (weight.offset,)
    return (builder.call(MULTIPLY, _as_f32(builder, weight.scale), _as_f32(builder, weight.offset)),)


def _as_f32(builder: Builder, x: Atom) -> Atom:
    given = type_of(x)
    return x if isinstance(given, TensorType) and given.dtype is DType.F32 else builder.call(CAST, x, dtype="f32")
