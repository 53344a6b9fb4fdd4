"""Integer products: activations of 8 or 16 bits, and weights of 8 or 4 bits in panels. The sum within a group is exact; the groups are
added in order.

    x[i, k] = scale[i, g] * v[i, k]     g = k // group; v in one plane of i8 or i16, or in two of i8: v = 256 * q[0] + q[1]
    y[i, n] = sum(g) (scale[i, g] * weight_scale[n, g]) * (sum(k in g) v[i, k] * w[n, k])

Weights are stored with MIDDLE added, in panels (compiler/machine/panels.py); `total`, the sum of each group and plane of q, is used to
subtract what this adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Buffer, Load, Scalar
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType, Type
from compiler.ir.write import Kernel, cast, const, fma, guard, index, total
from compiler.machine.panels import FOUR, MIDDLE, WORDS_ORDER
from compiler.ops.broadcast import output
from compiler.ops.operands import agree, dtype_attr, int_attr, tensor_operand, unproved, wants_float
from compiler.ops.quantize import bits_attr, half_byte
from compiler.ops.tables import Nest, Operands, define

Attrs = Mapping[str, Any]

F32, I8, I16, I32, U8 = DType.F32, DType.I8, DType.I16, DType.I32, DType.U8


def neighbour(k: Dim, words: bool) -> Dim:
    """The position of a weight among its four."""
    return k % 2 * 2 + k // 2 % 2 if words else k % FOUR


# --- panel_integers ----------------------------------------------------------------------------------------------------


def panel_element(panels: Buffer, bits: int, n: Dim, k: Dim, words: bool) -> Scalar:
    """The weight of column `n` at `k` as it is stored, with MIDDLE added."""
    columns = panels.shape[-1].const // FOUR
    deep = k // (FOUR * 8 // bits)
    byte = cast(Load(panels, (n // columns, deep, n % columns * FOUR + neighbour(k, words))), I32)
    return byte if bits == 8 else byte >> cast(index(k // FOUR % 2 * 4), I32) & 15


def _panels_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    bits, columns = bits_attr(attrs, MIDDLE), int_attr(attrs, "columns", 1)
    if dtype_attr(attrs, "rows") not in (I8, *([I16] if bits == 8 else [])):
        raise AnnotationError(f"attribute rows is {attrs['rows']}, wants i8{' or i16' if bits == 8 else ''} beside {bits} bits")
    q = tensor_operand(args, 0, "q", ndim=2, layout="[out, in]")
    if q.dtype not in (None, I8 if bits == 8 else U8):
        raise AnnotationError(f"q holds {q.dtype}, wants {I8 if bits == 8 else U8} for {bits} bits")
    if q.shape is None:
        return TensorType(None, U8, 3)
    if not prove_divisible(q.shape[1], FOUR):
        raise AnnotationError(f"the last dimension of q is {q.shape[1]}, wants a multiple of {FOUR}")
    return TensorType((ceil_div(q.shape[0], columns), q.shape[1] // FOUR, Dim.of(columns * FOUR)), U8)


def _panels_nest(operands: Operands) -> Nest:
    """The columns beyond the last, which fill its panel, hold weights of 0."""
    kernel, attrs = Kernel(), operands.attrs
    out, q = kernel.arrays(output(operands), operands.buffer(0))
    middle, columns, num_columns = MIDDLE[attrs["bits"]], attrs["columns"], q.shape[0]
    with kernel.nest(out.shape) as (panel, deep, j):
        n = panel * columns + j // FOUR
        if attrs["bits"] == 8:
            padding = middle
            stored: Scalar = cast(q[n, deep * FOUR + neighbour(j, attrs["rows"] == I16)], I32) + middle
        else:
            padding = middle | middle << 4
            k = deep * (2 * FOUR) + j % FOUR
            stored = half_byte(q.buffer, (n,), k) | half_byte(q.buffer, (n,), k + FOUR) << 4
        if not prove_divisible(num_columns, columns):
            stored = guard(0, n, num_columns, stored, padding)
        out[panel, deep, j] = cast(stored, U8)
    return Nest((out.buffer,), kernel.body())


def _panels_numpy(q: Any, *, bits: int, columns: int, rows: str) -> Any:
    n, k = q.shape
    if bits == 8:
        stored = (q.astype(np.int32) + MIDDLE[8]).astype(np.uint8)
    else:
        numbers = np.stack([q & 15, q >> 4], -1).reshape(n, -1, 2, FOUR)
        stored = (numbers[:, :, 0] | numbers[:, :, 1] << 4).reshape(n, k)
    nothing = MIDDLE[8] if bits == 8 else MIDDLE[4] * 17
    padded = np.pad(stored, ((0, -n % columns), (0, 0)), constant_values=nothing)
    fours = padded.reshape(-1, columns, k // FOUR, FOUR).transpose(0, 2, 1, 3)
    return (fours[..., WORDS_ORDER] if rows == I16 else fours).reshape(-1, k // FOUR, columns * FOUR)


PANEL_INTEGERS = define("panel_integers", "q", _panels_type, _panels_numpy, _panels_nest, {"bits": 8, "columns": REQUIRED, "rows": "i8"})


# --- panel_scales ------------------------------------------------------------------------------------------------------


def _scales_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    scale, columns = wants_float(tensor_operand(args, 0, "scale", ndim=2, layout="[out, groups]"), "scale"), int_attr(attrs, "columns", 1)
    if scale.shape is None:
        return TensorType(None, scale.dtype, 3)
    return TensorType((ceil_div(scale.shape[0], columns), scale.shape[1], Dim.of(columns)), scale.dtype)


def _scales_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, scale = k.arrays(output(operands), operands.buffer(0))
    with k.nest(out.shape) as (panel, g, j):
        n = panel * operands.attrs["columns"] + j
        out[panel, g, j] = guard(0, n, scale.shape[0], scale[n, g], 0.0)
    return Nest((out.buffer,), k.body())


def _scales_numpy(scale: Any, *, columns: int) -> Any:
    n, groups = scale.shape
    return np.pad(scale, ((0, -n % columns), (0, 0))).reshape(-1, columns, groups).transpose(0, 2, 1)


PANEL_SCALES = define("panel_scales", "scale", _scales_type, _scales_numpy, _scales_nest, {"columns": REQUIRED})


# --- integer_linear ----------------------------------------------------------------------------------------------------


def _linear_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    """[..., out]"""
    bits, dtype, size = bits_attr(attrs, MIDDLE), dtype_attr(attrs), int_attr(attrs, "size", 1)
    q, scale, total = (tensor_operand(args, i, name) for i, name in enumerate(("q", "scale", "total")))
    panels = tensor_operand(args, 3, "panels", ndim=3, layout="[panels, in / 4, 4 * columns]")
    weight_scale = tensor_operand(args, 4, "weight_scale", ndim=3, layout="[panels, groups, columns]")
    for operand, name, holds in ((total, "total", I32), (panels, "panels", U8)):
        if operand.dtype not in (None, holds):
            raise AnnotationError(f"{name} holds {operand.dtype}, wants {holds}")
    words = q.dtype is I16
    if q.dtype not in (None, I8, I16) or (words and bits != 8):
        raise AnnotationError(f"q holds {q.dtype}, wants i8{' or i16' if bits == 8 else ''}")
    wants_float(weight_scale, "weight_scale")
    if q.ndim is not None and q.ndim < 2:
        raise AnnotationError(f"q has rank {q.ndim}, wants at least 2: [..., planes, in]")
    if q.shape is None or scale.shape is None or total.shape is None or panels.shape is None or weight_scale.shape is None:
        return TensorType(None, dtype, None if q.ndim is None else q.ndim - 1)
    *row, planes, length = q.shape
    groups = scale.shape[-1]
    columns = panels.shape[2] // FOUR
    if not planes.is_const or planes.const not in ((1,) if words else (1, 2)):
        raise AnnotationError(f"q has {planes} planes, wants 1{'' if words else ' or 2'}")
    same_shape((*row, groups), scale, "scale")
    same_shape((*row, planes, groups), total, "total")
    same_shape((ceil_div(Dim.of(size), columns), length * bits // (8 * FOUR), columns * FOUR), panels, "panels")
    same_shape((panels.shape[0], groups, columns), weight_scale, "weight_scale")
    if len(args) > 5:
        same_shape((Dim.of(size),), tensor_operand(args, 5, "bias", ndim=1), "bias")
    return TensorType((*row, Dim.of(size)), dtype)


def same_shape(wanted: tuple[Dim, ...], given: TensorType, name: str) -> None:
    for d, (w, g) in enumerate(zip(wanted, given.shape or wanted, strict=True)):
        agree(w, g, f"dimension {d} of {name}")


def _linear_nest(operands: Operands) -> Nest:
    kernel, bits = Kernel(), operands.attrs["bits"]
    out, q, scale, sums, panels, weight_scale = kernel.arrays(output(operands), *(operands.buffer(i) for i in range(5)))
    bias = kernel.array(operands.buffer(5)) if operands.has(5) else None
    length, groups, columns = q.shape[-1], scale.shape[-1], weight_scale.shape[-1].const
    group = length if groups == Dim.of(1) else length // groups

    def dot(row: list[Dim], n: Dim, g: Dim, plane: int) -> Scalar:
        def product(r: Dim) -> Scalar:
            k = g * group + r
            return cast(q[*row, plane, k], I32) * panel_element(panels.buffer, bits, n, k, q.dtype is I16)

        return cast(total((group,), product) + sums[*row, plane, g] * -MIDDLE[bits], F32)

    def term(row: list[Dim], n: Dim, g: Dim) -> Scalar:
        dots = [dot(row, n, g, plane) for plane in range(q.shape[-2].const)]
        exact = dots[0] if len(dots) == 1 else fma(dots[0], const(256.0, F32), dots[1])
        return exact * (scale[*row, g] * cast(weight_scale[n // columns, g, n % columns], F32))

    with kernel.nest(out.shape) as (*row, n):
        result: Scalar = total((groups,), lambda g: term(row, n, g))
        out[*row, n] = cast(result if bias is None else result + cast(bias[n], F32), out.dtype)
    rows, planes, size = q.shape[:-2], q.shape[-2], out.shape[-1]
    wanted = {1: (*rows, groups), 2: (*rows, planes, groups), 4: (panels.shape[0], groups, Dim.of(columns))}
    wanted[3] = (ceil_div(size, columns), length * bits // (8 * FOUR), Dim.of(columns * FOUR))
    checks = unproved(operands, wanted | ({} if bias is None else {5: (size,)}))
    return Nest((out.buffer,), kernel.body(), checks=checks)


def _linear_numpy(
    q: Any, scale: Any, total: Any, panels: Any, weight_scale: Any, bias: Any = None, *, bits: int, size: int, dtype: str
) -> Any:
    *row, planes, length = q.shape
    groups = scale.shape[-1]
    w = stored_weights(panels, bits, q.dtype == np.int16).astype(np.float64).reshape(-1, groups, length // groups)
    num_rows = int(np.prod(row))
    v = q.astype(np.float64).reshape(num_rows, planes, groups, length // groups)
    # Sums of these integers are exact in f64; MIDDLE is subtracted as the machine does it.
    sums = np.einsum("mpgk,ngk->pgmn", v, w, optimize=True).astype(np.int64)
    sums -= MIDDLE[bits] * total.reshape(num_rows, planes, groups).transpose(1, 2, 0)[..., None].astype(np.int64)
    wide = sums.astype(np.float32)
    exact = wide[0] if planes == 1 else (wide[0].astype(np.float64) * 256 + wide[1]).astype(np.float32)
    row_scale, column_scale = scale.reshape(num_rows, groups), weight_scale.astype(np.float32).transpose(1, 0, 2).reshape(groups, -1)
    y = np.zeros(exact.shape[1:], np.float32)
    for g in range(groups):
        y += exact[g] * (row_scale[:, g, None] * column_scale[g])
    y = y[:, :size] if bias is None else y[:, :size] + bias.astype(np.float32)
    return y.reshape(*row, size).astype(DType(dtype).numpy)


def stored_weights(panels: Any, bits: int, words: bool) -> Any:
    """The weights [columns, k] as they are stored, with MIDDLE added."""
    count, deep, wide = panels.shape
    halves = [panels] if bits == 8 else [panels & 15, panels >> 4]
    fours = np.stack([h.reshape(count, deep, wide // FOUR, FOUR) for h in halves], 2)  # [panels, deep, half, columns, four]
    fours = fours[..., WORDS_ORDER] if words else fours
    return fours.transpose(0, 3, 1, 2, 4).reshape(count * wide // FOUR, -1)


INTEGER_LINEAR = define(
    "integer_linear",
    "q, scale, total, panels, weight_scale, bias?",
    _linear_type,
    _linear_numpy,
    _linear_nest,
    {"bits": 8, "size": REQUIRED, "dtype": "f32"},
)
