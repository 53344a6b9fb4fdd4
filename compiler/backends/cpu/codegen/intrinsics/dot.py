"""Matrix tiles whose products are summed in pairs, into f32: `dot_bf16`, and `dot_rows` for a right matrix that is not packed.

    operands  c[rows * columns]            local accumulators, row-major
              a                            rows of the left matrix, `stride` elements apart
              b[k / 2, columns, 2]         a packed panel of the right matrix: two neighbours along k stand together
    dims      k, stride                    k is even
    attrs     rows, columns                columns is a multiple of the lanes of a register (16, 8 or 4)

    c[i, j] += sum over k of a[i, k] * b[k, j]

The accumulators stay in registers for the whole of k, and every c[i, j] is summed in the order of k whatever `rows` and `columns`
are. In a pair the second product comes first, each fused with its addition and rounded; an instruction may take denormals for zero.

`dot_rows` does so for one pair: its operands are c, a, and the two rows of b where they lie, or the first alone where the second follows
it; its one dimension is the stride of a. The pair is interleaved as it is loaded, for all rows of a.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics import avx512, portable
from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.backends.cpu.codegen.intrinsics.steps import Step
from compiler.llvm.ssa import Code, vec, vector_literal
from compiler.machine.target import Target

Array = NDArray[Any]


PAIRS, FOURS = 2, 4  # neighbours along k that fill the 32 bits of an accumulator: of bf16, of bytes


def _step(target: Target) -> Step:
    return avx512.BF16_PAIRS if target.has("avx512bf16") else portable.bf16_pairs(target.lanes(4))


def _emit(code: Code, operands: Operands, target: Target) -> None:
    _Tile(code, operands, _step(target)).run()


class _Tile:
    def __init__(self, code: Code, operands: Operands, step: Step) -> None:
        self.code, self.step = code, step
        self.c, self.a, self.b = operands.pointers
        self.k, self.stride = operands.dims
        self.rows, self.columns = int(operands.attrs["rows"]), int(operands.attrs["columns"])
        assert self.columns % step.lanes == 0, (self.columns, step.lanes)
        self.vector = vec("float", step.lanes)
        self.vectors = range(self.columns // step.lanes)

    def run(self) -> None:
        code, step = self.code, self.step
        totals = {(i, j): code.alloca(self.vector) for i in range(self.rows) for j in self.vectors}
        for (i, j), total in totals.items():
            code.do(f"store {self.vector} {self._load(self._at(self.c, i * self.columns + j * step.lanes))}, ptr {total}")
        rows = [code.op(f"getelementptr bfloat, ptr {self.a}, i64 {self._row_offset(i)}") for i in range(self.rows)]
        groups = code.op(f"sdiv i64 {self.k}, {PAIRS}")
        with code.loop("0", groups) as g:
            panel = code.op(f"getelementptr [{self.columns} x i32], ptr {self.b}, i64 {g}")
            loaded = [code.op(f"load {vec('i32', step.lanes)}, ptr {self._at(panel, j * step.lanes)}, align 4") for j in self.vectors]
            right = [step.right(code, x) for x in loaded]
            for i, row in enumerate(rows):
                one = code.op(f"load i32, ptr {code.op(f'getelementptr i32, ptr {row}, i64 {g}')}, align 2")
                left = step.left(code, one)
                for j in self.vectors:
                    self._add(totals[i, j], lambda old, j=j, left=left: step.add(code, old, left, right[j]))
        for (i, j), total in totals.items():
            code.do(f"store {self.vector} {self._load(total)}, ptr {self._at(self.c, i * self.columns + j * step.lanes)}, align 4")

    def _row_offset(self, row: int) -> str:
        return self.code.op(f"mul nsw i64 {self.stride}, {row}")

    def _at(self, base: str, offset: int) -> str:
        return self.code.op(f"getelementptr i32, ptr {base}, i64 {offset}")

    def _load(self, pointer: str) -> str:
        return self.code.op(f"load {self.vector}, ptr {pointer}, align 4")

    def _add(self, total: str, update: Callable[[str], str]) -> None:
        self.code.do(f"store {self.vector} {update(self._load(total))}, ptr {total}, align 4")


# --- rows --------------------------------------------------------------------------------------------------------------


def _emit_rows(code: Code, operands: Operands, target: Target) -> None:
    step, (c, a, *lines), (stride,) = _step(target), operands.pointers, operands.dims
    rows, columns = int(operands.attrs["rows"]), int(operands.attrs["columns"])
    vector = vec("float", step.lanes)
    right = [step.right(code, x) for x in _interleaved(code, lines, columns, step.lanes)]
    for i in range(rows):
        place = code.op(f"getelementptr i16, ptr {a}, i64 {code.op(f'mul nsw i64 {stride}, {i}')}")
        left = step.left(code, code.op(f"load i32, ptr {place}, align 2"))
        for j, pairs in enumerate(right):
            total = code.op(f"getelementptr i32, ptr {c}, i64 {i * columns + j * step.lanes}")
            sums = step.add(code, code.op(f"load {vector}, ptr {total}, align 4"), left, pairs)
            code.do(f"store {vector} {sums}, ptr {total}, align 4")


def _interleaved(code: Code, rows: list[str], columns: int, lanes: int) -> list[str]:
    """Registers of pairs. A load has as much of a row as a register can hold; rows that touch are loaded as one."""
    if len(rows) == 1:
        both = _some(code, rows[0], 0, PAIRS * columns)
        return [_pairs(code, both, both, start, columns, lanes) for start in range(0, columns, lanes)]
    found: list[str] = []
    for first in range(0, columns, PAIRS * lanes):
        length = min(PAIRS * lanes, columns - first)
        upper, lower = (_some(code, row, first, length) for row in rows)
        found += [_pairs(code, upper, lower, start, length, lanes) for start in range(0, length, lanes)]
    return found


def _some(code: Code, row: str, first: int, length: int) -> str:
    return code.op(f"load {vec('i16', length)}, ptr {code.op(f'getelementptr i16, ptr {row}, i64 {first}')}, align 2")


def _pairs(code: Code, upper: str, lower: str, start: int, length: int, lanes: int) -> str:
    """Of neighbours `length` apart, from `start` on; both in one vector if `upper` is `lower`."""
    kind = vec("i16", PAIRS * length if upper is lower else length)
    order = vector_literal("i32", (half * length + start + lane for lane in range(lanes) for half in range(PAIRS)))
    pairs = code.op(f"shufflevector {kind} {upper}, {kind} {lower}, {vec('i32', PAIRS * lanes)} {order}")
    return code.op(f"bitcast {vec('i16', PAIRS * lanes)} {pairs} to {vec('i32', lanes)}")


# --- meaning -----------------------------------------------------------------------------------------------------------


def matrices(g: int, arrays: tuple[Array, ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Views: c [rows, columns], a [rows, k / g, g], b [k / g, columns, g]."""
    (c, a, b), (k, stride) = arrays, dims
    rows, columns = int(attrs["rows"]), int(attrs["columns"])
    left = np.stack([a[i * stride : i * stride + k] for i in range(rows)])
    return c[: rows * columns].reshape(rows, columns), left.reshape(rows, k // g, g), b[: k * columns].reshape(k // g, columns, g)


def _mean_rows(arrays: tuple[Array, ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    (c, a, *rows), columns = arrays, int(attrs["columns"])
    upper, lower = rows if len(rows) == PAIRS else (rows[0], rows[0][columns:])
    _mean((c, a, np.stack([upper[:columns], lower[:columns]], -1).reshape(-1)), (PAIRS, *dims), attrs)


def _mean(arrays: tuple[Array, ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    c, a, b = matrices(PAIRS, arrays, dims, attrs)
    a, b = a.astype(np.float64), b.astype(np.float64)
    for g in range(a.shape[1]):
        for half in (1, 0):
            # The product of two bf16 is exact in f64, and so is the rounding of its sum with an f32 but for ties of 2^-29.
            c[...] = (c + a[:, g, half, None] * b[None, g, :, half]).astype(np.float32)


def _runs_on(target: Target) -> bool:
    return True


DOT_BF16 = Intrinsic("f32 tile of bf16 products: see compiler/backends/cpu/codegen/intrinsics/dot.py", _mean, _runs_on, _emit)
DOT_ROWS = Intrinsic("the same for one pair of rows as they lie", _mean_rows, _runs_on, _emit_rows)
