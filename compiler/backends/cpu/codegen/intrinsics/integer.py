"""Sums of products of integers, signed by unsigned bytes, exact: `dot_panel`.

operands  c[rows * columns]            local accumulators of i32, row-major
          a                            rows of i8, or of i16 beside 8 bits, `stride` apart
          b                            a panel of u8, as ops/integer.py lays it out
dims      k, stride                    k is a multiple of what the bytes of one column hold: 4, or 8 of 4 bits
attrs     rows, columns, bits, words   columns is a multiple of the lanes of a register (16, 8 or 4); bits of an element of b, 8 or 4; words
                                       is 1 where rows are of i16

c[i, j] += sum over k of a[i, k] * b[k, j], modulo 2^32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics import avx2, avx512, neon
from compiler.backends.cpu.codegen.intrinsics.prefetch import AHEAD, ask_lines
from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.backends.cpu.codegen.intrinsics.steps import Parts, Step
from compiler.llvm.ssa import Code, splat, vec
from compiler.machine.target import Target
from compiler.ops.integer import FOUR, WORDS_ORDER

UNROLLED = 4  # loads of each register of b between two tests for the end
FEW = 4  # accumulators: so few wait for their own additions, so each half of the bytes gets its own


def multiplies_words(target: Target) -> bool:
    """Rows of i16 by bytes."""
    return target.has("avx2")


def _step(target: Target, bits: int) -> Step | None:
    """What multiplies bytes by numbers of so many bits."""
    wide = target.vector_bits >= 512
    if target.has("avx512vnni") and wide:
        step = avx512.SIGNED_BY_UNSIGNED
    elif target.has("avxvnni"):
        step = avx2.SIGNED_BY_UNSIGNED
    elif target.has("i8mm"):
        step = neon.SIGNED_BY_UNSIGNED
    elif target.has("dotprod"):
        step = neon.SIGNED_BY_SIGNED
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
    words = avx512.WORDS_BY_UNSIGNED if target.vector_bits >= 512 else avx2.WORDS_BY_UNSIGNED
    step = words if operands.attrs.get("words") else _step(target, int(operands.attrs["bits"]))
    assert step is not None, (target, operands.attrs)
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
        self.words = 2 if operands.attrs.get("words") else 1  # of 32 bits, that four neighbours of a row fill
        self.apart = self.halves == 2 and self.rows * len(self.vectors) <= FEW and step.bits == 8 and not step.signed
        self.moved = step.signed and self.bits == 8  # the bytes of the panel are taken as so much less: what a row adds up to is missing

    def run(self) -> None:
        code, step = self.code, self.step
        places = [(i, j) for i in range(self.rows) for j in self.vectors]
        totals = {(*place, part): code.alloca(self.vector) for place in places for part in range(2 if self.apart else 1)}
        for (i, j, part), total in totals.items():
            begin = "zeroinitializer" if part else self._load(self._accumulator(i, j))
            code.do(f"store {self.vector} {begin}, ptr {total}")
        element = "i16" if self.words == 2 else "i8"
        added = [code.alloca(self.vector) for _ in range(self.rows if self.moved else 0)]
        for place in added:
            code.do(f"store {self.vector} zeroinitializer, ptr {place}")
        rows = [code.op(f"getelementptr {element}, ptr {self.a}, i64 {self._times(self.stride, i)}") for i in range(self.rows)]
        deep, unrolled = self._steps()
        with code.loop("0", deep, runs=not deep.startswith("%")) as index:
            gathered: dict[str, str] = {}
            for u in range(unrolled):
                self._deep(totals, gathered, added, rows, code.op(f"add nuw nsw i64 {self._times(index, unrolled)}, {u}"))
            for total, some in gathered.items():
                assert step.halves is not None and unrolled * self.halves <= step.halves.most
                code.do(f"store {self.vector} {step.halves.widen(code, self._load(total), some)}, ptr {total}, align 4")
        for i, j in places:
            value = self._load(totals[i, j, 0])
            if self.apart:
                upper = code.op(f"ashr {self.vector} {self._load(totals[i, j, 1])}, {splat('4', 'i32', step.lanes)}")
                value = code.op(f"add {self.vector} {value}, {upper}")
            if added:
                missing = code.op(f"shl {self.vector} {self._load(added[i])}, {splat('7', 'i32', step.lanes)}")
                value = code.op(f"add {self.vector} {value}, {missing}")
            code.do(f"store {self.vector} {value}, ptr {self._accumulator(i, j)}, align 4")

    def _steps(self) -> tuple[str, int]:
        """How often the loop runs, and how many loads it makes of a register each time."""
        if not isinstance(self.k, int):
            return self.code.op(f"sdiv i64 {self.k}, {FOUR * self.halves}"), 1
        deep = self.k // (FOUR * self.halves)
        unrolled = next(u for u in (UNROLLED, 2, 1) if deep % u == 0)
        return str(deep // unrolled), unrolled

    def _deep(self, totals: dict[tuple[int, int, int], str], gathered: dict[str, str], added: list[str], rows: list[str], at: str) -> None:
        """The products of one load of each register; `gathered` are those of a total that are not added to it yet, `added` the rows'
        own sums where these are wanted."""
        code, step = self.code, self.step
        panel = code.op(f"getelementptr [{self.columns} x i32], ptr {self.b}, i64 {at}")
        loaded = [self._load(code.op(f"getelementptr i32, ptr {panel}, i64 {j * step.lanes}")) for j in self.vectors]
        if self.rows > 1:  # one waits for memory, whoever asks
            ask_lines(code, panel, AHEAD, self.columns * FOUR, far=True)
        for half in range(self.halves):
            right = [step.right(code, self._half(x, half)) for x in loaded]
            for i, row in enumerate(rows):
                left = self._left(
                    code.op(f"getelementptr [{self.halves * self.words} x i32], ptr {row}, i64 {at}, i64 {half * self.words}")
                )
                if added:
                    ones = step.right(code, splat(str(0x01010101), "i32", step.lanes))
                    self._add(added[i], gathered, left, ones)
                for j in self.vectors:
                    self._add(totals[i, j, half if self.apart else 0], gathered, left, right[j])

    def _left(self, place: str) -> Parts:
        """Four neighbours of a row."""
        code = self.code
        found = [code.op(f"load i32, ptr {code.op(f'getelementptr i32, ptr {place}, i64 {w}')}, align 1") for w in range(self.words)]
        return tuple(part for x in found for part in self.step.left(code, x))

    def _add(self, total: str, gathered: dict[str, str], left: Parts, right: Parts) -> None:
        code, halves = self.code, self.step.halves
        if halves is None:
            code.do(f"store {self.vector} {self.step.add(code, self._load(total), left, right)}, ptr {total}, align 4")
            return
        product = halves.product(code, left, right)
        gathered[total] = halves.join(code, gathered[total], product) if total in gathered else product

    def _half(self, words: str, half: int) -> str:
        """The lower or the upper four bits of each byte; the upper ones 16 times, where their sums stand apart."""
        lanes = self.step.lanes
        if self.bits == 8:
            return self.code.op(f"xor {self.vector} {words}, {splat(str(0x80808080 - 2**32), 'i32', lanes)}") if self.moved else words
        if half and self.apart:
            return self.code.op(f"and {self.vector} {words}, {splat(str(0xF0F0F0F0 - 2**32), 'i32', lanes)}")
        if half:
            words = self.code.op(f"lshr {self.vector} {words}, {splat('4', 'i32', lanes)}")
        return self.code.op(f"and {self.vector} {words}, {splat(str(0x0F0F0F0F), 'i32', lanes)}")

    def _times(self, a: int | str, b: int) -> str:
        return self.code.op(f"mul nsw i64 {a}, {b}")

    def _accumulator(self, row: int, vector: int) -> str:
        return self.code.op(f"getelementptr i32, ptr {self.c}, i64 {row * self.columns + vector * self.step.lanes}")

    def _load(self, pointer: str) -> str:
        return self.code.op(f"load {self.vector}, ptr {pointer}, align 4")


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    (c, a, b), (k, stride) = arrays, dims
    rows, columns, halves = int(attrs["rows"]), int(attrs["columns"]), 8 // int(attrs["bits"])
    left = np.stack([a[i * stride : i * stride + k] for i in range(rows)]).astype(np.int32)
    stored = b[: k * columns // halves].reshape(-1, 1, columns, FOUR)
    right = stored[..., WORDS_ORDER] if attrs.get("words") else stored if halves == 1 else np.concatenate([stored & 15, stored >> 4], 1)
    c[: rows * columns] += (left @ right.swapaxes(2, 3).reshape(k, columns).astype(np.int32)).reshape(-1)


DOT_PANEL = Intrinsic("i32 tile of products of i8 or i16 and a panel of u8 or 4 bits", _meaning, _runs_on, _emit)
