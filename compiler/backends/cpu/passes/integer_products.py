"""Compute products of quantised weights on the integer units.

Before: `linear(x, dequantize(q, scale))`, or the same with `expert_linear`. After: rows of x are quantised, and `integer_linear` multiplies
integers. compiler/passes/number_schemes.py says how rows are rounded; this pass chooses a tile of the target that multiplies them, and
packs the weight in the format of this tile. A later pass, `share_subexpressions`, lets products of the same rows share the quantised rows.
q and its scales are packed into panels: when the model is loaded, if they are weights of the model. If the weight is also the table of
embeddings, its rows are looked up in these panels. This pass changes results more than any other pass; decisions 0009 and 0100 in
docs/decisions state the errors.

A row of 16-bit integers is stored as two planes of bytes, or as 16-bit words on machines that cannot multiply pairs of bytes without loss.
Rows of 8-bit integers are stored as bytes or as words. If only outliers (the few numbers of a row with large magnitudes) take 16 bits, most
of the upper plane is zero, and tiles skip its zeros.

The groups of a weight may have zero points, so that it is (q - zero) * scale, or shifts, so that it is q * scale - shift. Then the product
reads zero * scale, or the shift, as the offset of a group. If scales and shifts are themselves quantised, they stay integers, and the
product decodes them. Weights may also be codes of 4 bits that the product looks up in a table of integers: indices of the table, or floats
of 4 bits, whose doubles are integers. For machines without instructions for this look-up, such weights are stored as integers of 8 bits.

If the target has a matrix unit, and the program tolerates rows of bf16, products use number schemes that suit the unit. A weight of 4-bit
integers in groups, without offsets, is multiplied by `widened_linear`, if the unit's tile can widen groups and channels of these lengths,
and unless the weight is also the table of embeddings: the weight is widened to 8 bits with one scale per channel (a column of the product).
Each row of x then has one scale, and elements of 8 bits, or of 16 bits if 8 bits are too few for that row. Channels of weights of 8 or 6
bits with one scale per channel are cut into parts only if they have more than LONGEST_ON_UNIT elements (number_schemes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call, TupleGet
from compiler.ir.loops.scalars import Format
from compiler.ir.module import IRModule
from compiler.ir.numbers import TABLES, Kind
from compiler.ir.prove import prove_le
from compiler.ir.types import TensorType
from compiler.machine.formats import PANEL4, Panels, TablePanels
from compiler.machine.products import ProductTiles
from compiler.ops.elementwise import CAST, MULTIPLY
from compiler.ops.embedding import EMBEDDING
from compiler.ops.index import TAKE
from compiler.ops.manipulate import BROADCAST_TO
from compiler.ops.operands import num_elements
from compiler.ops.products.blocks import PANEL_BLOCKS
from compiler.ops.products.experts import EXPERT_INTEGER_LINEAR, EXPERT_LINEAR, EXPERT_WIDENED_LINEAR
from compiler.ops.products.integer import INTEGER_LINEAR, PANEL_INTEGERS, PANEL_SCALES
from compiler.ops.products.integer_rows import QUANTIZE_ROWS, ROW_PLANES
from compiler.ops.products.look_up import LOOK_UP, NO_OFFSET, SHIFT
from compiler.ops.products.matmul import LINEAR
from compiler.ops.products.widened import PANEL_MULTIPLIERS, WIDENED_LINEAR
from compiler.passes.number_schemes import LONGEST, QuantisedWeight, Scheme, quantised_weight, scheme_of, scheme_on_unit
from compiler.passes.rewrite import rewrite_module
from compiler.passes.widen_tables import in_bytes


@dataclass(frozen=True, slots=True)
class IntegerProducts:
    """The pass. `tiles` are the tiles with which the target multiplies."""

    tiles: ProductTiles

    @property
    def columns(self) -> int:
        """The number of columns of a panel, which is the same for all tiles of a target."""
        (columns,) = {tile.op.columns for tile in self.tiles.integers}
        return columns

    def __call__(self, module: IRModule) -> IRModule:
        """Return the module in which products of quantised weights multiply integers, and in which look-ups of embeddings in such weights
        read the panels of the product. A product stays as it is if its weight is not quantised, if its number scheme computes it in f32, or
        if no tile of the target multiplies the weight."""
        values: dict[Var, Value] = {}  # values of the new functions, by variables of the old ones
        tables = self._tables(module)

        def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
            """Return what replaces a product of a quantised weight, or the look-up of embeddings in such a weight. Return None for any
            other binding."""
            values[binding.var], before = value, binding.value
            if isinstance(value, Call) and value.op is LOOK_UP:
                table = tables.get(value.args[1:])
                return self._look_up(builder, value, table) if table is not None and _reads(value, table) else None
            if not isinstance(value, Call) or not isinstance(before, Call) or value.op not in (LINEAR, EXPERT_LINEAR):
                return None
            weight = quantised_weight(value, values)
            if weight is None:
                return None
            rows = _Rows.of(value.args[0], values.get(before.args[0]) if isinstance(before.args[0], Var) else None)
            if self._is_widened(weight) and weight.parts not in tables:
                return self._widened(builder, value, weight, rows)
            scheme = self._scheme(weight)
            return None if scheme is None else self._integer(builder, value, weight, rows, scheme)

        return rewrite_module(module, replace)

    def _tables(self, module: IRModule) -> dict[tuple[Atom, ...], QuantisedWeight]:
        """Return the weights that a product multiplies and whose rows are also looked up as embeddings, by `QuantisedWeight.parts`. Product
        and look-up will read the same panels. Leave out a weight whose product is computed in f32, or for which the target has no tile."""
        found: dict[tuple[Atom, ...], QuantisedWeight] = {}
        for func in module.graph_functions.values():
            values = {b.var: b.value for b in func.body.bindings}
            calls = [value for value in values.values() if isinstance(value, Call)]
            look_ups = [call for call in calls if call.op is LOOK_UP]
            for weight in [quantised_weight(call, values) for call in calls if look_ups and call.op is LINEAR]:
                scheme = None if weight is None else self._scheme(weight)
                if weight is None or scheme is None or self._format(weight, scheme) is None:
                    continue
                if any(_reads(call, weight) for call in look_ups):
                    found[weight.parts] = weight
        return found

    def _look_up(self, builder: Builder, call: Call, weight: QuantisedWeight) -> Value:
        """Return the look-up of the rows of a weight in the panels that its product reads."""
        scheme = self._scheme(weight)
        assert scheme is not None, call
        format = self._format(weight, scheme)
        assert format is not None, call
        panels, scale, units, offsets = self._packed(builder, weight, scheme, format)
        return Call(LOOK_UP, (call.args[0], panels, scale, *units, *offsets), {**call.attrs, "format": format.name})

    def _scheme(self, weight: QuantisedWeight) -> Scheme | None:
        """Return how the product of a weight rounds its rows. Return None if the product is computed in f32."""
        return scheme_on_unit(weight) if self._has_own_scheme(weight) else scheme_of(weight)

    def _has_own_scheme(self, weight: QuantisedWeight) -> bool:
        """Return whether the target has a matrix unit, and the program lets the product round its rows as the unit requires."""
        return weight.tolerates is DType.BF16 and self.tiles.on_matrix_unit

    def _is_widened(self, weight: QuantisedWeight) -> bool:
        """Return whether the weight can be widened to 8 bits, so that one integer sum covers the whole channel."""
        tile = self.tiles.widened
        if tile is None or not self._has_own_scheme(weight) or weight.offset is not None or weight.kind is not Kind.INT:
            return False
        if weight.bits != tile.format.bits or weight.length > LONGEST[8]:
            return False
        return tile.widens(weight.length, weight.group)

    def _format(self, weight: QuantisedWeight, scheme: Scheme) -> Format | None:
        """Return the format of the best tile that multiplies the weight, or None if the target has no such tile."""
        return next((tile.format for tile in self.tiles.integers if _fits(weight, scheme, tile.format)), None)

    def _integer(self, builder: Builder, linear: Call, weight: QuantisedWeight, rows: _Rows, scheme: Scheme) -> Value | None:
        """Return the product of integers that replaces `linear`. If the weight is codes, and no tile of the target looks them up, first
        decode them to integers of 8 bits. Return None if no tile of the target reads the weight."""
        _, _, *rest = linear.args
        format = self._format(weight, scheme)
        if format is None and weight.kind in TABLES:
            wide = in_bytes(builder, weight.q, weight.kind, (*weight.matrices, weight.size))
            weight = replace(weight, q=wide, bits=8, kind=Kind.INT, blocks=None)
            format = self._format(weight, scheme)
        if format is None:
            return None
        group = scheme.group
        has_offset = weight.offset is not None
        wanted: dict[str, Any] = ({"sums": True} if has_offset else {}) | ({"cap": scheme.cap} if scheme.cap else {})
        each = 0 if group == weight.length else group
        quantised = builder.call(QUANTIZE_ROWS, rows.table, bits=scheme.bits, group=each, dtype=str(format.rows), **wanted)
        panels, scale, units, offsets = self._packed(builder, weight, scheme, format)
        q, steps, total, *sums = rows.fields(builder, quantised, 3 + has_offset)
        attrs = {"format": format.name, "size": weight.size, "dtype": weight.out_dtype}
        attrs |= {} if weight.is_centred else {"centred": False}
        attrs |= ({"in_units": True} if weight.levels else {}) | ({"has_offset": True} if has_offset else {})
        op = INTEGER_LINEAR if linear.op is LINEAR else EXPERT_INTEGER_LINEAR
        experts, bias = ((), rest) if op is INTEGER_LINEAR else (rest[:1], rest[1:])
        return Call(op, (q, steps, total, panels, scale, *experts, *units, *sums, *offsets, *bias), attrs)

    def _packed(
        self, builder: Builder, weight: QuantisedWeight, scheme: Scheme, format: Format
    ) -> tuple[Atom, Atom, Sequence[Atom], Sequence[Atom]]:
        """Return the panels of a weight, its scales, their units, and its offsets with their units. The units of scales or offsets that are
        stored as integers are the scales of these integers."""
        if (blocks := weight.blocks) is None:
            panels = builder.call(PANEL_INTEGERS, weight.q, format=format.name, columns=self.columns)
        else:
            panels = builder.call(PANEL_BLOCKS, blocks.args[0], of=blocks.attrs["format"], format=format.name, columns=self.columns)
        group = weight.group if weight.has_coarse_rows else scheme.group
        scales = weight.levels or (_for_parts(builder, weight, weight.scale, group),)
        offsets = weight.offset_levels or tuple(_for_parts(builder, weight, o, group) for o in _offsets(builder, weight))
        scale, *units = [builder.call(PANEL_SCALES, numbers, columns=self.columns) for numbers in scales]
        return panels, scale, units, [builder.call(PANEL_SCALES, numbers, columns=self.columns) for numbers in offsets]

    def _widened(self, builder: Builder, linear: Call, weight: QuantisedWeight, rows: _Rows) -> Value:
        """Return the product that replaces `linear` and that widens the 4-bit weight to 8 bits."""
        _, _, *rest = linear.args
        quantised = builder.call(ROW_PLANES, rows.table)
        panels = builder.call(PANEL_INTEGERS, weight.q, format=PANEL4.name, columns=self.columns)
        scales = builder.call(PANEL_MULTIPLIERS, weight.scale, columns=self.columns)
        parts, made = rows.fields(builder, quantised, 3), _fields(builder, scales, 2)
        op = WIDENED_LINEAR if linear.op is LINEAR else EXPERT_WIDENED_LINEAR
        return Call(op, (*parts, panels, *made, *rest), {"size": weight.size, "dtype": weight.out_dtype})


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a product. Experts, for example, look up their rows in a table of tokens. If this table has no more rows than the
    product, the table is quantised, and its integers are looked up: each token is quantised once, and fewer bytes are copied."""

    table: Atom
    ids: Atom | None  # None: the rows are those of the table, in order

    @staticmethod
    def of(x: Atom, made: Value | None) -> _Rows:
        """Return the rows of x. If `made`, the value of x, looks them up in a table that provably has at most as many rows, return the
        table and the numbers of the rows. Otherwise return x itself."""
        if isinstance(made, Call) and made.op is EMBEDDING:
            table, ids = made.args
            given, wanted = type_of(table), type_of(ids)
            assert isinstance(given, TensorType) and isinstance(wanted, TensorType), made
            if given.shape and wanted.shape is not None and prove_le(given.shape[0], num_elements(wanted.shape)):
                return _Rows(table, ids)
        return _Rows(x, None)

    def fields(self, builder: Builder, quantised: Atom, count: int) -> list[Atom]:
        """Return the first `count` results of the operator that quantised the rows of the table. If the rows of the product are looked up
        (`ids`), look the results up, too."""
        fields = _fields(builder, quantised, count)
        return fields if self.ids is None else [builder.call(TAKE, field, self.ids, axis=0) for field in fields]


