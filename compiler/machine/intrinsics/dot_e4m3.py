"""Products of rows of bf16 and 8-bit floats, which bf16 represents exactly. The floats are decoded in registers.

Two look-ups give the upper and the lower byte of 64 bf16; the sign is added to the upper byte. Interleaving both bytes gives two registers
of pairs of bf16, for the instruction of `dot_bf16`. Every c[i, j] is summed in the order of k, as in `dot_bf16`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, tile_op
from compiler.llvm.ssa import Code, vec, vector_literal
from compiler.machine.formats import PANEL_E4M3
from compiler.machine.intrinsics.base import Features
from compiler.machine.intrinsics.dot_bf16 import PAIR, DotBf16
from compiler.machine.intrinsics.prefetch import AHEAD, prefetch_lines
from compiler.machine.intrinsics.product import ProductOp
from compiler.machine.product_steps.avx512 import BF16_PAIRS
from compiler.machine.target import LINE_BYTES, Target

LANES = 16  # columns of a register of pairs
BYTES = "<64 x i8>"
PANEL_BYTES = PANEL_E4M3.depth * PANEL_E4M3.columns  # bytes of a line of a panel
# The bits of the bf16 for each of the 128 e4m3 whose sign bit is 0.
DECODED = np.arange(128, dtype=np.uint8).view(DType.E4M3.numpy).astype(DType.BF16.numpy).view(np.uint16)
SIGN = 0x80


@tile_op
class DotE4m3(ProductOp):
    """dot_e4m3(c, a, b) dims(k, stride): a product as in product.py. b is a panel in the format `PANEL_E4M3`, so k is a multiple of 4."""

    name: ClassVar[str] = "dot_e4m3"
    accumulator: ClassVar[DType] = DType.F32
    row_dtype: ClassVar[DType] = DType.BF16
    panel_dtype: ClassVar[DType] = DType.E4M3
    # `sse4a` selects AMD, because Intel executes `vdpbf16ps` at half the rate (docs/decisions/0008-where-bf16-is-multiplied.md). All AMD
    # machines with AVX512-BF16 have VBMI.
    needs: ClassVar[Features] = Features(["avx512bf16", "avx512vbmi", "sse4a"])
    vector_bits: ClassVar[int] = 512

    def problems(self) -> Iterator[str]:
        if self.columns != PANEL_E4M3.columns:
            yield f"columns are {self.columns}, expected {PANEL_E4M3.columns}"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, a, b), (k, stride) = arrays, dims
        DotBf16(self.rows, self.columns).meaning((c, a, pairs_of_panel(b, k, self.columns)), (k, stride))

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (c, a, b), (k, stride), vector = pointers, dims, vec("float", LANES)
        places = [(i, j) for i in range(self.rows) for j in range(self.columns // LANES)]
        totals = {place: code.alloca(vector) for place in places}
        results = {(i, j): code.op(f"getelementptr float, ptr {c}, i64 {i * self.columns + j * LANES}") for i, j in places}
        for place in places:
            code.do(f"store {vector} {code.op(f'load {vector}, ptr {results[place]}, align 4')}, ptr {totals[place]}")
        rows = [code.op(f"getelementptr bfloat, ptr {a}, i64 {code.op(f'mul nsw i64 {stride}, {i}')}") for i in range(self.rows)]
        with code.loop("0", code.op(f"sdiv i64 {k}, {PANEL_E4M3.depth}")) as line:
            begin = code.op(f"getelementptr [{PANEL_BYTES} x i8], ptr {b}, i64 {line}")
            if self.rows > 1:  # a single row waits for memory anyway, so prefetching does not help it
                prefetch_lines(code, begin, AHEAD, PANEL_BYTES, far=True)
            at = (code.op(f"getelementptr i8, ptr {begin}, i64 {offset}") for offset in range(0, PANEL_BYTES, LINE_BYTES))
            loaded = [code.op(f"load {BYTES}, ptr {place}, align 1") for place in at]
            right = [decoded_pairs(code, some) for some in loaded]
            for i, row in enumerate(rows):
                at = code.op(f"getelementptr [{PANEL_E4M3.depth} x bfloat], ptr {row}, i64 {line}")
                for half in range(PANEL_E4M3.depth // PAIR):
                    one = code.op(f"load i32, ptr {code.op(f'getelementptr i32, ptr {at}, i64 {half}')}, align 2")
                    left = BF16_PAIRS.left(code, one)
                    for j, pairs in enumerate(right):
                        old = code.op(f"load {vector}, ptr {totals[i, j]}")
                        code.do(f"store {vector} {BF16_PAIRS.add(code, old, left, (pairs[half],))}, ptr {totals[i, j]}")
        for place in places:
            code.do(f"store {vector} {code.op(f'load {vector}, ptr {totals[place]}')}, ptr {results[place]}, align 4")


def pairs_of_panel(panel: Array, k: int, columns: int) -> Array:
    """Return the decoded numbers of a panel, flat: [k / 2, columns, 2]."""
    weights = PANEL_E4M3.unpacked(panel[: k * columns].reshape(1, -1, PANEL_BYTES))  # [columns, k]
    return weights.reshape(columns, -1, PAIR).swapaxes(0, 1).astype(DType.BF16.numpy).reshape(-1)


def decoded_pairs(code: Code, stored: str) -> list[str]:
    """Decode 64 bytes to two registers of 32 bf16: for 16 columns, those at k and k + 1, and those at k + 2 and k + 3."""
    lower, upper = (_looked_up(code, stored, DECODED >> shift & 0xFF) for shift in (0, 8))
    sign = code.op(f"and {BYTES} {stored}, splat (i8 {SIGN - 256})")
    upper = code.op(f"or {BYTES} {upper}, {sign}")
    found: list[str] = []
    for half in range(2):
        order = (part * 64 + lane * 16 + half * 8 + i for lane in range(4) for i in range(8) for part in range(2))
        words = code.op(f"shufflevector {BYTES} {lower}, {BYTES} {upper}, <64 x i32> {vector_literal('i32', order)}")
        found.append(code.op(f"bitcast {BYTES} {words} to <32 x bfloat>"))
    return found


def _looked_up(code: Code, stored: str, table: Array) -> str:
    """Look up each byte in a table of 128 bytes. The instruction ignores the highest bit."""
    first, second = (vector_literal("i8", (int(byte) for byte in half)) for half in (table[:64], table[64:]))
    return code.op(f"call {BYTES} @llvm.x86.avx512.vpermi2var.qi.512({BYTES} {first}, {BYTES} {stored}, {BYTES} {second})")
