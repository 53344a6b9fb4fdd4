"""What matrix units of bf16 want of operands that are not weights: rows interleaved in pairs, and numbers of f32 as two of bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.codegen.intrinsics.amx import flushed
from compiler.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.codegen.ssa import Code, broadcast, vec, vector_literal
from compiler.ir.dtypes import DType
from compiler.target import Target

PAIRS, LANES = 8, 16
BF16 = DType.BF16.numpy


def _runs_on(target: Target) -> bool:
    return target.has("amx-bf16", "avx512bf16")


# --- pairs -------------------------------------------------------------------------------------------------------------


def _mean_pairs(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    (out, source), (out_stride, stride, *seen) = arrays, dims
    low, high = seen or (0, 2 * PAIRS)
    columns = int(attrs["columns"])
    for row in range(2 * PAIRS):
        at = row // 2 * out_stride + row % 2
        out[at : at + 2 * columns : 2] = source[row * stride : row * stride + columns] if low <= row < high else 0


def _emit_pairs(code: Code, operands: Operands, target: Target) -> None:
    (out, source), (out_stride, stride, *seen) = operands.pointers, operands.dims
    columns = int(operands.attrs["columns"])
    row, both, words = vec("i16", columns), vec("i16", 2 * columns), vec("i32", columns)
    order = vector_literal("i32", (half * columns + c for c in range(columns) for half in range(2)))
    masks = _masks(code, *seen) if seen else None

    def at(base: str, number: int, row_stride: int | str) -> str:
        return code.op(f"getelementptr i16, ptr {base}, i64 {code.op(f'mul nsw i64 {row_stride}, {number}')}")

    def interleaved(pair: int) -> str:
        """Rows that touch are one vector, and one permutation of it."""
        if stride == columns:
            given = code.op(f"load {both}, ptr {at(source, 2 * pair, stride)}, align 2")
            return code.op(f"shufflevector {both} {given}, {both} poison, <{2 * columns} x i32> {order}")
        rows = [code.op(f"load {row}, ptr {at(source, 2 * pair + half, stride)}, align 2") for half in range(2)]
        return code.op(f"shufflevector {row} {rows[0]}, {row} {rows[1]}, <{2 * columns} x i32> {order}")

    for pair in range(PAIRS):
        value = interleaved(pair)
        if masks is not None:
            mask = broadcast(code, code.op(f"extractelement {vec('i32', PAIRS)} {masks}, i64 {pair}"), "i32", columns)
            value = code.op(f"and {both} {value}, {code.op(f'bitcast {words} {mask} to {both}')}")
        code.do(f"store {both} {value}, ptr {at(out, pair, out_stride)}, align 2")


def _masks(code: Code, low: int | str, high: int | str) -> str:
    """For each pair the bits of its rows that are seen."""
    kind, numbers = vec("i16", 2 * PAIRS), vector_literal("i16", range(2 * PAIRS))

    def compared(how: str, limit: int | str) -> str:
        most = code.op(f"call i64 @llvm.smin.i64(i64 {limit}, i64 {2 * PAIRS})")
        within = code.op(f"call i64 @llvm.smax.i64(i64 {most}, i64 0)")
        every = broadcast(code, code.op(f"trunc i64 {within} to i16"), "i16", 2 * PAIRS)
        return code.op(f"icmp {how} {kind} {numbers}, {every}")

    flags = vec("i1", 2 * PAIRS)
    inside = code.op(f"and {flags} {compared('sge', low)}, {compared('slt', high)}")
    return code.op(f"bitcast {kind} {code.op(f'sext {flags} {inside} to {kind}')} to {vec('i32', PAIRS)}")


AMX_PAIRS = Intrinsic(
    f"amx_pairs(out, source) dims(out stride, stride, low?, high?): {2 * PAIRS} rows of `columns` bf16, two and two interleaved element by "
    f"element. Rows outside low .. high - 1 become zero, whatever they hold",
    _mean_pairs,
    _runs_on,
    _emit_pairs,
)


# --- planes ------------------------------------------------------------------------------------------------------------


def _mean_planes(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    high, low, x = arrays
    given = x[:LANES].copy()
    high[:LANES] = flushed(given).astype(BF16)
    low[:LANES] = flushed(given - high[:LANES].astype(np.float32)).astype(BF16)


def _emit_planes(code: Code, operands: Operands, target: Target) -> None:
    high, low, x = operands.pointers
    numbers, words = vec("float", LANES), vec("i32", LANES)
    given = code.op(f"load {numbers}, ptr {x}, align 4")
    wide = code.op(f"zext {vec('i16', LANES)} {_rounded(code, given, high)} to {words}")
    bits = code.op(f"shl {words} {wide}, splat (i32 16)")
    rest = code.op(f"fsub {numbers} {given}, {code.op(f'bitcast {words} {bits} to {numbers}')}")
    _rounded(code, rest, low)


def _rounded(code: Code, given: str, place: str) -> str:
    short, bits = vec("bfloat", LANES), vec("i16", LANES)
    found = code.op(f"call {short} @llvm.x86.avx512bf16.cvtneps2bf16.512({vec('float', LANES)} {given})")
    raw = code.op(f"bitcast {short} {found} to {bits}")
    code.do(f"store {bits} {raw}, ptr {place}, align 2")
    return raw


AMX_PLANES = Intrinsic(
    f"amx_planes(high, low, x): {LANES} f32 as sums of two bf16, to within 2^-17 of each; denormals count as zero",
    _mean_planes,
    _runs_on,
    _emit_planes,
)
