"""Widen 4-bit weights of a panel (compiler/machine/formats.py) to the bytes that a matrix unit multiplies
(compiler/ops/products/widened.py).

A line of 64 bytes holds 128 weights, four in each 16-bit word. A weight q is extracted as 4096 q. The product of 4096 q and the weight's
multiplier m gives the lower byte of a result word: the instruction that multiplies rounds the product to (q * m + 4) >> 3. The product of
4096 q and 256 m gives the upper byte, which is rounded by adding 128. One line becomes two lines of 64 bytes in 15 vector operations, 7 of
which can use only a single execution port.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, splat, vector_literal
from compiler.machine.formats import EIGHTHS, FOUR, PANEL4
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.prefetch import NEAR_AHEAD, prefetch_line
from compiler.machine.target import LINE_BYTES, Target

COLUMNS = 16
STRETCH = 32  # elements along k whose multipliers one load reads
_WORDS = "<32 x i16>"
_SPREAD, NOTHING = "@llvm.x86.avx512.pshuf.b.512", 128  # shuffles bytes within groups of 16; index 128 gives the byte 0
_ROUNDED = "@llvm.x86.avx512.pmul.hr.sw.512"  # (a * b + 2^14) >> 15


@tile_op
class WidenPanel(Intrinsic):
    """widen_panel(wide, panel, multipliers, later panel, later multipliers) dims(k): widen k weights of each column of a panel.

    wide[k * columns] i8            the result in local memory, in the order in which the matrix unit reads a panel: [k / 4, columns, 4]
    panel, multipliers              addresses of the first weight, which begins a group, and of its multiplier; k is a multiple of 32
    later panel                     address to prefetch from: one cache line for each cache line that is read from `panel`
    later multipliers               address to prefetch from: one cache line for every 32 elements along k
    """

    name: ClassVar[str] = "widen_panel"
    needs: ClassVar[Features] = Features(["avx512bw"])
    vector_bits: ClassVar[int] = 512
    columns: int  # 16 or 32
    group: int  # elements along k that share a multiplier; a multiple of 32

    @property
    def operands(self) -> tuple[Operand, ...]:
        panels = (Operand("panel", DType.U8), Operand("multipliers", DType.I8))
        later = (Operand("later panel", DType.U8), Operand("later multipliers", DType.I8))
        return Operand("wide", DType.I8, written=True), *panels, *later

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k",)

    def problems(self) -> Iterator[str]:
        if self.columns % COLUMNS or self.group % STRETCH:
            yield f"columns are {self.columns} and a group is {self.group}, expected multiples of {COLUMNS} and {STRETCH}"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (wide, panel, multipliers, *_), (k,), columns = arrays, dims, self.columns
        stored = panel[: k * columns // 2].reshape(-1, 1, columns, FOUR)
        q = np.concatenate([stored & 15, stored >> 4], 1).reshape(k // FOUR, columns, FOUR).astype(np.int32) - PANEL4.offset
        m = multipliers[: -(-k // self.group) * columns].astype(np.int32).reshape(-1, columns).repeat(self.group // FOUR, 0)[: len(q)]
        wide[: k * columns] = ((q * m[..., None] + (1 << EIGHTHS - 1)) >> EIGHTHS).reshape(-1)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (k,) = dims
        stretches = code.op(f"sdiv i64 {k}, {STRETCH}")
        with code.loop("0", stretches) as stretch:
            for side in range(self.sides):
                self.widen_side(code, pointers, stretch, side)

    @property
    def sides(self) -> int:
        """The number of registers that hold the columns of a panel."""
        return self.columns // COLUMNS

    def widen_side(self, code: Code, pointers: Sequence[str], stretch: str, side: int | str, *, to: str | None = None) -> None:
        """Widen STRETCH weights of each of 16 columns: the weights at stretch number `stretch` along k, of the columns in register number
        `side` of the panel. `to` is the number of the stretch of `wide` that receives the result; None means `stretch`."""
        wide, panel, multipliers, later, later_multipliers = pointers
        size, first = STRETCH // 2 * self.columns, code.op(f"mul nsw i64 {side}, {LINE_BYTES}")
        found, made, wanted = (
            code.op(f"getelementptr i8, ptr {code.op(f'getelementptr [{n} x i8], ptr {place}, i64 {number}')}, i64 {first}")
            for place, n, number in ((panel, size, stretch), (wide, 2 * size, stretch if to is None else to), (later, size, stretch))
        )
        row = code.op(f"mul nsw i64 {code.op(f'sdiv i64 {stretch}, {self.group // STRETCH}')}, {self.columns}")
        if side != 1:
            prefetch_line(code, code.op(f"getelementptr i8, ptr {later_multipliers}, i64 {row}"), far=True)
        own = code.op(f"add nsw i64 {row}, {code.op(f'mul nsw i64 {side}, {COLUMNS}')}")
        factors = _factors(code, code.op(f"getelementptr i8, ptr {multipliers}, i64 {own}"))
        for line in range(STRETCH // 8):
            at = line * self.sides * LINE_BYTES
            words = code.op(f"load {_WORDS}, ptr {code.op(f'getelementptr i8, ptr {found}, i64 {at}')}, align 1")
            prefetch_line(code, code.op(f"getelementptr i8, ptr {wanted}, i64 {at}"), far=True)
            prefetch_line(code, code.op(f"getelementptr i8, ptr {found}, i64 {at + NEAR_AHEAD}"), far=False)
            for half in range(2):
                bytes_ = _bytes(code, (_top(code, words, half), _top(code, words, half + 2)), factors)
                place = (line * 2 + half) * self.columns * FOUR
                code.do(f"store {_WORDS} {bytes_}, ptr {code.op(f'getelementptr i8, ptr {made}, i64 {place}')}, align 64")


def _factors(code: Code, place: str) -> tuple[str, str]:
    """Return the multipliers m, and 256 m, of 16 columns. Each number fills both 16-bit words of its column."""
    loaded, kind = code.op(f"load <{COLUMNS} x i8>, ptr {place}, align 1"), f"<{LINE_BYTES} x i8>"
    repeated = vector_literal("i32", [byte % COLUMNS for byte in range(LINE_BYTES)])
    everywhere = code.op(f"shufflevector <{COLUMNS} x i8> {loaded}, <{COLUMNS} x i8> poison, <{LINE_BYTES} x i32> {repeated}")
    order = vector_literal("i8", [NOTHING if byte % 2 == 0 else byte // FOUR for byte in range(LINE_BYTES)])
    spread = code.op(f"call {kind} {_SPREAD}({kind} {everywhere}, {kind} {order})")
    upper = code.op(f"bitcast {kind} {spread} to {_WORDS}")
    return code.op(f"ashr {_WORDS} {upper}, {_all(8)}"), upper


def _top(code: Code, words: str, place: int) -> str:
    """Extract the weight q at bit 4 * `place` of each 16-bit word, where q + 8 is stored. Return 4096 q."""
    shift = 12 - 4 * place
    moved = code.op(f"shl {_WORDS} {words}, {_all(shift)}") if shift else words
    kept = code.op(f"and {_WORDS} {moved}, {_all(0xF000 - 2**16)}")
    return code.op(f"xor {_WORDS} {kept}, {_all(PANEL4.offset * 4096 - 2**16)}")


def _bytes(code: Code, tops: tuple[str, str], factors: tuple[str, str]) -> str:
    """Widen two weights per 16-bit word. Return one register that has the first result in the lower byte of each word, and the second in
    the upper byte."""
    lower, upper = (
        code.op(f"call {_WORDS} {_ROUNDED}({_WORDS} {top}, {_WORDS} {factor})") for top, factor in zip(tops, factors, strict=True)
    )
    rounded = code.op(f"add {_WORDS} {upper}, {_all(128)}")
    parts = [code.op(f"and {_WORDS} {x}, {_all(mask)}") for x, mask in ((lower, 0x00FF), (rounded, 0xFF00 - 2**16))]
    return code.op(f"or {_WORDS} {parts[0]}, {parts[1]}")


def _all(number: int) -> str:
    return splat(str(number), "i16", 32)
