"""AMX: products of whole tiles, 16 rows by 64 bytes. Operands, layout and dimensions are those of dot.py.

    rows     1 .. 32        columns    16 or 32        k    a multiple of 64 bytes of a's elements
    fresh    an attribute: c is written, not added to
    further  a place that is read later, and after k and stride the number of a line there and of lines: each step asks for so many more

Up to 2 x 2 accumulator tiles (tmm0..3) stay in the unit for the whole of k; tmm4..5 hold rows of a, tmm6..7 columns of b. Rows fewer
than 16 are configured as such, so nothing outside a is read: `amx_configure` tells the unit the height of the tiles that follow, once for
all of them. The process must have asked its kernel for permission to use the unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics.dot import FOURS, PAIRS, matrices
from compiler.backends.cpu.codegen.intrinsics.prefetch import ask, ask_lines
from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.ir.errors import CompileError
from compiler.llvm.ssa import Code, vector_literal
from compiler.machine.target import Target

TILE_ROWS, TILE_BYTES = 16, 64


def _emit(code: Code, operands: Operands, group: int, product: str, *, near: bool = False) -> None:
    """`near`: b lies in the first cache."""
    (c, a, b, *later), (k, stride, *share) = operands.pointers, operands.dims
    rows, columns = int(operands.attrs["rows"]), int(operands.attrs["columns"])
    if not (1 <= rows <= 2 * TILE_ROWS and columns in (TILE_ROWS, 2 * TILE_ROWS)):
        raise CompileError(f"AMX tile of {rows} x {columns}; expected 1 to 32 rows and 16 or 32 columns")
    heights = _heights(rows)
    sides = range(columns // TILE_ROWS)
    size = 4 // group
    row_bytes = 4 * columns

    row_stride = code.op(f"mul nsw i64 {stride}, {size}")
    places = {
        (i, j): code.op(f"getelementptr i8, ptr {c}, i64 {i * TILE_ROWS * row_bytes + j * TILE_BYTES}")
        for i in range(len(heights))
        for j in sides
    }
    for (i, j), place in places.items():
        fresh = operands.attrs.get("fresh")
        code.do(
            f"call void @llvm.x86.tile{'zero' if fresh else 'loadd64'}(i8 {2 * i + j}{'' if fresh else f', ptr {place}, i64 {row_bytes}'})"
        )
    steps = code.op(f"sdiv i64 {k}, {TILE_BYTES // size}")
    with code.loop("0", steps) as step:
        left = code.op(f"getelementptr [{TILE_BYTES} x i8], ptr {a}, i64 {step}")
        right = code.op(f"getelementptr [{TILE_ROWS * row_bytes} x i8], ptr {b}, i64 {step}")
        for j in sides:
            place = code.op(f"getelementptr i8, ptr {right}, i64 {j * TILE_BYTES}")
            code.do(f"call void @llvm.x86.tileloadd64(i8 {6 + j}, ptr {place}, i64 {row_bytes})")
        if later:
            _ask_later(code, later[0], step, *share)
        elif len(heights) == 1 and not near:
            ask_lines(code, right, TILE_ROWS * row_bytes, TILE_ROWS * row_bytes, far=False)  # with so few rows it comes from memory
        for i in range(len(heights)):
            top = code.op(f"mul nsw i64 {row_stride}, {i * TILE_ROWS}")
            place = code.op(f"getelementptr i8, ptr {left}, i64 {top}")
            code.do(f"call void @llvm.x86.tileloadd64(i8 {4 + i}, ptr {place}, i64 {row_stride})")
            for j in sides:
                code.do(f"call void @llvm.x86.{product}(i8 {2 * i + j}, i8 {4 + i}, i8 {6 + j})")
    for (i, j), place in places.items():
        code.do(f"call void @llvm.x86.tilestored64(i8 {2 * i + j}, ptr {place}, i64 {row_bytes})")


def _heights(rows: int) -> list[int]:
    return [min(TILE_ROWS, rows - top) for top in range(0, rows, TILE_ROWS)]


def _ask_later(code: Code, place: str, step: str, first: int | str, lines: int | str) -> None:
    """The first cache is for what these steps read."""
    done = code.op(f"add nsw i64 {first}, {code.op(f'mul nsw i64 {step}, {lines}')}")
    with code.loop("0", str(lines)) as line:
        at = code.op(f"getelementptr [{TILE_BYTES} x i8], ptr {place}, i64 {code.op(f'add nsw i64 {done}, {line}')}")
        ask(code, at, far=True)


def _emit_configuration(code: Code, operands: Operands, target: Target) -> None:
    """Palette 1; bytes per row (u16) from byte 16 on, rows (u8) from byte 48 on.

    The unit is let go when the kernel has done its share: a thread that holds 8 KB of tiles has them saved whenever it loses its core.
    """
    heights = _heights(int(operands.attrs["rows"]))
    config = bytearray(64)
    config[0] = 1
    tiles = {0: heights[0], 1: heights[0], 2: heights[-1], 3: heights[-1], 4: heights[0], 5: heights[-1], 6: TILE_ROWS, 7: TILE_ROWS}
    for tile, height in tiles.items():
        config[16 + 2 * tile], config[48 + tile] = TILE_BYTES, height
    place = code.alloca("<64 x i8>")
    code.do(f"store <64 x i8> {vector_literal('i8', config)}, ptr {place}, align 64")
    code.do(f"call void @llvm.x86.ldtilecfg(ptr {place})")
    code.endings["call void @llvm.x86.tilerelease()"] = None


def _mean_nothing(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    return


def _emit_bf16(code: Code, operands: Operands, target: Target) -> None:
    _emit(code, operands, PAIRS, "tdpbf16ps")


def _emit_bf16_near(code: Code, operands: Operands, target: Target) -> None:
    _emit(code, operands, PAIRS, "tdpbf16ps", near=True)


def _emit_i8(code: Code, operands: Operands, target: Target) -> None:
    """Rows are signed, the panel is not (ops/integer.py)."""
    _emit(code, operands, FOURS, "tdpbsud")


def _emit_i8_near(code: Code, operands: Operands, target: Target) -> None:
    """Both are signed: a panel that `widen_panel` has made."""
    _emit(code, operands, FOURS, "tdpbssd", near=True)


def _given(
    group: int, arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """What is read later means nothing."""
    c, a, b = matrices(group, arrays[:3], dims[:2], attrs)
    if attrs.get("fresh"):
        c[...] = 0
    return c, a, b


def _mean_bf16(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    """Within 32 of k the first and the second of each pair are summed apart, each step fused and rounded; then both are added to c.
    Denormals count as zero."""
    c, a, b = _given(PAIRS, arrays, dims, attrs)
    a, b = flushed(a.astype(np.float64)), flushed(b.astype(np.float64))
    for start in range(0, len(b), TILE_ROWS):
        halves = np.zeros((2, *c.shape), np.float32)
        for g in range(start, start + TILE_ROWS):
            for half in range(2):
                halves[half] = flushed(halves[half] + a[:, g, half, None] * b[None, g, :, half])
        c[...] = flushed(flushed(c) + flushed(halves[0] + halves[1]))


def flushed(x: NDArray[Any]) -> NDArray[Any]:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x)


def _mean_i8(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    c, a, b = _given(FOURS, arrays, dims, attrs)
    c += np.einsum("rgi,gci->rc", a.astype(np.int32), b.astype(np.int32))


def _runs_on_bf16(target: Target) -> bool:
    return target.has("amx-bf16")


def _runs_on_i8(target: Target) -> bool:
    return target.has("amx-int8")


AMX_BF16 = Intrinsic("f32 tile of bf16 products on the matrix unit", _mean_bf16, _runs_on_bf16, _emit_bf16)
AMX_BF16_NEAR = Intrinsic("f32 tile of bf16 products, where the panel was just made", _mean_bf16, _runs_on_bf16, _emit_bf16_near)
AMX_I8 = Intrinsic("i32 tile of products of i8 and a panel of u8 on the matrix unit", _mean_i8, _runs_on_i8, _emit_i8)
AMX_I8_NEAR = Intrinsic("i32 tile of products of i8 and a panel of i8 that was just made", _mean_i8, _runs_on_i8, _emit_i8_near)
AMX_CONFIGURE = Intrinsic("the height of the tiles that follow", _mean_nothing, lambda target: target.has("amx-tile"), _emit_configuration)
