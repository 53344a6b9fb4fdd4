"""Look-up of rows of a quantised table, such as the embeddings of tokens. Only the rows that are looked up are dequantised.

    y[..., k] = table[ids[...], k]      the table, [size, length], is what `dequantize` computes from the numbers, scales and offsets, in
                                        f32. An id outside the table is clamped

A scale is a float, or an i8 multiple of a float `unit` that neighbouring groups share; then `offset` is a multiple of `offset_unit`. The
attribute `offset` says whether there are offsets: "" (none), "zero" (subtracted before scaling) or "shift" (subtracted after scaling).

Numbers, scales and offsets are stored as `dequantize` reads them. If the attribute `format` names a format of panels, these operands are
stored as `integer_linear` reads them instead. So a table that is also the weight of the model's last layer is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, DimLike, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.ir.numbers import TABLES, Kind, num_per_byte, stored_as
from compiler.ir.op import REQUIRED
from compiler.ir.types import TensorType, Type
from compiler.machine.formats import FOUR, PANELS, Panels, TablePanels, looked_up
from compiler.ops.broadcast import output
from compiler.ops.index import clamped_index
from compiler.ops.indices import clamped
from compiler.ops.operands import bool_attr, int_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.products.integer import constant, same_shape
from compiler.ops.products.quantize import MIDDLE, STORED, bits_attr, half_byte, half_bytes
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]
Shape = tuple[Dim, ...]

F32, I8, U8 = DType.F32, DType.I8, DType.U8
NO_OFFSET, ZERO, SHIFT = "", "zero", "shift"
UNITS = {"scale": "unit", "offset": "offset_unit"}  # for each operand that may have units, the operand that holds them


@dataclass(frozen=True, slots=True)
class _Table:
    """How a table is stored, as the attributes say."""

    size: int
    length: int
    bits: int
    kind: Kind
    panels: Panels | None  # None: rows as `dequantize` reads them
    in_units: bool
    offset: str

    @staticmethod
    def of(attrs: Attrs) -> _Table:
        """Read the attributes. Raise AnnotationError if an attribute has an unknown value, or if the attributes do not fit together."""
        kind, format, offset = attrs["kind"], attrs["format"], attrs["offset"]
        if kind not in tuple(Kind):
            raise AnnotationError(f"attribute kind is {kind!r}, expected one of {', '.join(Kind)}")
        if format and format not in PANELS:
            raise AnnotationError(f"attribute format is {format!r}, expected an empty text or one of {', '.join(PANELS)}")
        if offset not in (NO_OFFSET, ZERO, SHIFT):
            raise AnnotationError(f"attribute offset is {offset!r}, expected an empty text, {ZERO} or {SHIFT}")
        panels = PANELS[format] if format else None
        if panels is not None and (panels.kind if isinstance(panels, TablePanels) else Kind.INT) != kind:
            raise AnnotationError(f"attribute kind is {kind}, expected that of the numbers in {format}")
        if offset and kind != Kind.INT:
            raise AnnotationError(f"attribute offset is {offset!r}, expected an empty text for numbers of kind {kind}")
        if offset == ZERO and (format or attrs["in_units"]):
            raise AnnotationError(f"attribute offset is {offset!r}, expected {SHIFT} or an empty text for panels and for scales in units")
        size, length = int_attr(attrs, "size", 1), int_attr(attrs, "length", 1)
        bits = bits_attr(attrs, STORED)
        if length % num_per_byte(bits) or (panels is not None and length % panels.depth):
            raise AnnotationError(f"attribute length is {length}, expected a multiple of what a byte, or a line of a panel, stores")
        return _Table(size, length, bits, Kind(kind), panels, bool_attr(attrs, "in_units"), offset)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands, in order."""
        units = ["unit"] if self.in_units else []
        offsets = ["offset", *(["offset_unit"] if self.in_units else [])] if self.offset else []
        return "ids", "numbers", "scale", *units, *offsets

    @property
    def holds(self) -> DType:
        """The element type of `numbers`."""
        return stored_as(self.bits, self.kind) if self.panels is None else U8

    @property
    def subtracted(self) -> int:
        """The integer that is subtracted from every unpacked number, before the `offset` of its group is applied."""
        if self.bits == 4 and self.kind is Kind.INT and self.offset:
            return 0
        if self.panels is not None:
            return self.panels.offset
        return MIDDLE if self.bits == 4 and self.kind is Kind.INT else 0

    def numbers_shape(self, columns: int) -> Shape:
        """Return the shape of `numbers`. A panel has `columns` rows of the table; without panels, `columns` is not used."""
        if self.panels is None:
            return Dim.of(self.size), Dim.of(self.length // num_per_byte(self.bits))
        return ceil_div(Dim.of(self.size), columns), self.panels.lines(Dim.of(self.length)), Dim.of(columns * FOUR)

    def levels_shape(self, groups: DimLike, columns: int) -> Shape:
        """Return the shape of scales, of offsets, or of their units, of which each row has `groups`. A panel has `columns` rows of the
        table; without panels, `columns` is not used."""
        if self.panels is None:
            return Dim.of(self.size), Dim.of(groups)
        return ceil_div(Dim.of(self.size), columns), Dim.of(groups), Dim.of(columns)


def _columns(shape: Sequence[Dim], table: _Table) -> int:
    """Return the number of columns of a panel, or 1 for a table without panels. `shape` is that of the scales."""
    return 1 if table.panels is None else constant(shape[-1], "the number of columns of scale")


def _look_up_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    table = _Table.of(attrs)
    if len(args) != len(table.names):
        raise AnnotationError(f"there are {len(args)} operands, expected {', '.join(table.names)}")
    given = {name: tensor_operand(args, i, name) for i, name in enumerate(table.names)}
    ids, numbers, scale = wants_int(given["ids"], "ids"), given["numbers"], given["scale"]
    if numbers.dtype not in (None, table.holds):
        raise AnnotationError(f"numbers holds {numbers.dtype}, expected {table.holds} for {table.bits} bits")
    rank = 2 if table.panels is None else 3
    if scale.shape is not None and len(scale.shape) != rank:
        raise AnnotationError(f"scale has rank {len(scale.shape)}, expected {rank}")
    if scale.shape is not None:
        columns, groups = _columns(scale.shape, table), constant(scale.shape[1], "the number of groups of scale")
        if table.length % groups:
            raise AnnotationError(f"scale has {groups} groups, expected a divisor of {table.length}, the length of a row")
        same_shape(table.numbers_shape(columns), numbers, "numbers")
        for name in table.names[2:]:
            _check_levels(table, name, given[name], groups, columns)
    return TensorType(None if ids.shape is None else (*ids.shape, Dim.of(table.length)), F32, None if ids.ndim is None else ids.ndim + 1)


def _check_levels(table: _Table, name: str, given: TensorType, groups: int, columns: int) -> None:
    """Raise AnnotationError if the operand `name`, which holds scales, offsets or their units, has a wrong element type or shape."""
    if table.in_units and name in ("scale", "offset"):
        if given.dtype not in (None, I8):
            raise AnnotationError(f"{name} holds {given.dtype}, expected {I8} in units")
    elif not (name == "offset" and table.offset == ZERO):
        wants_float(given, name)
    if given.shape is None or not name.endswith("unit"):
        return same_shape(table.levels_shape(groups, columns), given, name)
    if len(given.shape) < 2 or not given.shape[1].is_const or not given.shape[1].const or groups % given.shape[1].const:
        raise AnnotationError(f"{name} has shape {list(map(str, given.shape))}, expected a number of units that divides {groups} groups")
    return same_shape(table.levels_shape(given.shape[1], columns), given, name)


def _look_up_nest(operands: Operands) -> Nest:
    table, kernel = _Table.of(operands.attrs), Kernel()
    places = {name: i for i, name in enumerate(table.names)}
    arrays = {name: kernel.array(operands.buffer(i)) for name, i in places.items()}
    out, ids, scale = kernel.array(output(operands)), arrays["ids"], arrays["scale"]
    columns, groups = _columns(scale.shape, table), constant(scale.shape[1], "the number of groups of scale")
    if table.panels is not None:
        constant(arrays["numbers"].shape[-1], "the last dimension of numbers", FOUR)
    for name in table.names[3:]:
        constant(arrays[name].shape[1], f"the number of groups of {name}")
    with kernel.nest(ids.shape) as at:
        row = clamped_index(kernel, "id", ids[at], Dim.of(table.size))
        with kernel.nest((table.length,)) as (k,):

            def level(name: str) -> Scalar:
                found = _level(table, arrays[name], row, k)
                return found * _level(table, arrays[UNITS[name]], row, k) if table.in_units else found

            number = _number(table, arrays["numbers"], row, k)
            if table.offset == ZERO:
                number = number - level("offset")
            value = number * level("scale")
            out[*at, k] = value - level("offset") if table.offset == SHIFT else value
    wanted = {1: table.numbers_shape(columns), 2: table.levels_shape(groups, columns)}
    wanted |= {places[name]: table.levels_shape(arrays[name].shape[1], columns) for name in table.names[3:]}
    return Nest((out.buffer,), kernel.body(), checks=unproved(operands, wanted))


def _number(table: _Table, numbers: Array, row: Dim, k: Dim) -> Scalar:
    """Return a number of the table as an f32, after subtracting `table.subtracted`."""
    if table.panels is not None:
        stored = table.panels.element((numbers.buffer,), row, k).decoded
    else:
        stored = half_byte(numbers.buffer, (row,), k) if table.bits == 4 else numbers[row, k]
        stored = looked_up(stored, table.kind) if table.kind in TABLES else stored
    number = cast(stored, F32)
    return number - table.subtracted if table.subtracted else number


def _level(table: _Table, levels: Array, row: Dim, k: Dim) -> Scalar:
    """Return the scale, the offset or the unit that belongs to the number at `k` of a row, as an f32."""
    group = k // (table.length // levels.shape[1].const)
    if table.panels is None:
        return cast(levels[row, group], F32)
    columns = levels.shape[-1].const
    return cast(levels[row // columns, group, row % columns], F32)


def _look_up_numpy(ids: Any, numbers: Any, scale: Any, *others: Any, **attrs: Any) -> Any:
    table = _Table.of(attrs)
    given = dict(zip(table.names[2:], (scale, *others), strict=True))
    rows = ids.reshape(-1)
    levels = {name: _levels_numpy(table, array, rows) for name, array in given.items()}

    def level(name: str) -> Any:
        return levels[name] * levels[UNITS[name]] if table.in_units else levels[name]

    wide = _numbers_numpy(table, numbers, rows, scale.shape[-1]).astype(np.float32) - np.float32(table.subtracted)
    if table.offset == ZERO:
        wide = wide - level("offset")
    value = wide * level("scale")
    value = value - level("offset") if table.offset == SHIFT else value
    return value.reshape(*ids.shape, table.length)


def _numbers_numpy(table: _Table, numbers: Any, rows: Any, columns: int) -> Any:
    if table.panels is not None:
        stored = table.panels.stored(numbers[rows // columns])
        return stored.reshape(len(rows), columns, table.length)[np.arange(len(rows)), rows % columns]
    stored = half_bytes(numbers[rows]) if table.bits == 4 else numbers[rows]
    return TABLES[table.kind][stored] if table.kind in TABLES else stored


def _levels_numpy(table: _Table, levels: Any, rows: Any) -> Any:
    """Return the scales, offsets or units of rows, repeated so that there is one per number."""
    columns = levels.shape[-1]
    of_rows = levels[rows] if table.panels is None else levels[rows // columns, :, rows % columns]
    return np.repeat(of_rows.astype(np.float32), table.length // levels.shape[1], 1)


LOOK_UP = define(
    "look_up",
    "ids, numbers, scale, unit?, offset?, offset_unit?",
    _look_up_type,
    _look_up_numpy,
    _look_up_nest,
    {"size": REQUIRED, "length": REQUIRED, "bits": 8, "kind": str(Kind.INT), "format": "", "in_units": False, "offset": NO_OFFSET},
    indices={"ids": clamped("size")},
)
