"""The softmax of a block of scores, as attention on a matrix unit needs it: weights in bf16, and exponentials with few instructions.

Scores are multiplied by log2(e), so a weight is a power of two. 2^x is computed as a polynomial of x - floor(x), scaled by 2^floor(x).
AVX-512 has one instruction that computes x - floor(x), and one that scales. Powers below 2^-126 are 0, because a denormal result takes
hundreds of cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.fma import numpy_fma
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, broadcast, float_literal, multiply_add, splat, vec, vector_literal
from compiler.machine.intrinsics.amx import AmxStayAwake
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.product import flushed
from compiler.machine.target import Target

LANES: Final = 16
PANEL: Final = 2 * LANES  # columns of a product: the number of neighbouring scores of a row
ROW_BYTES: Final = 4 * PANEL

# Coefficients of polynomials that are near 2^x for 0 <= x <= 1, and exactly 1 for x = 0.
SHORT: Final = (1.0, 0.6951168179512024, 0.22764497995376587, 0.0770670548081398)  # largest relative error: 8.6e-5
LONG: Final = (  # largest relative error: 1.4e-7
    1.0,
    0.6931512951850891,
    0.24016444385051727,
    0.05579991266131401,
    0.009017029777169228,
    0.0018671301659196615,
)
LEAST_EXPONENT: Final = -126.0
AWAKE: Final = 8  # AMX is kept awake once per this many rows of weights (`AmxStayAwake`)
_NUMBERS, _MASK = vec("float", LANES), vec("i1", LANES)
_BOTH = vec("bfloat", PANEL)
_DOWN = 9  # for `reduce`: round down, without floating-point exceptions
_CURRENT = 4  # the current rounding mode


@tile_op
class SoftmaxRows(Intrinsic):
    """softmax_rows(weights, scores, maximum, sums, rescale) dims(count): turn the scores of `count` rows into weights.

    weights[rows, panels * 32] bf16   2^(score - new maximum)
    scores[panels, rows, 32]          scores for a block of keys; -inf hides a key
    maximum[count]                    the largest score so far, which the largest score of the block may raise
    sums[count, 16]                   sums of the weights before they are rounded; lane l sums the weights of keys l, l + 16, ...
    rescale[count]                    2^(old maximum - new maximum), by which the sums are multiplied; room for a multiple of 16 rows

    The tile keeps AMX awake (`AmxStayAwake`), which must be configured.
    """

    name: ClassVar[str] = "softmax_rows"
    needs: ClassVar[Features] = Features(["avx512dq", "avx512bf16", *AmxStayAwake.needs])
    vector_bits: ClassVar[int] = 512
    rows: int  # number of rows for which there are scores and weights
    panels: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        given = Operand("weights", DType.BF16, written=True), Operand("scores", DType.F32)
        state = (Operand(name, DType.F32, written=True) for name in ("maximum", "sums", "rescale"))
        return *given, *state

    @property
    def dims(self) -> tuple[str, ...]:
        return ("count",)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        self.meaning_of(arrays, dims[0], self.panels)

    def meaning_of(self, arrays: Sequence[Array], count: int, seen: int) -> None:
        """Compute the softmax of `count` rows from their first `seen` panels. The weights of other panels stay as they are."""
        weights, scores, maximum, sums, rescale = arrays
        of_panels = scores[: self.panels * self.rows * PANEL].reshape(self.panels, self.rows, 2, LANES)
        of_rows = of_panels[:seen, :count].swapaxes(0, 1).reshape(count, -1, LANES)
        with np.errstate(invalid="ignore"):
            highest = maximum[:count].copy()
            for some in of_rows.reshape(count, -1).T:
                highest = np.where(highest < some, some, highest)
            rescale[:count] = power(maximum[:count] - highest, LONG)
            maximum[:count] = highest
            found = power(of_rows - highest[:, None, None], SHORT)
            added = np.zeros((count, LANES), np.float32)
            for v in range(found.shape[1]):
                added = added + found[:, v]
            before = sums[: count * LANES].reshape(count, LANES)
            before[...] = numpy_fma(before, rescale[:count, None], added)
        written = weights[: count * self.panels * PANEL].reshape(count, -1, LANES)[:, : found.shape[1]]
        written[...] = flushed(found).astype(DType.BF16.numpy)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        softmax, count = BlockSoftmax(code, *pointers, rows=self.rows, panels=self.panels, seen=self.panels), str(dims[0])
        with code.loop("0", count) as row:
            softmax.raise_maximum(row)
        softmax.find_rescale(count)
        softmax.weigh_rows("0", count, target)


@dataclass(frozen=True, slots=True)
class BlockSoftmax:
    """Writes the parts of the softmax of the first `seen` panels of a block. The pointers are the operands of `SoftmaxRows`."""

    code: Code
    weights: str
    scores: str
    maximum: str
    sums: str
    rescale: str
    rows: int
    panels: int
    seen: int

    def raise_maximum(self, row: str) -> None:
        """Raise the maximum of a row, and write old maximum - new maximum, the exponent of the row's factor, to `rescale`."""
        code, old = self.code, self._number(self.maximum, row)
        highest = self._score(row, 0)
        for v in range(1, 2 * self.seen):
            highest = _larger(code, highest, self._score(row, v), LANES)
        for half in (8, 4, 2, 1):
            order = vector_literal("i32", [(lane + half) % LANES for lane in range(LANES)])
            turned = code.op(f"shufflevector {_NUMBERS} {highest}, {_NUMBERS} poison, <{LANES} x i32> {order}")
            highest = _larger(code, highest, turned, LANES)
        found = _larger(code, old, code.op(f"extractelement {_NUMBERS} {highest}, i64 0"), 1)
        code.do(f"store float {code.op(f'fsub float {old}, {found}')}, ptr {self._at(self.rescale, row, 4)}, align 4")
        code.do(f"store float {found}, ptr {self._at(self.maximum, row, 4)}, align 4")

    def find_rescale(self, count: str) -> None:
        """Turn the exponents in `rescale` into factors."""
        code = self.code
        vectors = code.op(f"sdiv i64 {code.op(f'add nsw i64 {count}, {LANES - 1}')}, {LANES}")
        with code.loop("0", vectors) as v:
            place = self._at(self.rescale, v, 4 * LANES)
            given = code.op(f"load {_NUMBERS}, ptr {place}, align 4")
            code.do(f"store {_NUMBERS} {_power(code, given, LONG)}, ptr {place}, align 4")

    def weigh_rows(self, begin: str, end: str, target: Target) -> None:
        """Write the weights of rows `begin` to `end` - 1, and keep AMX awake (`AmxStayAwake`)."""
        code = self.code
        with code.loop(begin, end) as row:
            self.weigh(row)
            with code.when(code.op(f"icmp eq i64 {code.op(f'and i64 {row}, {AWAKE - 1}')}, 0")):
                AmxStayAwake().emit(code, (), (), target)

    def weigh(self, row: str) -> None:
        """Write the weights of a row. Rescale the sums of the row, and add the weights, which are not yet rounded, to the sums."""
        code = self.code
        maximum = broadcast(code, self._number(self.maximum, row), "float", LANES)
        added, weights = "", self._at(self.weights, row, 2 * PANEL * self.panels)
        for panel in range(self.seen):
            both: list[str] = []
            for half in range(2):
                x = code.op(f"fsub {_NUMBERS} {self._score(row, 2 * panel + half)}, {maximum}")
                both.append(_power(code, x, SHORT))
                added = code.op(f"fadd {_NUMBERS} {added or 'zeroinitializer'}, {both[-1]}")
            rounded = code.op(f"call {_BOTH} @llvm.x86.avx512bf16.cvtne2ps2bf16.512({_NUMBERS} {both[1]}, {_NUMBERS} {both[0]})")
            bits = code.op(f"bitcast {_BOTH} {rounded} to {vec('i16', PANEL)}")
            code.do(f"store {vec('i16', PANEL)} {bits}, ptr {self._at(weights, str(panel), 2 * PANEL)}, align 64")
        place, factor = self._at(self.sums, row, 4 * LANES), broadcast(code, self._number(self.rescale, row), "float", LANES)
        total = multiply_add(code, code.op(f"load {_NUMBERS}, ptr {place}, align 64"), factor, added, "float", LANES)
        code.do(f"store {_NUMBERS} {total}, ptr {place}, align 64")

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _at(self, base: str, number: str, size: int) -> str:
        return self.code.op(f"getelementptr [{size} x i8], ptr {base}, i64 {number}")

    def _number(self, base: str, row: str) -> str:
        return self.code.op(f"load float, ptr {self._at(base, row, 4)}, align 4")

    def _score(self, row: str, v: int) -> str:
        """Load vector `v` of the scores of a row."""
        panel = self.code.op(f"getelementptr i8, ptr {self.scores}, i64 {v // 2 * self.rows * ROW_BYTES + v % 2 * 4 * LANES}")
        return self.code.op(f"load {_NUMBERS}, ptr {self._at(panel, row, ROW_BYTES)}, align 64")


