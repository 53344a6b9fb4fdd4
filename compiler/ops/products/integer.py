"""Integer products of activations of 8 or 16 bits with weights in panels, which store 8, 6, 4 or 2 bits per weight. The sum of a plane
within a group is exact. The sums of two planes are combined in f32 with one rounding. The groups are added in order, in f32. For row i of
x, row n of the weight, contracted index k and group g:

    x[i, k] = scale[i, g] * v[i, k]     g = k // group; v is one plane of i8 or i16, or two planes of i8: v = 256 * q[0] + q[1]
    y[i, n] = sum(g) (scale[i, g] * weight_scale[n, g]) * (sum(k in g) v[i, k] * w[n, k])

A weight with one scale per channel may multiply rows with one scale per group. The weight's scale then multiplies the sum of all groups:

    y[i, n] = weight_scale[n] * sum(g) scale[i, g] * (sum(k in g) v[i, k] * w[n, k])

Panels (compiler/machine/formats.py) store each weight plus a constant, `Panels.offset`. The contribution of this constant is subtracted by
means of `total`, the sum of q per group and plane. If `centred` is false, w is the number as stored, and nothing is subtracted.

Groups of weights may have offsets, if `has_offset` is true: the weight is w * weight_scale - offset. `sum` is the sum of each group of x.
One order is fixed: first the terms of the offsets are added, group by group, then the products.

    y[i, n] = sum(g) -sum[i, g] * offset[n, g] + sum(g) (scale[i, g] * weight_scale[n, g]) * (sum(k in g) v[i, k] * w[n, k])

If `in_units` is true, weight_scale is an i8 multiple of a unit, and the scale of a group is weight_scale[n, g] * unit[n, u]. Several
neighbouring groups share the float `unit[n, u]`. In this case, offsets are i8 multiples of other units, `offset_unit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, DimLike, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.fma import numpy_fma
from compiler.ir.loops.scalars import Contraction, Load, Scalar
from compiler.ir.loops.write import Array, Kernel, cast, contract, contract_groups, guard
from compiler.ir.numbers import num_per_byte
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_divisible
from compiler.ir.relations import Relation, multiple
from compiler.ir.types import TensorType, Type
from compiler.machine.formats import FOUR, PANELS, Panels
from compiler.ops.broadcast import output
from compiler.ops.index import clamped_index
from compiler.ops.operands import agree, bool_attr, dtype_attr, int_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.products.quantize import half_byte, half_bytes
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I16, I32, U8 = DType.F32, DType.I8, DType.I16, DType.I32, DType.U8


# --- panel_integers ----------------------------------------------------------------------------------------------------


def _format(attrs: Attrs) -> Panels:
    name = attrs["format"]
    if not isinstance(name, str) or name not in PANELS:
        raise AnnotationError(f"attribute format is {name!r}, expected one of {', '.join(PANELS)}")
    return PANELS[name]


def _panels_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    format, columns = _format(attrs), int_attr(attrs, "columns", 1)
    holds = U8 if format.held_bits == 4 else I8
    q = matrices_operand(args, "q", "[..., out, in]")
    if q.dtype not in (None, holds):
        raise AnnotationError(f"q holds {q.dtype}, expected {holds} for {format.name}")
    if q.shape is None:
        return TensorType(None, U8, None if q.ndim is None else q.ndim + 1)
    *matrix, size, length = q.shape
    per_byte = num_per_byte(format.held_bits)
    if not prove_divisible(length, format.depth // per_byte):
        raise AnnotationError(f"the last dimension of q is {length}, expected a multiple of {format.depth // per_byte}")
    return TensorType((*matrix, ceil_div(size, columns), format.lines(length * per_byte), Dim.of(columns * FOUR)), U8)


def matrices_operand(args: tuple[Type, ...], name: str, layout: str) -> TensorType:
    """Return the annotation of the first operand, which holds one matrix or several."""
    given = tensor_operand(args, 0, name)
    if given.ndim is not None and given.ndim < 2:
        raise AnnotationError(f"{name} has rank {given.ndim}, expected at least 2: {layout}")
    return given


def _panels_nest(operands: Operands) -> Nest:
    """Pack weights into panels. The last panel is padded with columns of weights 0."""
    kernel, format, columns = Kernel(), _format(operands.attrs), operands.attrs["columns"]
    out, q = kernel.arrays(output(operands), operands.buffer(0))
    num_columns = q.shape[-2]
    with kernel.nest(out.shape) as (*matrix, panel, line, j):
        n = panel * columns + j // FOUR

        def number(k: Dim) -> Scalar:
            return half_byte(q.buffer, (*matrix, n), k) if format.held_bits == 4 else cast(q[*matrix, n, k], I32)

        stored = format.byte(line, j, number)
        if not prove_divisible(num_columns, columns):
            stored = guard(0, n, num_columns, stored, format.padding_of(line))
        out[*matrix, panel, line, j] = cast(stored, U8)
    return Nest((out.buffer,), kernel.body())


def _panels_numpy(q: Any, *, format: str, columns: int) -> Any:
    numbers = half_bytes(q) if PANELS[format].held_bits == 4 else q
    return PANELS[format].packed(numbers, columns)


PANEL_INTEGERS = define("panel_integers", "q", _panels_type, _panels_numpy, _panels_nest, {"format": "panel8", "columns": REQUIRED})


# --- panel_scales ------------------------------------------------------------------------------------------------------


def _scales_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    scale, columns = matrices_operand(args, "scale", "[..., out, groups]"), int_attr(attrs, "columns", 1)
    if scale.dtype is not I8:
        wants_float(scale, "scale")
    if scale.shape is None:
        return TensorType(None, scale.dtype, None if scale.ndim is None else scale.ndim + 1)
    *matrix, size, groups = scale.shape
    return TensorType((*matrix, ceil_div(size, columns), groups, Dim.of(columns)), scale.dtype)


def _scales_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, scale = k.arrays(output(operands), operands.buffer(0))
    with k.nest(out.shape) as (*matrix, panel, g, j):
        n = panel * operands.attrs["columns"] + j
        out[*matrix, panel, g, j] = guard(0, n, scale.shape[-2], scale[*matrix, n, g], 0)
    return Nest((out.buffer,), k.body())


def scales_numpy(scale: Any, *, columns: int) -> Any:
    *matrix, n, groups = scale.shape
    padded = np.pad(scale, (*[(0, 0)] * len(matrix), (0, -n % columns), (0, 0)))
    return padded.reshape(*matrix, -(-n // columns), columns, groups).swapaxes(-1, -2)


PANEL_SCALES = define("panel_scales", "scale", _scales_type, scales_numpy, _scales_nest, {"columns": REQUIRED})


# --- integer_linear ----------------------------------------------------------------------------------------------------


def integer_type(args: tuple[Type, ...], attrs: Attrs, *, chooses: bool = False) -> Type:
    """Deduce the annotation of the result, [..., out]. If `chooses`, each row chooses its matrix: rows then have a single axis, and there
    is one bias per matrix."""
    format, dtype, size = _format(attrs), dtype_attr(attrs), int_attr(attrs, "size", 1)
    q, scale, total = (tensor_operand(args, i, name) for i, name in enumerate(("q", "scale", "total")))
    first, rank = ("experts, ", 4) if chooses else ("", 3)
    panels = tensor_operand(args, 3, "panels", ndim=rank, layout=f"[{first}panels, in / 4, 4 * columns]")
    weight_scale = tensor_operand(args, 4, "weight_scale", ndim=rank, layout=f"[{first}panels, groups, columns]")
    for operand, name, holds in ((total, "total", I32), (panels, "panels", U8)):
        if operand.dtype not in (None, holds):
            raise AnnotationError(f"{name} holds {operand.dtype}, expected {holds}")
    if q.dtype not in (None, format.rows):
        raise AnnotationError(f"q holds {q.dtype}, expected {format.rows} with {format.name}")
    in_units = bool_attr(attrs, "in_units")
    if in_units and weight_scale.dtype not in (None, I8):
        raise AnnotationError(f"weight_scale holds {weight_scale.dtype}, expected {I8} in units")
    if not in_units:
        wants_float(weight_scale, "weight_scale")
    if q.ndim is not None and q.ndim < 2:
        raise AnnotationError(f"q has rank {q.ndim}, expected at least 2: [..., planes, in]")
    if weight_scale.shape is not None:
        constant(weight_scale.shape[-1], "the number of columns of weight_scale")
    if q.shape is None or scale.shape is None or total.shape is None or panels.shape is None or weight_scale.shape is None:
        return TensorType(None, dtype, None if q.ndim is None else q.ndim - 1)
    if scale.ndim == 0:
        raise AnnotationError("scale has rank 0, expected at least 1: [..., groups]")
    constant(panels.shape[-1], "dimension -1 of panels", FOUR)
    *row, planes, length = q.shape
    groups = scale.shape[-1]
    if weight_scale.shape[-2] != groups:
        constant(weight_scale.shape[-2], "the number of groups of weight_scale")  # must be known: 1 and larger numbers need different nests
    weight_groups = _weight_groups(weight_scale.shape[-2], groups)
    columns, matrix = panels.shape[-1] // FOUR, panels.shape[:-3]
    most = 2 // format.rows.num_bytes
    if not planes.is_const or not 1 <= planes.const <= most:
        raise AnnotationError(f"q has {planes} planes, expected 1{'' if most == 1 else f' or {most}'}")
    same_shape((*row, groups), scale, "scale")
    same_shape((*row, planes, groups), total, "total")
    same_shape((*matrix, ceil_div(Dim.of(size), columns), format.lines(length), columns * FOUR), panels, "panels")
    same_shape((*panels.shape[:-2], weight_groups, columns), weight_scale, "weight_scale")
    if chooses:
        experts = wants_int(tensor_operand(args, 5, "experts", ndim=1, layout="[rows]"), "experts")
        if len(row) != 1:
            raise AnnotationError(f"q has rank {len(row) + 2}, expected 3: [rows, planes, in]")
        same_shape(tuple(row), experts, "experts")
    at = _Optional.of(attrs, chooses=chooses)
    for place, name in ((at.unit, "unit"), (at.offset_unit, "offset_unit")):
        if place is None:
            continue
        unit = wants_float(tensor_operand(args, place, name, ndim=rank, layout=f"[{first}panels, units, columns]"), name)
        if unit.shape is not None:
            same_shape((*panels.shape[:-2], unit.shape[-2], columns), unit, name)
            if not unit.shape[-2].is_const or not prove_divisible(groups, unit.shape[-2].const):
                raise AnnotationError(f"{name} has {unit.shape[-2]} units, expected a divisor of {groups}, the number of groups")
    if at.offset is not None:
        offset = tensor_operand(args, at.offset, "offset", ndim=rank, layout=f"[{first}panels, groups, columns]")
        if in_units and offset.dtype not in (None, I8):
            raise AnnotationError(f"offset holds {offset.dtype}, expected {I8} in units")
        if not in_units:
            wants_float(offset, "offset")
        if weight_groups != groups:
            raise AnnotationError(f"weight_scale has {weight_groups} groups, expected {groups} beside offsets")
        same_shape((*panels.shape[:-2], groups, columns), offset, "offset")
    if at.sum is not None:
        sums = tensor_operand(args, at.sum, "sum")
        if sums.dtype not in (None, F32):
            raise AnnotationError(f"sum holds {sums.dtype}, expected {F32}")
        same_shape((*row, groups), sums, "sum")
    if len(args) > at.bias:
        same_shape((*matrix, Dim.of(size)), tensor_operand(args, at.bias, "bias", ndim=1 + chooses), "bias")
    return TensorType((*row, Dim.of(size)), dtype)


def _weight_groups(given: Dim, groups: Dim) -> Dim:
    """Return the number of groups that weight scales must have: 1 if they are given per channel, else the number of groups of a row."""
    return given if given == Dim.of(1) else groups


@dataclass(frozen=True, slots=True)
class _Optional:
    """The positions of the optional operands of a product. None: this product does not have the operand. `bias` is the position after all
    other operands, where a product with a bias has it."""

    unit: int | None
    sum: int | None
    offset: int | None
    offset_unit: int | None
    bias: int

    @staticmethod
    def of(attrs: Attrs, *, chooses: bool) -> _Optional:
        in_units, has_offset = bool_attr(attrs, "in_units"), bool_attr(attrs, "has_offset")
        present, at = (in_units, has_offset, has_offset, in_units and has_offset), 5 + chooses
        places = [at + sum(present[:i]) if is_present else None for i, is_present in enumerate(present)]
        return _Optional(*places, bias=at + sum(present))


def constant(extent: Dim, what: str, least: int = 1) -> int:
    """Return an extent as a number. Raise AnnotationError, which names it by `what`, if it is symbolic or less than `least`."""
    if not extent.is_const or extent.const < least:
        raise AnnotationError(f"{what} is {extent}, expected a number of at least {least}")
    return extent.const


def integer_relations(args: tuple[Type, ...], attrs: Attrs) -> Iterable[Relation]:
    """A row must consist of whole groups, and of whole lines of panels."""
    q, scale = args[:2]
    if isinstance(q, TensorType) and isinstance(scale, TensorType) and q.shape is not None and scale.shape is not None:
        yield from multiple(q.shape[-1], scale.shape[-1], "the last dimension of q", "the number of groups")
        yield from multiple(q.shape[-1], _format(attrs).depth, "the last dimension of q", "the depth of a line of panels")


def same_shape(wanted: tuple[Dim, ...], given: TensorType, name: str) -> None:
    """Raise AnnotationError if the operand has another rank than `wanted`, or an extent that is proved to differ."""
    if given.shape is not None and len(given.shape) != len(wanted):
        raise AnnotationError(f"{name} has rank {len(given.shape)}, expected {len(wanted)}")
    for d, (w, g) in enumerate(zip(wanted, wanted if given.shape is None else given.shape, strict=True)):
        agree(w, g, f"dimension {d} of {name}")


def integer_nest(operands: Operands, *, chooses: bool = False) -> Nest:
    """Write the product in the order of operations that the head of this file fixes. `chooses` means the same as for `integer_type`."""

    kernel, format = Kernel(), _format(operands.attrs)
    out, q, scale, sums, panels, weight_scale = kernel.arrays(output(operands), *(operands.buffer(i) for i in range(5)))
    at = _Optional.of(operands.attrs, chooses=chooses)
    optional = (at.unit, at.sum, at.offset, at.offset_unit)
    unit, of_rows, offset, offset_unit = (None if i is None else kernel.array(operands.buffer(i)) for i in optional)
    bias = kernel.array(operands.buffer(at.bias)) if operands.has(at.bias) else None
    length, groups, columns = q.shape[-1], scale.shape[-1], weight_scale.shape[-1].const
    scaled_last = weight_scale.shape[-2] == Dim.of(1) and groups != Dim.of(1)
    group = length if groups == Dim.of(1) else length // groups
    matrices = panels.shape[:-3]
    with ExitStack() as stack:
        row = stack.enter_context(kernel.nest(out.shape[:-1]))
        matrix = (clamped_index(kernel, "expert", Load(operands.buffer(5), row), matrices[0]),) if chooses else ()
        (n,) = stack.enter_context(kernel.nest(out.shape[-1:], "n"))

        def column(k: Dim) -> Scalar:
            return format.element((panels.buffer,), n, k, matrix)

        def decoded(numbers: Array, unit: Array | None, g: DimLike) -> Scalar:
            found = cast(numbers[*matrix, n // columns, g, n % columns], F32)
            if unit is None:
                return found
            return found * cast(unit[*matrix, n // columns, Dim.of(g) // (groups // unit.shape[-2]), n % columns], F32)

        def factor(g: Dim) -> Scalar:
            return scale[*row, g] if scaled_last else scale[*row, g] * decoded(weight_scale, unit, g)

        def term(g: Dim) -> Scalar:
            assert of_rows is not None and offset is not None
            return -of_rows[*row, g] * decoded(offset, offset_unit, g)

        def dot(g: Dim, plane: int) -> Contraction:
            first = g * group
            return contract(group, lambda r: cast(q[*row, plane, first + r], I32), lambda r: column(first + r))

        planes = range(q.shape[-2].const)
        begins = [lambda g, plane=plane: sums[*row, plane, g] * -format.offset for plane in planes]
        result: Scalar = contract_groups(
            groups,
            [partial(dot, plane=plane) for plane in planes],
            factor,
            begins=begins if operands.attrs["centred"] else (),
            term=None if offset is None else term,
        )
        if scaled_last:
            result = result * decoded(weight_scale, unit, 0)
        out[*row, n] = cast(result if bias is None else result + cast(bias[*matrix, n], F32), out.dtype)
    rows, size = q.shape[:-2], out.shape[-1]
    weight_groups = _weight_groups(weight_scale.shape[-2], groups)
    wanted = {1: (*rows, groups), 2: (*rows, q.shape[-2], groups), 4: (*panels.shape[:-2], weight_groups, Dim.of(columns))}
    wanted[3] = (*matrices, ceil_div(size, columns), format.lines(length), Dim.of(columns * FOUR))
    wanted |= ({5: rows} if chooses else {}) | ({} if bias is None else {at.bias: (*matrices, size)})
    wanted |= {} if at.sum is None else {at.sum: (*rows, groups)}
    for place, part in ((at.unit, unit), (at.offset, offset), (at.offset_unit, offset_unit)):
        if place is not None and part is not None:
            wanted[place] = (*panels.shape[:-2], groups if part is offset else part.shape[-2], Dim.of(columns))
    return Nest((out.buffer,), kernel.body(), checks=unproved(operands, wanted))


def integer_numpy(
    q: Any,
    scale: Any,
    total: Any,
    panels: Any,
    weight_scale: Any,
    *others: Any,
    format: str,
    size: int,
    dtype: str,
    centred: bool,
    in_units: bool,
    has_offset: bool,
) -> Any:
    at = _Optional.of({"in_units": in_units, "has_offset": has_offset}, chooses=False)
    unit, of_rows, offset, offset_unit, bias = (
        None if i is None or i - 5 >= len(others) else others[i - 5] for i in (at.unit, at.sum, at.offset, at.offset_unit, at.bias)
    )
    *row, planes, length = q.shape
    groups = scale.shape[-1]
    w = PANELS[format].stored(panels).astype(np.float64)
    w = w.reshape(len(w), groups, length // groups)
    num_rows = int(np.prod(row))
    v = q.astype(np.float64).reshape(num_rows, planes, groups, length // groups)
    # These sums are exact in f64. Subtract the offset as the compiled code does.
    sums = np.einsum("mpgk,ngk->pgmn", v, w, optimize=True).astype(np.int64)
    if centred:
        sums -= PANELS[format].offset * total.reshape(num_rows, planes, groups).transpose(1, 2, 0)[..., None].astype(np.int64)
    wide = sums.astype(np.float32)
    exact = wide[0] if planes == 1 else numpy_fma(wide[0], np.float32(256), wide[1])
    row_scale = scale.reshape(num_rows, groups)
    column_scale = _by_columns(weight_scale, unit)
    scaled_last = len(column_scale) < groups
    y = np.zeros(exact.shape[1:], np.float32)
    if of_rows is not None:
        for of_row, of_column in zip(of_rows.reshape(num_rows, groups).T, _by_columns(offset, offset_unit), strict=True):
            y += -of_row[:, None] * of_column
    for g in range(groups):
        y += exact[g] * (row_scale[:, g, None] if scaled_last else row_scale[:, g, None] * column_scale[g])
    if scaled_last:
        y *= column_scale[0]
    y = y[:, :size] if bias is None else y[:, :size] + bias.astype(np.float32)
    return y.reshape(*row, size).astype(DType(dtype).numpy)


def _by_columns(numbers: Any, unit: Any) -> Any:
    """Unpack scales or offsets from panels: [groups, columns] in f32."""
    wide = numbers.astype(np.float32)
    if unit is not None:
        wide = wide * np.repeat(unit.astype(np.float32), numbers.shape[-2] // unit.shape[-2], -2)
    return wide.transpose(1, 0, 2).reshape(numbers.shape[-2], -1)


INTEGER_LINEAR = define(
    "integer_linear",
    "q, scale, total, panels, weight_scale, unit?, sum?, offset?, offset_unit?, bias?",
    integer_type,
    integer_numpy,
    integer_nest,
    {"format": "panel8", "size": REQUIRED, "dtype": "f32", "centred": True, "in_units": False, "has_offset": False},
    relations=integer_relations,
)
