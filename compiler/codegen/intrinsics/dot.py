"""Matrix tiles whose products are summed in groups: `dot_bf16` over pairs into f32, `dot_i8` over fours into i32.

    operands  c[rows * columns]            local accumulators, row-major
              a                            rows of the left matrix, `stride` elements apart
              b[k / g, columns, g]         a packed panel of the right matrix: g neighbours along k stand together
    dims      k, stride                    k is a multiple of g (2 for bf16, 4 for i8)
    attrs     rows, columns                columns is a multiple of the lanes of a register (16, 8 or 4)

    c[i, j] += sum over k of a[i, k] * b[k, j]

The accumulators stay in registers for the whole of k, and every c[i, j] is summed in the order of k whatever `rows` and `columns`
are. Sums of i8 are exact (modulo 2^32). In a pair of bf16 the second product comes first, each fused with its addition and rounded;
an instruction may take denormals for zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.codegen.intrinsics import avx2, avx512, neon, portable
from compiler.codegen.intrinsics.registry import Intrinsic, Meaning, Operands
from compiler.codegen.intrinsics.steps import Step
from compiler.codegen.ssa import Code, vec
from compiler.target import Target

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A group of `group` elements fills 32 bits; so does an accumulator."""

    group: int
    accumulator: str


BF16, I8 = Kind(2, "float"), Kind(4, "i32")


def _step(kind: Kind, target: Target) -> Step:
    if kind is BF16:
        return avx512.BF16_PAIRS if target.has("avx512bf16") else portable.bf16_pairs(target.lanes(4))
    if target.has("avx512vnni"):
        return avx512.I8_FOURS
    if target.has("avxvnni"):
        return avx2.I8_FOURS_VNNI
    if target.has("avx512bw"):
        return avx512.I8_FOURS_BY_PAIRS
    if target.has("avx2"):
        return avx2.I8_FOURS_BY_PAIRS
    if target.has("dotprod"):
        return neon.I8_FOURS
    return portable.i8_fours(target.lanes(4))


def _emit(kind: Kind) -> Any:
    def emit(code: Code, operands: Operands, target: Target) -> None:
        _Tile(code, operands, kind, _step(kind, target)).run()

    return emit


class _Tile:
    def __init__(self, code: Code, operands: Operands, kind: Kind, step: Step) -> None:
        self.code, self.kind, self.step = code, kind, step
        self.c, self.a, self.b = operands.pointers
        self.k, self.stride = operands.dims
        self.rows, self.columns = int(operands.attrs["rows"]), int(operands.attrs["columns"])
        assert self.columns % step.lanes == 0, (self.columns, step.lanes)
        self.vector = vec(kind.accumulator, step.lanes)
        self.vectors = range(self.columns // step.lanes)

    def run(self) -> None:
        code, step = self.code, self.step
        totals = {(i, j): code.alloca(self.vector) for i in range(self.rows) for j in self.vectors}
        for (i, j), total in totals.items():
            code.do(f"store {self.vector} {self._load(self._at(self.c, i * self.columns + j * step.lanes))}, ptr {total}")
        # What a step adds too much depends on the column alone.
        excess = {j: code.alloca(self.vector) for j in self.vectors} if step.excess else {}
        for total in excess.values():
            code.do(f"store {self.vector} zeroinitializer, ptr {total}")
        size = 4 // self.kind.group
        rows = [code.op(f"getelementptr i8, ptr {self.a}, i64 {self._row_offset(i, size)}") for i in range(self.rows)]
        groups = code.op(f"sdiv i64 {self.k}, {self.kind.group}")
        with code.loop("0", groups) as g:
            panel = code.op(f"getelementptr [{self.columns} x i32], ptr {self.b}, i64 {g}")
            loaded = [code.op(f"load {vec('i32', step.lanes)}, ptr {self._at(panel, j * step.lanes)}, align 4") for j in self.vectors]
            right = [step.right(code, x) for x in loaded]
            for j, total in excess.items():
                self._add(total, lambda old, j=j: step.excess(code, old, right[j]) if step.excess else old)
            for i, row in enumerate(rows):
                one = code.op(f"load i32, ptr {code.op(f'getelementptr i32, ptr {row}, i64 {g}')}, align {size}")
                left = step.left(code, one)
                for j in self.vectors:
                    self._add(totals[i, j], lambda old, j=j, left=left: step.add(code, old, left, right[j]))
        for (i, j), total in totals.items():
            value = self._load(total)
            if excess:
                value = code.op(f"sub {self.vector} {value}, {self._load(excess[j])}")
            code.do(f"store {self.vector} {value}, ptr {self._at(self.c, i * self.columns + j * step.lanes)}, align 4")

    def _row_offset(self, row: int, size: int) -> str:
        return self.code.op(f"mul nsw i64 {self.stride}, {row * size}")

    def _at(self, base: str, offset: int) -> str:
        return self.code.op(f"getelementptr i32, ptr {base}, i64 {offset}")

    def _load(self, pointer: str) -> str:
        return self.code.op(f"load {self.vector}, ptr {pointer}, align 4")

    def _add(self, total: str, update: Any) -> None:
        self.code.do(f"store {self.vector} {update(self._load(total))}, ptr {total}, align 4")


# --- meaning -----------------------------------------------------------------------------------------------------------


def matrices(kind: Kind, arrays: tuple[Array, ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Views: c [rows, columns], a [rows, k / g, g], b [k / g, columns, g]."""
    (c, a, b), (k, stride), g = arrays, dims, kind.group
    rows, columns = int(attrs["rows"]), int(attrs["columns"])
    left = np.stack([a[i * stride : i * stride + k] for i in range(rows)])
    return c[: rows * columns].reshape(rows, columns), left.reshape(rows, k // g, g), b[: k * columns].reshape(k // g, columns, g)


def _mean_bf16(arrays: tuple[Array, ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    c, a, b = matrices(BF16, arrays, dims, attrs)
    a, b = a.astype(np.float64), b.astype(np.float64)
    for g in range(a.shape[1]):
        for half in (1, 0):
            # The product of two bf16 is exact in f64, and so is the rounding of its sum with an f32 but for ties of 2^-29.
            c[...] = (c + a[:, g, half, None] * b[None, g, :, half]).astype(np.float32)


def mean_i8(arrays: tuple[Array, ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    c, a, b = matrices(I8, arrays, dims, attrs)
    c += np.einsum("rgi,gci->rc", a.astype(np.int32), b.astype(np.int32))


def _intrinsic(kind: Kind, meaning: Meaning, what: str) -> Intrinsic:
    return Intrinsic(f"{what}: see compiler/codegen/intrinsics/dot.py", meaning, lambda target: True, _emit(kind))


DOT_BF16 = _intrinsic(BF16, _mean_bf16, "f32 tile of bf16 products")
DOT_I8 = _intrinsic(I8, mean_i8, "i32 tile of i8 products")