def power(x: Array, coefficients: Sequence[float]) -> Array:
    """Compute 2^x in f32, as `_power` does."""
    whole = np.floor(x)
    fraction = np.where(np.isinf(x), np.float32(0), x - whole)
    total = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = numpy_fma(total, fraction, np.float32(c))
    exponent = np.where(x >= LEAST_EXPONENT, whole, 0).astype(np.int32)
    return np.where(x < LEAST_EXPONENT, np.float32(0), np.ldexp(total, exponent)).astype(np.float32)


def _power(code: Code, x: str, coefficients: Sequence[float]) -> str:
    """Emit 2^x for each lane: `reduce` computes x - floor(x), and `scalef` multiplies the polynomial of this difference by 2^floor(x).
    Lanes with x below LEAST_EXPONENT become 0."""
    all_lanes = f"i16 -1, i32 {_CURRENT}"  # mask and rounding mode
    fraction = code.op(
        f"call {_NUMBERS} @llvm.x86.avx512.mask.reduce.ps.512({_NUMBERS} {x}, i32 {_DOWN}, {_NUMBERS} zeroinitializer, {all_lanes})"
    )
    *rest, total = (splat(float_literal(float(np.float32(c))), "float", LANES) for c in coefficients)
    for c in reversed(rest):
        total = multiply_add(code, total, fraction, c, "float", LANES)
    kept = code.op(f"fcmp uge {_NUMBERS} {x}, {splat(float_literal(LEAST_EXPONENT), 'float', LANES)}")
    mask = f"i16 {code.op(f'bitcast {_MASK} {kept} to i16')}, i32 {_CURRENT}"
    return code.op(
        f"call {_NUMBERS} @llvm.x86.avx512.mask.scalef.ps.512({_NUMBERS} {total}, {_NUMBERS} {x}, {_NUMBERS} zeroinitializer, {mask})"
    )


def _larger(code: Code, a: str, b: str, lanes: int) -> str:
    kind = vec("float", lanes)
    return code.op(f"select {vec('i1', lanes)} {code.op(f'fcmp olt {kind} {a}, {b}')}, {kind} {b}, {kind} {a}")