def _reads(look_up: Call, weight: QuantisedWeight) -> bool:
    """Return whether a look-up dequantises rows of the weight: it has the same operands (`parts`) and equal attributes. Return False if
    zero points are subtracted before scaling, because look-ups cannot read such panels."""
    if look_up.args[1:] != weight.parts or (weight.offset is not None and not weight.is_shifted):
        return False
    how = {"size": weight.size, "length": weight.length, "bits": weight.bits, "kind": weight.kind, "in_units": bool(weight.levels)}
    how |= {"format": "", "offset": NO_OFFSET if weight.offset is None else SHIFT}
    return {**look_up.op.attributes, **look_up.attrs} == how


def _fits(weight: QuantisedWeight, scheme: Scheme, format: Format) -> bool:
    """Return whether a product can read the weight in the format. Numbers of 6 bits also fit in 8 bits."""
    bits = (6, 8) if weight.bits == 6 else (weight.bits,)
    kind = format.kind if isinstance(format, TablePanels) else Kind.INT
    held_bits = format.held_bits if isinstance(format, Panels) else format.bits
    return held_bits in bits and kind is weight.kind and scheme.group % format.depth == 0


def _fields(builder: Builder, several: Atom, count: int) -> list[Atom]:
    """Return the first `count` fields of a tuple."""
    return [builder.emit(TupleGet(several, i)) for i in range(count)]


def _for_parts(builder: Builder, weight: QuantisedWeight, of_groups: Atom, length: int) -> Atom:
    """Return the scales or offsets `of_groups`, with one number for each `length` elements of a channel: copies of the number of the
    channel's only group. If `length` is the whole group, return the numbers as they are."""
    if length == weight.group:
        return of_groups
    shape = (*map(Dim.of, weight.matrices), Dim.of(weight.size), Dim.of(weight.length // length))
    return builder.call(BROADCAST_TO, of_groups, ShapeValue(shape))


def _offsets(builder: Builder, weight: QuantisedWeight) -> tuple[Atom, ...]:
    """Return the offsets [matrices..., size, groups] for which each weight is q * scale - offset. Return () if the weight has none."""
    if weight.offset is None:
        return ()
    if weight.is_shifted:
        return (weight.offset,)
    return (builder.call(MULTIPLY, _as_f32(builder, weight.scale), _as_f32(builder, weight.offset)),)


def _as_f32(builder: Builder, x: Atom) -> Atom:
    """Return a tensor converted to f32, or itself if it is f32."""
    given = type_of(x)
    return x if isinstance(given, TensorType) and given.dtype is DType.F32 else builder.call(CAST, x, dtype="f32")
