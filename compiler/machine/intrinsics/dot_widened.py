"""Exact sums of products by widened weights of 8 bits (compiler/ops/products/widened.py), computed from the 4-bit weights without widening
them.

A widened weight is w = (q * m + 4) >> 3, for a 4-bit weight q and the multiplier m of its group. So 8 * w - 4 = q * m - r, where the rest r
= (q * m + 4) mod 8 depends only on the lowest three bits of q and of m. A sum of products by q needs one multiplication by m per group. One
instruction looks up 64 rests in a table of 64 bytes, and a second dot product adds up their products with a row, over all groups. For few
rows, this takes less time than widening: a line of 64 bytes takes 7 operations, plus 4 per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, broadcast, splat, vector_literal
from compiler.machine.formats import EIGHTHS, FOUR, PANEL4
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.prefetch import AHEAD, prefetch_line, prefetch_twice
from compiler.machine.target import LINE_BYTES, Target

COLUMNS = 16  # columns of a register
STRETCH = 32  # elements along k of an iteration
LONGEST = 1 << 14  # maximum number of elements along k: for more, eight times the sum of the products may not fit in i32
FEW = 4  # up to this many accumulators do not hide the latency of additions, so lower and upper halves of bytes get separate accumulators
LOWEST = 7  # mask of the lowest three bits of a number
# The rest r of each index q + 8 * m, for the lowest three bits of q and of m.
RESTS = [((i & LOWEST) * (i >> 3) + (1 << EIGHTHS - 1)) % (1 << EIGHTHS) for i in range(LINE_BYTES)]
_WORDS, _BYTES = "<16 x i32>", "<64 x i8>"
_DOT = "@llvm.x86.avx512.vpdpbusd.512"
_LOOK_UP = "@llvm.x86.avx512.permvar.qi.512"
_SPREAD = "@llvm.x86.avx512.pshuf.b.512"


@tile_op
class DotWidened(Intrinsic):
    """dot_widened(c, a, begins, panel, multipliers) dims(k, stride, groups): multiply rows by a panel of widened weights w.

    c[i, j] += sum over k of a[i, k] * (8 * w[k, j] - 4), modulo 2^32.

    c[rows * columns]   accumulators, row-major
    a                   rows of i8, `stride` elements apart
    begins              i32, `groups` per row: for each group, -8 times the sum of the row's elements in it
    panel, multipliers  addresses of the first weight, which begins a group, and of its multiplier; k is a multiple of `group`
    """

    name: ClassVar[str] = "dot_widened"
    needs: ClassVar[Features] = Features(["avx512bw", "avx512vnni", "avx512vbmi"])
    vector_bits: ClassVar[int] = 512
    rows: int
    columns: int  # a multiple of 16
    group: int  # elements along k that share a multiplier; a multiple of 32

    @property
    def operands(self) -> tuple[Operand, ...]:
        given = Operand("c", DType.I32, written=True), Operand("a", DType.I8), Operand("begins", DType.I32)
        return *given, Operand("panel", DType.U8), Operand("multipliers", DType.I8)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k", "stride", "groups")

    def problems(self) -> Iterator[str]:
        if self.columns % COLUMNS or self.group % STRETCH:
            yield f"columns are {self.columns} and a group is {self.group}, expected multiples of {COLUMNS} and {STRETCH}"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, a, begins, panel, multipliers), (k, stride, row_groups), columns, groups = arrays, dims, self.columns, dims[0] // self.group
        rows = np.stack([a[i * stride : i * stride + k] for i in range(self.rows)]).astype(np.int32)
        stored = panel[: k * columns // 2].reshape(-1, 1, columns, FOUR)
        n = np.concatenate([stored & 15, stored >> 4], 1).reshape(-1, columns, FOUR).swapaxes(1, 2).reshape(k, columns).astype(np.int32)
        m = multipliers[: groups * columns].reshape(groups, columns).astype(np.int32)
        rests = np.array(RESTS, np.int32)[n & LOWEST | (m.repeat(self.group, 0) & LOWEST) << 3]
        dots = np.einsum("igk,gkj->igj", rows.reshape(self.rows, groups, -1), n.reshape(groups, -1, columns))
        begun = np.stack([begins[i * row_groups : i * row_groups + groups] for i in range(self.rows)])
        found = ((dots + begun[..., None]) * m).sum(1, dtype=np.int32) - rows @ rests
        c[: self.rows * columns] += found.reshape(-1)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _DotWidened(self, code, pointers, dims).run()


class _DotWidened:
    """Emits the code of `DotWidened`."""

    def __init__(self, op: DotWidened, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Compute the addresses of the rows and of their values in `begins`. `pointers` and `dims` are those of the tile `op`."""
        self.op, self.code = op, code
        self.c, a, begins, self.panel, self.multipliers = pointers
        self.k, stride, groups = dims
        self.rows = [code.op(f"getelementptr i8, ptr {a}, i64 {code.op(f'mul nsw i64 {stride}, {i}')}") for i in range(op.rows)]
        self.begins = [code.op(f"getelementptr i32, ptr {begins}, i64 {code.op(f'mul nsw i64 {groups}, {i}')}") for i in range(op.rows)]
        self.sides = range(op.columns // COLUMNS)
        self.halves = 2 if op.rows * len(self.sides) <= FEW else 1

    def run(self) -> None:
        """Emit the code. For each group, sum the products of rows and 4-bit weights, beginning with `begins`, and multiply the sum by the
        multiplier. The products of rows and rests are added up over all groups, and their sums are subtracted at the end."""
        code, op = self.code, self.op
        places = [(i, j) for i in range(op.rows) for j in self.sides]
        totals, dots = ({place: code.alloca(_WORDS) for place in places} for _ in range(2))
        rests = {(*place, half): code.alloca(_WORDS) for place in places for half in range(self.halves)}
        for place in (*totals.values(), *rests.values()):
            self.store("zeroinitializer", place)
        with code.loop("0", code.op(f"sdiv i64 {self.k}, {op.group}")) as g:
            factors = [self.factors(g, j) for j in self.sides]
            for i, j in places:
                at = code.op(f"getelementptr i32, ptr {self.begins[i]}, i64 {g}")
                self.store(broadcast(code, code.op(f"load i32, ptr {at}, align 4"), "i32", COLUMNS), dots[i, j])
            count = op.group // STRETCH
            first = code.op(f"mul nsw i64 {g}, {count}")
            with code.loop("0", str(count), runs=True) as n:
                self.stretch(code.op(f"add nsw i64 {first}, {n}"), [lowest for _, lowest in factors], dots, rests)
            for i, j in places:
                product = code.op(f"mul {_WORDS} {self.load(dots[i, j])}, {factors[j][0]}")
                self.store(code.op(f"add {_WORDS} {self.load(totals[i, j])}, {product}"), totals[i, j])
        for i, j in places:
            at = code.op(f"getelementptr i32, ptr {self.c}, i64 {i * op.columns + j * COLUMNS}")
            total = code.op(f"add {_WORDS} {self.load(at)}, {self.load(totals[i, j])}")
            for half in range(self.halves):
                total = code.op(f"sub {_WORDS} {total}, {self.load(rests[i, j, half])}")
            self.store(total, at)

    def factors(self, g: str, j: int) -> tuple[str, str]:
        """Return the multipliers of 16 columns as i32, and eight times the multiplier in all four bytes of its column, modulo 2^8."""
        code = self.code
        at = code.op(f"add nsw i64 {code.op(f'mul nsw i64 {g}, {self.op.columns}')}, {j * COLUMNS}")
        place = code.op(f"getelementptr i8, ptr {self.multipliers}, i64 {at}")
        wide = code.op(f"sext <{COLUMNS} x i8> {code.op(f'load <{COLUMNS} x i8>, ptr {place}, align 1')} to {_WORDS}")
        if j == 0:
            ahead = AHEAD // (self.op.group // 2)  # a multiplier is one byte per `group` weights of half a byte
            prefetch_line(code, code.op(f"getelementptr i8, ptr {place}, i64 {ahead}"), far=False)
        shifted = code.op(f"bitcast {_WORDS} {code.op(f'shl {_WORDS} {wide}, {_all(3)}')} to {_BYTES}")
        order = vector_literal("i8", [byte // FOUR % FOUR * FOUR for byte in range(LINE_BYTES)])
        return wide, code.op(f"call {_BYTES} {_SPREAD}({_BYTES} {shifted}, {_BYTES} {order})")

    def stretch(self, number: str, lowest: Sequence[str], dots: dict[tuple[int, int], str], rests: dict[tuple[int, int, int], str]) -> None:
        """Add the products of stretch `number`, of STRETCH elements along k, to `dots`, and the products of rows and rests to `rests`."""
        code, columns = self.code, self.op.columns
        found = code.op(f"getelementptr [{STRETCH // 2 * columns} x i8], ptr {self.panel}, i64 {number}")
        lefts = [code.op(f"getelementptr [{STRETCH} x i8], ptr {row}, i64 {number}") for row in self.rows]
        for line in range(STRETCH // PANEL4.depth):
            words: list[str] = []
            for j in self.sides:
                at = code.op(f"getelementptr i8, ptr {found}, i64 {line * columns * FOUR + j * LINE_BYTES}")
                words.append(self.load(at))
                prefetch_twice(code, at, LINE_BYTES)
            for half in range(2):
                parts = words if half == 0 else [code.op(f"lshr {_WORDS} {x}, {_all(4)}") for x in words]
                kept = [self.as_bytes(x) for x in parts]
                numbers = [code.op(f"and {_BYTES} {x}, {_all_bytes(15)}") for x in kept]
                looked_up = [self.rests_of(x, low) for x, low in zip(kept, lowest, strict=True)]
                for i, row in enumerate(lefts):
                    at = code.op(f"getelementptr i8, ptr {row}, i64 {line * PANEL4.depth + half * FOUR}")
                    left = self.as_bytes(broadcast(code, code.op(f"load i32, ptr {at}, align 1"), "i32", COLUMNS))
                    for j in self.sides:
                        self.add(dots[i, j], numbers[j], left)
                        self.add(rests[i, j, half % self.halves], looked_up[j], left)

    def rests_of(self, words: str, lowest: str) -> str:
        """Look up the rests of 64 weights. `lowest` has eight times their multipliers."""
        code = self.code
        own = code.op(f"and {_BYTES} {words}, {_all_bytes(LOWEST)}")
        others = code.op(f"and {_BYTES} {lowest}, {_all_bytes(~LOWEST)}")
        index = code.op(f"or {_BYTES} {own}, {others}")
        return code.op(f"call {_BYTES} {_LOOK_UP}({_BYTES} {vector_literal('i8', RESTS)}, {_BYTES} {index})")

    def add(self, total: str, unsigned: str, signed: str) -> None:
        self.store(self.code.op(f"call {_WORDS} {_DOT}({_WORDS} {self.load(total)}, {_BYTES} {unsigned}, {_BYTES} {signed})"), total)

    def as_bytes(self, words: str) -> str:
        return self.code.op(f"bitcast {_WORDS} {words} to {_BYTES}")

    def load(self, place: str) -> str:
        return self.code.op(f"load {_WORDS}, ptr {place}, align 4")

    def store(self, words: str, place: str) -> None:
        self.code.do(f"store {_WORDS} {words}, ptr {place}, align 4")


def _all(number: int) -> str:
    return splat(str(number), "i32", COLUMNS)


def _all_bytes(number: int) -> str:
    return splat(str(number), "i8", LINE_BYTES)
