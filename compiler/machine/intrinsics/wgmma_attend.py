"""Attention to pages of bf16 by `wgmma`, the tensor core instruction of sm_90a: the tile, its sizes and its meaning. A block computes 128
rows, or 64 if the keys are latents, whose beginnings are the values (wgmma_attend_parts.py).

A row is a pair of a token and a head. A block has two warpgroups. They compute 64 rows each, or for latents half of each value of the same
64 rows. A thread holds its part of the scores and of the means in registers:

    for each split of 128 keys {
      scores  <- queries * keys
      weights <- 2^(scores * unit - top), rounded to bf16   four lanes share a row
      found   <- weights * values            `wgmma` reads the weights from registers
      joined  <- join(joined, found)
    }

Unless they attend to latents, the warpgroups take turns: while one multiplies the values of a split and the keys of the next one, the other
computes weights. A block has no warps that only copy: with them, a thread would have 168 registers, too few for scores, weights and means.
Products are summed in the same order as in `page_scores` and `page_values` (mma_pages.py), and weights and splits in the same order as in
compiler/backends/cuda/schedule/attention/walk.py. So a row has the same bits as with that schedule, except in the rare cases that
`_quotient` (wgmma_attend_rows.py) names.

A key page holds lines of 16 keys, one line per element, and a value page holds lines of elements, one line per key. `wgmma` can read
operands from shared memory even if their lines are not along the summed axis. In shared memory, a line of keys has LINE_BYTES: the keys of
four pages for one element. Lines of values are cut into parts of `width` bytes. Lines of keys of consecutive elements are adjacent, and so
are parts of consecutive values; their chunks of 16 bytes are swizzled.

In order of reading:

    wgmma_attend.py          the sizes and the meaning of the tile
    wgmma_attend_pages.py    the code that copies pages to shared memory
    wgmma_attend_rows.py     the code that copies queries, and stores results
    wgmma_attend_code.py     the code that multiplies, computes weights and joins means
    wgmma_attend_parts.py    the same for large heads and latents, of which only one stage fits in shared memory
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.block_code import LANES, WARPS
from compiler.machine.intrinsics.mma_pages import SPLIT
from compiler.machine.target import Target
from runtime.cache_groups import PAGE_SIZE as PAGE

HALF_ROWS = 64  # number of rows of a warpgroup
LARGEST = 256  # maximum number of elements of a value that a warpgroup multiplies, because threads have the means in registers
LARGEST_WHOLE = 128  # maximum number of elements of keys and values of which two stages fit in shared memory
LARGEST_LATENT = 576  # maximum number of elements of a latent: 64 rows of queries fit beside one split
STAGES = 2
PART = 64  # number of elements of a part of keys or values, which is copied alone, and maximum number that is multiplied at a time
LINE_BYTES = 128  # bytes of a line of keys in shared memory: 64 keys of one element
KEPT_BYTES = 32  # bytes of shared memory for numbers that threads read again instead of keeping them in registers
WIDTHS = (128, 64, 32)  # possible bytes of a part of a line of values


def attends(size: int, target: Target, value_size: int = 0) -> bool:
    """Return whether the target has the tile for keys and values of this size. If `value_size` is not 0, values are the first `value_size`
    elements of keys."""
    return WgmmaAttend.needs <= target.features and not list(WgmmaAttend(size, 1, False, 1.0, value_size).problems())


@tile_op
class WgmmaAttend(Intrinsic):
    """wgmma_attend(out, stages, top, weights, broken, queries, keys, values, tables, first, end) dims(page_stride, token_heads, rows):
    compute the attention of tokens of one sequence to its keys.

    out       the result: [tokens, token_heads, size of a value]
    stages    shared memory for stages and queries
    top       the largest score of each row before the first key, as a logarithm to base 2: the score of its sink, or -inf without a sink
    weights   the sum of weights of each row before the first key: 1 for a sink, otherwise 0
    broken    becomes 1 if a mean is not finite in a split of which some row does not see all keys; that mean may be wrong
    queries   [tokens, token_heads, size]
    keys      page 0 of the cache; page p begins p * `page_stride` elements after it
    values    likewise; not read if values are the beginnings of keys
    tables    the pages of the sequence
    first     for each token, the first position that it sees; `end`: one past the last position

    The rows of a token, one for each of `heads` heads, are adjacent. Only the first `rows` rows are computed."""

    name: ClassVar[str] = "wgmma_attend"
    threads: ClassVar[int] = 2 * WARPS * LANES
    needs: ClassVar[Features] = Features(["sm_90a"])
    crowded: ClassVar[bool] = True
    shared_alignment: ClassVar[int] = 1024  # the swizzle depends on addresses
    size: int  # number of elements of a key
    heads: int  # number of heads of each token whose attention a block computes
    rounds: bool  # whether `out` is bf16
    unit: float  # positive; a score times `unit` is a logarithm to base 2
    value_size: int = 0  # if not 0, values are the first `value_size` elements of keys
    scale: float = 1.0  # with `softcap`, a score is softcap * tanh(scale * query . key / softcap), otherwise query . key
    softcap: float = 0.0

    @property
    def operands(self) -> tuple[Operand, ...]:
        out = Operand("out", DType.BF16 if self.rounds else DType.F32, written=True)
        shared = Operand("stages", DType.F32, written=True), Operand("top", DType.F32), Operand("weights", DType.F32)
        rows = Operand("broken", DType.I32, written=True), Operand("queries", DType.F32)
        pages = Operand("keys", DType.BF16), Operand("values", DType.BF16), Operand("tables", DType.I32)
        return out, *shared, *rows, *pages, Operand("first", DType.I32), Operand("end", DType.I32)

    @property
    def dims(self) -> tuple[str, ...]:
        return "page_stride", "token_heads", "rows"

    @property
    def enough_blocks(self) -> int:
        return 1

    def problems(self) -> Iterator[str]:
        step, most = (PAGE, LARGEST) if self.size <= LARGEST_WHOLE and not self.is_latent else (PART, LARGEST)
        if self.is_latent:
            most = LARGEST_LATENT
            if self.value_size % (2 * PART) or not 2 * PART <= self.value_size <= min(self.size, 2 * LARGEST):
                yield f"value_size is {self.value_size}, expected a multiple of {2 * PART} up to {min(self.size, 2 * LARGEST)}"
        if self.size % step or not PAGE <= self.size <= most:
            yield f"size is {self.size}, expected a multiple of {step} up to {most}"
        if not 1 <= self.heads <= self.block_rows:
            yield f"heads are {self.heads}, expected 1 to {self.block_rows}"

    # --- what a block computes -------------------------------------------------------------------------------------------

    @property
    def is_latent(self) -> bool:
        """Whether values are the beginnings of keys."""
        return self.value_size != 0

    @property
    def block_rows(self) -> int:
        """The number of rows of a block. For latents, both warpgroups compute the same rows: each multiplies half of every value."""
        return HALF_ROWS if self.is_latent else 2 * HALF_ROWS

    @property
    def out_size(self) -> int:
        """The number of elements of a value."""
        return self.value_size or self.size

    @property
    def columns(self) -> int:
        """The number of elements of values that a warpgroup multiplies."""
        return self.value_size // 2 if self.is_latent else self.size

    @property
    def value_part(self) -> int:
        """The number of elements of values that are multiplied at a time."""
        return PART if self.parts == 1 else PART // 2  # registers hold products of two parts at once

    # --- shared memory ---------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """The number of bytes of a part of a line of values."""
        return next(width for width in WIDTHS if 2 * self.size % width == 0)

    @property
    def half_bytes(self) -> int:
        """The number of bytes of the keys, or of the values, of a stage."""
        return SPLIT * self.size * 2

    @property
    def halves(self) -> int:
        """The number of halves of a stage: keys, and values unless these are in the keys."""
        return 1 if self.is_latent else 2

    @property
    def stage_bytes(self) -> int:
        return self.halves * self.half_bytes

    @property
    def stages(self) -> int:
        return STAGES if self.parts == 1 else 1

    @property
    def parts(self) -> int:
        """The number of parts of keys, and of values, that are copied and awaited one by one. With one stage, a part of the next split is
        copied as soon as both warpgroups have multiplied the same part of this split."""
        return self.size // PART if self.is_latent or self.size > LARGEST_WHOLE else 1

    @property
    def queries_at(self) -> int:
        """The offset in shared memory of the queries."""
        return self.stages * self.stage_bytes

    @property
    def barriers_at(self) -> int:
        """The offset in shared memory of the mbarriers, one for each part of each half of a stage."""
        return self.queries_at + self.block_rows * self.size * 2

    @property
    def num_barriers(self) -> int:
        return self.halves * self.stages * self.parts

    @property
    def kept_at(self) -> int:
        """The offset in shared memory of the numbers that threads read again instead of keeping them in registers."""
        return self.barriers_at + self.num_barriers * 8

    @property
    def shared_bytes(self) -> int:
        return self.kept_at + KEPT_BYTES

    # --- meaning ---------------------------------------------------------------------------------------------------------

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        out, _, top, weights, broken, queries, keys, values, tables, first, end = arrays
        stride, token_heads, rows = dims
        tokens = -(-rows // self.heads)
        low, high = int(first[:tokens].min()), int(end[:tokens].max())
        tops, sums, means = top[:rows].copy(), weights[:rows].copy(), np.zeros((rows, self.out_size), np.float32)
        token, head = np.divmod(np.arange(rows), self.heads)
        row = (token * token_heads + head)[:, None]
        given = queries[row * self.size + np.arange(self.size)].astype(keys.dtype).astype(np.float64)
        for split in range(low // SPLIT, -(-high // SPLIT)):
            at = np.arange(split * SPLIT, (split + 1) * SPLIT)
            held = [int(tables[n]) * stride if low <= n * PAGE + PAGE - 1 and n * PAGE < high else None for n in at[::PAGE] // PAGE]
            k, v = np.zeros((SPLIT, self.size)), np.zeros((SPLIT, self.size))
            for i, place in enumerate(held):
                if place is not None:
                    k[i * PAGE : (i + 1) * PAGE] = keys[place:][: self.size * PAGE].reshape(self.size, PAGE).T
                    v[i * PAGE : (i + 1) * PAGE] = values[place:][: self.size * PAGE].reshape(PAGE, self.size)
            v = k[:, : self.value_size].copy() if self.is_latent else v
            v[(at < low) | (at >= high)] = 0.0
            sees = (first[token, None] <= at) & (at < end[token, None])
            products = _product(given, k)
            if self.softcap:
                products = np.tanh(products * np.float32(self.scale) / np.float32(self.softcap)) * np.float32(self.softcap)
            scores = np.where(sees, products * np.float32(self.unit), np.float32(-np.inf))
            largest = np.maximum(tops, scores.max(1))
            base = np.where(np.isneginf(largest), np.float32(0), largest)
            own = np.where(np.isneginf(scores.max(1)), np.float32(0), scores.max(1))
            found = np.exp2(scores - own[:, None]).astype(keys.dtype).astype(np.float32)
            mean = _product(found.astype(np.float64), v.T)
            earlier, later = np.exp2(tops - base), np.exp2(scores.max(1) - base)
            sums, means = sums * earlier + found.sum(1) * later, means * earlier[:, None] + mean * later[:, None]
            tops = largest
            if not sees.all() and not np.isfinite(mean).all():
                broken[0] = 1
        out[row * self.out_size + np.arange(self.out_size)] = means / sums[:, None]

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        from compiler.machine.intrinsics.wgmma_attend_code import AttendCode  # it imports this module
        from compiler.machine.intrinsics.wgmma_attend_parts import LatentCode, PartCode

        kind = LatentCode if self.is_latent else PartCode if self.parts > 1 else AttendCode
        kind(self, code, pointers, dims).run()


def _product(left: Array, right: Array) -> Array:
    """Return the products of rows of `left` and `right`, summed 16 at a time as the tensor cores do."""
    total = np.zeros((len(left), len(right)), np.float32)
    for r in range(0, left.shape[1], PAGE):
        total = (total + left[:, r : r + PAGE] @ right[:, r : r + PAGE].T).astype(np.float32)
    return total
