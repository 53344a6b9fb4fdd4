"""Products of 4-bit weights that are widened to 8 bits with one scale per channel, so that the sum over a whole channel is exact.

    m[n, g] = round(s[n, g] / largest * 127)         largest: the scale of the channel with the largest magnitude
    w[n, k] = (q[n, k] * m[n, g] + 4) >> 3           q in -8 .. 7, so w in -127 .. 127
    S[n]    = largest * 8 / 127
    v[i, k] = 256 * planes[i, 0, k] + planes[i, 1, k]
    y[i, n] = scale[i] * S[n] * sum(k) v[i, k] * w[n, k]

For row i, channel n, contracted index k and its group g: q are the 4-bit weights, s the scales of groups, m the multipliers, w the widened
weights, S the channel scales. S is about a sixteenth of `largest`, the 4-bit step of the group with the largest scale. Panels have the
4-bit layout of integer.py; multipliers and channel scales are in panels of the same number of columns. Planes come from integer_rows.py.
The second plane is used in rows that need two planes, and is zero in all other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.fma import numpy_fma
from compiler.ir.loops.scalars import Contraction, Load, Scalar
from compiler.ir.loops.write import Kernel, cast, const, contract, contract_groups, guard, largest_magnitude, round_half_even, select
from compiler.ir.op import REQUIRED
from compiler.ir.relations import Relation, multiple
from compiler.ir.types import TensorType, TupleType, Type
from compiler.machine.formats import EIGHTHS, FOUR, PANEL4, WIDENED4
from compiler.ops.broadcast import output, sized_buffer
from compiler.ops.index import clamped_index
from compiler.ops.operands import dtype_attr, int_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.products.integer import constant, matrices_operand, same_shape, scales_numpy
from compiler.ops.products.integer_rows import NEGLIGIBLE
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I32, U8, BOOL = DType.F32, DType.I8, DType.I32, DType.U8, DType.BOOL
MOST = 127  # the largest multiplier and the largest widened weight

# --- panel_multipliers -------------------------------------------------------------------------------------------------


def _multipliers_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """Deduce the annotations of the results: multipliers [..., panels, groups, columns], channel_scale [..., panels, 1, columns]."""
    scale, columns = wants_float(matrices_operand(args, "scale", "[..., out, groups]"), "scale"), int_attr(attrs, "columns", 1)
    if scale.shape is None:
        rank = scale.ndim and scale.ndim + 1
        return TupleType((TensorType(None, I8, rank), TensorType(None, F32, rank)))
    *matrix, size, groups = scale.shape
    panels, width = (*matrix, ceil_div(size, columns)), Dim.of(columns)
    return TupleType((TensorType((*panels, groups, width), I8), TensorType((*panels, Dim.of(1), width), F32)))


def _multipliers_nest(operands: Operands) -> Nest:
    """Compute multipliers and channel scales. The columns that pad the last panel have scale 0."""
    k, columns, out = Kernel(), operands.attrs["columns"], operands.out
    assert isinstance(out, TupleType)
    outputs = tuple(sized_buffer(t, name) for t, name in zip(out.fields, ("multipliers", "channel_scale"), strict=True))
    scale, multipliers, channel = k.arrays(operands.buffer(0), *outputs)
    *_, num_columns, num_groups = scale.shape
    top, inverse = k.workspace("top", *channel.shape), k.workspace("inverse", *channel.shape)

    def given(matrix: Sequence[Dim], panel: Dim, g: Dim, j: Dim) -> Scalar:
        n = panel * columns + j
        return guard(0, n, num_columns, cast(scale[*matrix, n, g], F32), 0.0)

    with k.nest(top.shape) as (*matrix, panel, one, j):
        top[*matrix, panel, one, j] = largest_magnitude(num_groups, lambda g: given(matrix, panel, g, j))
    with k.nest(channel.shape) as at:
        channel[at] = top[at] * float(np.float32(8 / MOST))
    with k.nest(inverse.shape) as at:
        none = top[at] < NEGLIGIBLE
        inverse[at] = select(none, const(0.0, F32), float(MOST) / select(none, const(1.0, F32), top[at]))
    with k.nest(multipliers.shape) as (*matrix, panel, g, j):
        steps = given(matrix, panel, g, j) * inverse[*matrix, panel, 0, j]
        multipliers[*matrix, panel, g, j] = cast(cast(round_half_even(steps), I32), I8)
    return Nest(outputs, k.body())


def _multipliers_numpy(scale: Any, *, columns: int) -> Any:
    panels = scales_numpy(scale.astype(np.float32), columns=columns)
    top = np.abs(panels).max(-2, keepdims=True, initial=0)
    none = top < np.float32(NEGLIGIBLE)
    inverse = np.where(none, np.float32(0), np.float32(MOST) / np.where(none, np.float32(1), top))
    return np.rint(panels * inverse).astype(np.int8), top * np.float32(8 / MOST)


PANEL_MULTIPLIERS = define("panel_multipliers", "scale", _multipliers_type, _multipliers_numpy, _multipliers_nest, {"columns": REQUIRED})


# --- widened_linear ----------------------------------------------------------------------------------------------------


def widened_type(args: tuple[Type, ...], attrs: Attrs, *, chooses: bool = False) -> Type:
    """Deduce the annotation of the result, [..., out]. `chooses` means the same as for `integer_type`."""
    dtype, size = dtype_attr(attrs), int_attr(attrs, "size", 1)
    planes, scale = tensor_operand(args, 0, "planes"), wants_float(tensor_operand(args, 1, "scale"), "scale")
    two_planes = tensor_operand(args, 2, "two_planes")
    first, rank = ("experts, ", 4) if chooses else ("", 3)
    panels = tensor_operand(args, 3, "panels", ndim=rank, layout=f"[{first}panels, in / 8, 4 * columns]")
    multipliers = tensor_operand(args, 4, "multipliers", ndim=rank, layout=f"[{first}panels, groups, columns]")
    channel = wants_float(tensor_operand(args, 5, "channel_scale", ndim=rank, layout=f"[{first}panels, 1, columns]"), "channel_scale")
    given = (planes, scale, two_planes, panels, multipliers, channel)
    for operand, name, holds in zip(given, _NAMES, (I8, None, BOOL, U8, I8, None), strict=True):
        if holds is not None and operand.dtype not in (None, holds):
            raise AnnotationError(f"{name} holds {operand.dtype}, expected {holds}")
    if planes.ndim is not None and planes.ndim < 2:
        raise AnnotationError(f"planes has rank {planes.ndim}, expected at least 2: [..., 2, in]")
    if multipliers.shape is not None:
        constant(multipliers.shape[-1], "the number of columns of multipliers")
        constant(multipliers.shape[-2], "the number of groups of multipliers")
    if panels.shape is not None:
        constant(panels.shape[-2], f"dimension {rank - 2} of panels")
    for name, given_panels in (("panels", panels), ("channel_scale", channel)):
        if given_panels.shape is not None:
            constant(given_panels.shape[-1], f"dimension {rank - 1} of {name}")
    if planes.shape is None or multipliers.shape is None:
        return TensorType(None, dtype, None if planes.ndim is None else planes.ndim - 1)
    for wanted, operand, name in zip(_wanted(planes.shape, multipliers.shape, size), given, _NAMES, strict=True):
        same_shape(wanted, operand, name)
    if chooses:
        if len(planes.shape) != 3:
            raise AnnotationError(f"planes has rank {len(planes.shape)}, expected 3: [rows, 2, in]")
        same_shape(planes.shape[:1], wants_int(tensor_operand(args, 6, "experts", ndim=1, layout="[rows]"), "experts"), "experts")
    if len(args) > 6 + chooses:
        same_shape((*multipliers.shape[:-3], Dim.of(size)), tensor_operand(args, 6 + chooses, "bias", ndim=1 + chooses), "bias")
    return TensorType((*planes.shape[:-2], Dim.of(size)), dtype)


def widened_relations(args: tuple[Type, ...], _: Attrs) -> Iterable[Relation]:
    """A row must consist of whole groups, and of whole lines of panels."""
    planes, multipliers = args[0], args[4]
    if isinstance(planes, TensorType) and planes.shape is not None:
        yield from multiple(planes.shape[-1], WIDENED4.depth, "the last dimension of planes", "the depth of a line of panels")
        if isinstance(multipliers, TensorType) and multipliers.shape is not None:
            yield from multiple(planes.shape[-1], multipliers.shape[-2], "the last dimension of planes", "the number of groups")


_NAMES = ("planes", "scale", "two_planes", "panels", "multipliers", "channel_scale")


def _wanted(planes: tuple[Dim, ...], multipliers: tuple[Dim, ...], size: int) -> tuple[tuple[Dim, ...], ...]:
    (*row, _, length), (*matrix, _, groups, columns), one = planes, multipliers, Dim.of(1)
    panels, deep = (*matrix, ceil_div(Dim.of(size), columns)), length // WIDENED4.depth
    number = (*row, one)
    rows = (*row, Dim.of(2), length), number, number
    return *rows, (*panels, deep, columns * FOUR), (*panels, groups, columns), (*panels, one, columns)


def widened_nest(operands: Operands, *, chooses: bool = False) -> Nest:
    """Compute the product as the sum over groups of integer.py, with a single group as long as the channel."""
    kernel = Kernel()
    out, planes, scale, two_planes, panels, multipliers, channel = kernel.arrays(output(operands), *(operands.buffer(i) for i in range(6)))
    bias = kernel.array(operands.buffer(6 + chooses)) if operands.has(6 + chooses) else None
    length, columns, matrices = planes.shape[-1], multipliers.shape[-1].const, multipliers.shape[:-3]
    with ExitStack() as stack:
        row = stack.enter_context(kernel.nest(out.shape[:-1]))
        matrix = (clamped_index(kernel, "expert", Load(operands.buffer(6), row), matrices[0]),) if chooses else ()
        (n,) = stack.enter_context(kernel.nest(out.shape[-1:], "n"))

        def dot(g: Dim, plane: int) -> Contraction:
            stored = panels.buffer, multipliers.buffer
            return contract(length, lambda k: cast(planes[*row, plane, k], I32), lambda k: WIDENED4.element(stored, n, k, matrix))

        result: Scalar = contract_groups(
            1,
            [partial(dot, plane=plane) for plane in range(2)],
            lambda g: scale[*row, g] * channel[*matrix, n // columns, g, n % columns],
            two_planes=lambda g: two_planes[*row, g],
        )
        out[*row, n] = cast(result if bias is None else result + cast(bias[*matrix, n], F32), out.dtype)
    size = out.shape[-1].const
    wanted = dict(enumerate(_wanted(planes.shape, multipliers.shape, size))) | ({6: planes.shape[:1]} if chooses else {})
    wanted |= {} if bias is None else {6 + chooses: (*matrices, Dim.of(size))}
    return Nest((out.buffer,), kernel.body(), checks=unproved(operands, wanted))


def widened_numpy(
    planes: Any, scale: Any, two_planes: Any, panels: Any, multipliers: Any, channel_scale: Any, bias: Any = None, *, size: int, dtype: str
) -> Any:
    *row, _, length = planes.shape
    groups = multipliers.shape[1]
    stored = PANEL4.stored(panels).astype(np.int32) - PANEL4.offset
    eighths = stored * np.repeat(multipliers.transpose(0, 2, 1).reshape(-1, groups).astype(np.int32), length // groups, -1)
    w = (eighths + (1 << EIGHTHS - 1)) >> EIGHTHS
    # these sums of integers are exact in f64
    sums = planes.reshape(int(np.prod(row)), 2, length).astype(np.float64).transpose(1, 0, 2) @ w.astype(np.float64).T
    first, second = sums.astype(np.float32)
    exact = numpy_fma(first, np.float32(256), np.where(two_planes.reshape(-1, 1), second, np.float32(0)))
    y = (exact * (scale.reshape(-1, 1) * channel_scale.reshape(1, -1)))[:, :size]
    y = y if bias is None else y + bias.astype(np.float32)
    return y.reshape(*row, size).astype(DType(dtype).numpy)


WIDENED_LINEAR = define(
    "widened_linear",
    "planes, scale, two_planes, panels, multipliers, channel_scale, bias?",
    widened_type,
    widened_numpy,
    widened_nest,
    {"size": REQUIRED, "dtype": "f32"},
    relations=widened_relations,
)
