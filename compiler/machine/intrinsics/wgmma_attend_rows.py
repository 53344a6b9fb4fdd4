"""Emit what a thread of attention by `wgmma` does with its rows: it copies their queries to shared memory, and stores their results.

A thread holds two rows of the accumulators of its warpgroup, 8 rows apart. In each row, it has two neighbouring elements of every 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from compiler.llvm.ssa import Code, float_literal, multiply_add
from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, LANES, SHARED, WARPS
from compiler.machine.intrinsics.mma_pages import SPLIT
from compiler.machine.intrinsics.wgmma_attend import HALF_ROWS, WgmmaAttend
from compiler.machine.intrinsics.wgmma_attend_pages import Pages

LOWEST = float_literal(float("-inf"))
PAIR = range(2)  # indices of the two rows of a thread, and of two neighbouring keys
MOST_GROUPS = 16  # maximum number of groups of 8 elements of a row of queries that a thread loads at once


class Rows(Pages):
    """Emits what a thread does with its rows: the code that loads queries and stores results, and arithmetic."""

    def __init__(self, op: WgmmaAttend, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        super().__init__(op, code, pointers, dims)
        self.means = [code.alloca("float") for _ in range(op.columns // 2)]  # weighted sums of values; `_store` divides them
        self.scores = [code.alloca("float") for _ in range(SPLIT // 2)]
        self.state = [[code.alloca("float") for _ in PAIR] for _ in range(2)]  # the largest score and the sum of weights, by row

    # --- queries and results in global memory ------------------------------------------------------------------------------

    def _load_queries(self) -> None:
        """Round the queries to bf16, and copy them to shared memory in the layout [group of 8 rows, group of 8 elements, row, element]. A
        thread copies two of each 8 elements of its rows. Rows after the last one are computed like the last one, but not stored. If both
        warpgroups have the same rows, each copies half of the elements."""
        code, size, last = self.code, self.op.size, self.code.op(f"sub i64 {self.rows}, 1")
        numbers, quad = self._own_rows()
        rows = [self._place(self.queries, code.op(f"call i64 @llvm.smin.i64(i64 {row}, i64 {last})"), quad, 4) for row in numbers]
        brick = EIGHT * EIGHT * 2  # bytes
        line = self.plus(self.times(self.group, EIGHT * 2), self.times(self.quad, 4))
        own = self.gep(SHARED, self._own_queries(), self.plus(self.times(self.warp, 2 * size // EIGHT * brick), line))
        groups = size // EIGHT
        if self.op.is_latent:
            groups //= 2
            rows = [self.gep(GLOBAL, row, self.times(self.own_warpgroup(), groups * EIGHT * 4)) for row in rows]
            own = self.gep(SHARED, own, self.times(self.own_warpgroup(), groups * brick))
        for begin in range(0, groups, MOST_GROUPS):
            some = range(begin, min(begin + MOST_GROUPS, groups))
            loaded = [[self.words(GLOBAL, row, str(n * EIGHT * 4), 2) for n in some] for row in rows]
            for i, of_row in enumerate(loaded):
                for n, pair in zip(some, of_row, strict=True):
                    word = self._rounded([code.op(f"bitcast i32 {word} to float") for word in pair])
                    code.do(f"store i32 {word}, {SHARED} {self.gep(SHARED, own, str((i * size // EIGHT + n) * brick))}, align 4")

    def _own_queries(self) -> str:
        """Return the address of the queries of this thread's warpgroup."""
        first = "0" if self.op.is_latent else self.times(self.own_warpgroup(), HALF_ROWS * self.op.size * 2)
        return self.gep(SHARED, self.stages, self.plus(first, str(self.op.queries_at)))

    def _store(self) -> None:
        """Divide the weighted sums of values, `means`, of this thread's rows by the sums of the weights, and store the quotients."""
        code, op = self.code, self.op
        means, sums = self.load_floats(self.means), self.load_floats(self.state[1])
        rows, quad = self._own_rows()
        num_rows, out = self._num_rows(), self.kept("out")
        for i, row in enumerate(rows):
            with code.when(code.op(f"icmp slt i64 {row}, {num_rows}")):
                own = self._place(out, row, quad, 2 if op.rounds else 4, op.out_size)
                if op.is_latent:
                    own = self.gep(GLOBAL, own, self.times(self.own_warpgroup(), op.columns * (2 if op.rounds else 4)))
                reciprocal = code.op(f"fdiv float 1.0, {sums[i]}")
                for number in range(2 * i, len(means), 4):
                    pair = [self._quotient(means[number + e], sums[i], reciprocal) for e in PAIR]
                    self._store_pair(pair, own, number // 4 * EIGHT)

    def _store_pair(self, pair: Sequence[str], own: str, element: int) -> None:
        """Store two neighbouring elements of a row, beginning at `element` after `own`."""
        code = self.code
        if self.op.rounds:
            code.do(f"store i32 {self._rounded(pair)}, {GLOBAL} {self.gep(GLOBAL, own, str(2 * element))}, align 4")
            return
        both = code.op(f"insertelement <2 x float> poison, float {pair[0]}, i32 0")
        both = code.op(f"insertelement <2 x float> {both}, float {pair[1]}, i32 1")
        code.do(f"store <2 x float> {both}, {GLOBAL} {self.gep(GLOBAL, own, str(4 * element))}, align 8")

    def _num_rows(self) -> str:
        """Read the number of rows again."""
        return self.code.op(f"zext i32 {self.kept('rows')} to i64")

    def _own_rows(self) -> tuple[list[str], str]:
        """Return the numbers of this thread's rows in the block, and its number among the four lanes that share a row. For latents, both
        warpgroups have the same rows."""
        code, thread = self.code, self.thread_again()
        group = code.op(f"lshr i64 {code.op(f'and i64 {thread}, {LANES - 1}')}, 2")
        if self.op.is_latent:
            thread = code.op(f"and i64 {thread}, {WARPS * LANES - 1}")
        first = self.plus(self.times(code.op(f"lshr i64 {thread}, 5"), 2 * EIGHT), group)
        return [self.plus(first, str(EIGHT * i)) for i in PAIR], code.op(f"and i64 {thread}, 3")

    def _place(self, base: str, row: str, quad: str, num_bytes: int, size: int | None = None) -> str:
        """Return the address of this thread's first element of a row. `size` is the number of elements of a row; None means the size of a
        query."""
        code, heads = self.code, self.op.heads
        slot, head = (code.op(f"{operation} i64 {row}, {heads}") for operation in ("udiv", "urem"))
        number = self.plus(code.op(f"mul i64 {slot}, {self.token_heads}"), head)
        at = self.plus(self.times(number, size or self.op.size), self.times(quad, 2))
        return self.gep(GLOBAL, base, self.times(at, num_bytes))

    def _quotient(self, a: str, b: str, reciprocal: str) -> str:
        """Return a / b, rounded as by a division, from 1 / b. The remainder corrects the product (Markstein, 1990). The last bit can differ
        from that of a division only if a is almost denormal, or if a is a power of two and all bits of b's mantissa are set."""
        code = self.code
        near = code.op(f"fmul float {a}, {reciprocal}")
        rest = multiply_add(code, code.op(f"fneg float {near}"), b, a, "float", 1)
        corrected = multiply_add(code, rest, reciprocal, near, "float", 1)
        return code.op(f"select i1 {code.op(f'fcmp one float {rest}, 0.0')}, float {corrected}, float {near}")

    # --- arithmetic ------------------------------------------------------------------------------------------------------

    def _sum(self, a: str, b: str) -> str:
        return self.code.op(f"fadd float {a}, {b}")

    def _larger(self, a: str, b: str) -> str:
        """Return the larger number, or NaN if either is NaN."""
        return self.code.op(f"call float @llvm.maximum.f32(float {a}, float {b})")

    def _finite(self, top: str) -> str:
        """Return the largest score of a row, or 0 if the row sees no key, so that the weights of such a row are 0."""
        return self.code.op(f"select i1 {self.code.op(f'fcmp oeq float {top}, {LOWEST}')}, float 0.0, float {top}")

    def _folded(self, values: Sequence[str], combine: Callable[[str, str], str]) -> str:
        """Combine values pairwise, so that few of them wait for each other."""
        while len(values) > 1:
            odd = values[len(values) // 2 * 2 :]
            values = [*(combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)), *odd]
        return values[0]

    def _from_lane(self, value: str, distance: int) -> str:
        """Return the value of the lane whose number differs in the bit `distance`."""
        return self.code.op(f"call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float {value}, i32 {distance}, i32 31)")

    def _rounded(self, pair: Sequence[str]) -> str:
        """Return two numbers, rounded to bf16, in one word."""
        code, both = self.code, "poison"
        for n, x in enumerate(pair):
            both = code.op(f"insertelement <2 x float> {both}, float {x}, i32 {n}")
        return code.op(f"bitcast <2 x bfloat> {code.op(f'fptrunc <2 x float> {both} to <2 x bfloat>')} to i32")

    def _literal(self, value: float) -> str:
        return float_literal(float(np.float32(value)))
