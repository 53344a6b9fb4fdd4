"""Sums of products of bytes, signed by unsigned, exact: `dot_panel`.

operands  c[rows * columns]            local accumulators of i32, row-major
          a                            rows of i8, `stride` apart
          b                            a panel of u8, as ops/integer.py lays it out
dims      k, stride                    k is a multiple of what the bytes of one column hold: 4, or 8 of 4 bits
attrs     rows, columns, bits          columns is a multiple of the lanes of a register (16, 8 or 4); bits of an element of b, 8 or 4

c[i, j] += sum over k of a[i, k] * b[k, j], modulo 2^32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.codegen.intrinsics import avx2, avx512, neon
from compiler.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.codegen.intrinsics.steps import Step
from compiler.codegen.ssa import Code, splat, vec
from compiler.target import Target

FOUR = 4
UNROLLED = 4  # loads of each register of b between two tests for the end
FEW = 4  # accumulators: so few wait for their own additions, so each half of the bytes gets its own


def _step(target: Target, bits: int) -> Step | None:
    """What multiplies by numbers of so many bits."""
    wide = target.vector_bits >= 512
    if target.has("avx512vnni") and wide:
        step = avx512.SIGNED_BY_UNSIGNED
    elif target.has("avxvnni"):
        step = avx2.SIGNED_BY_UNSIGNED
    elif target.has("i8mm"):
        step = neon.SIGNED_BY_UNSIGNED
    elif target.has("avx2"):
        step = avx512.SIGNED_BY_SMALL if wide else avx2.SIGNED_BY_SMALL
    else:
        return None
    return step if bits <= step.bits else None


def panel_bits(target: Target) -> tuple[int, ...]:
    """Of the weights that the target multiplies several at a time."""
    return tuple(bits for bits in (8, 4) if _step(target, bits) is not None)


def _runs_on(target: Target) -> bool:
    return bool(panel_bits(target))


def _emit(code: Code, operands: Operands, target: Target) -> None:
    step = _step(target, int(operands.attrs["bits"]))
    assert step is not None
    _Panel(code, operands, step).run()


class _Panel:
    def __init__(self, code: Code, operands: Operands, step: Step) -> None:
        self.code, self.step = code, step
        self.c, self.a, self.b = operands.pointers
        self.k, self.stride = operands.dims
        self.rows, self.columns, self.bits = (int(operands.attrs[name]) for name in ("rows", "columns", "bits"))
        assert self.columns % step.lanes == 0, (self.columns, step.lanes)
        self.vector = vec("i32", step.lanes)
        self.vectors = range(self.columns // step.lanes)
        self.halves = 8 // self.bits
        self.apart = self.halves == 2 and self.rows * len(self.vectors) <= FEW and step.bits == 8

    def run(self) -> None:
        code, step = self.code, self.step
        places = [(i, j) for i in range(self.rows) for j in self.vectors]
        totals = {(*place, part): code.alloca(self.vector) for place in places for part in range(2 if self.apart else 1)}
        for (i, j, part), total in totals.items():
            begin = "zeroinitializer" if part else self._load(self._accumulator(i, j))
            code.do(f"store {self.vector} {begin}, ptr {total}")
        rows = [code.op(f"getelementptr i8, ptr {self.a}, i64 {code.op(f'mul nsw i64 {self.stride}, {i}')}") for i in range(self.rows)]
        deep, unrolled = self._steps()
        with code.loop("0", deep, runs=not deep.startswith("%")) as index:
            for u in range(unrolled):
                at = code.op(f"add nuw nsw i64 {code.op(f'mul nuw nsw i64 {index}, {unrolled}')}, {u}")
                self._deep(totals, rows, at)
        for i, j in places:
            value = self._load(totals[i, j, 0])
            if self.apart:
                upper = code.op(f"ashr {self.vector} {self._load(totals[i, j, 1])}, {splat('4', 'i32', step.lanes)}")
                value = code.op(f"add {self.vector} {value}, {upper}")
            code.do(f"store {self.vector} {value}, ptr {self._accumulator(i, j)}, align 4")

    def _steps(self) -> tuple[str, int]:
        """How often the loop runs, and how many loads it makes of a register each time."""
        if not isinstance(self.k, int):
            return self.code.op(f"sdiv i64 {self.k}, {FOUR * self.halves}"), 1
        deep = self.k // (FOUR * self.halves)
        unrolled = next(u for u in (UNROLLED, 2, 1) if deep % u == 0)
        return str(deep // unrolled), unrolled

    def _deep(self, totals: dict[tuple[int, int, int], str], rows: list[str], at: str) -> None:
        code, step = self.code, self.step
        panel = code.op(f"getelementptr [{self.columns} x i32], ptr {self.b}, i64 {at}")
        loaded = [self._load(code.op(f"getelementptr i32, ptr {panel}, i64 {j * step.lanes}")) for j in self.vectors]
        for half in range(self.halves):
            right = [step.right(code, self._half(x, half)) for x in loaded]
            for i, row in enumerate(rows):
                place = code.op(f"getelementptr [{self.halves} x i32], ptr {row}, i64 {at}, i64 {half}")
                left = step.left(code, code.op(f"load i32, ptr {place}, align 1"))
                for j in self.vectors:
                    total = totals[i, j, half if self.apart else 0]
                    code.do(f"store {self.vector} {step.add(code, self._load(total), left, right[j])}, ptr {total}, align 4")

    def _half(self, words: str, half: int) -> str:
        """The lower or the upper four bits of each byte; the upper ones 16 times, where their sums stand apart."""
        if self.bits == 8:
            return words
        lanes = self.step.lanes
        if half and self.apart:
            return self.code.op(f"and {self.vector} {words}, {splat(str(0xF0F0F0F0 - 2**32), 'i32', lanes)}")
        if half:
            words = self.code.op(f"lshr {self.vector} {words}, {splat('4', 'i32', lanes)}")
        return self.code.op(f"and {self.vector} {words}, {splat(str(0x0F0F0F0F), 'i32', lanes)}")

    def _accumulator(self, row: int, vector: int) -> str:
        return self.code.op(f"getelementptr i32, ptr {self.c}, i64 {row * self.columns + vector * self.step.lanes}")

    def _load(self, pointer: str) -> str:
        return self.code.op(f"load {self.vector}, ptr {pointer}, align 4")


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    (c, a, b), (k, stride) = arrays, dims
    rows, columns, halves = int(attrs["rows"]), int(attrs["columns"]), 8 // int(attrs["bits"])
    left = np.stack([a[i * stride : i * stride + k] for i in range(rows)]).astype(np.int32)
    stored = b[: k * columns // halves].reshape(-1, 1, columns, FOUR)
    right = stored if halves == 1 else np.concatenate([stored & 15, stored >> 4], 1)
    c[: rows * columns] += (left @ right.swapaxes(2, 3).reshape(k, columns).astype(np.int32)).reshape(-1)


DOT_PANEL = Intrinsic("i32 tile of products of i8 and a panel of u8 or 4 bits", _meaning, _runs_on, _emit)
