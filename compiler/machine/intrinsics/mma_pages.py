"""Attention on the tensor cores of a GPU, for one split of a sequence's keys: products of a block's rows with the keys, and of attention
weights with the values.

A row is a pair of a token and a head. One `mma.sync` multiplies 16 keys, or 16 elements of values, by 8 rows. Pages have the same layout on
all machines: along the innermost axis, a page of keys has its 16 keys, and a page of values has the elements of one value. The instruction
needs pairs along the axis that is summed, which is not the innermost axis, except where values are the beginnings of keys. So a lane loads
words with two neighbours along the innermost axis, and exchanges halves between two such words. The order along the summed axis is free
within an instruction, as long as both operands have the same order, so a lane multiplies four adjacent numbers.

An accumulator adds 16 products at a time, in the order of elements or of pages, so the bits of a result do not depend on `rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, LANES, SHARED, SHARED_BYTES, WARPS, BlockCode
from compiler.machine.target import GPU, Target
from runtime.cache_groups import PAGE_SIZE as PAGE

SPLIT = WARPS * LANES  # number of keys in a split
MOST_STEPS = 8  # maximum number of steps of 16 elements whose keys a lane holds in registers at once
HEIGHTS = (64, 32, 16, EIGHT)  # numbers of rows of a block; the first is for multiprocessors with much shared memory
ENOUGH_BLOCKS = 2  # blocks that fit the shared memory of a multiprocessor of sm_89; with so few, a thread may use 255 registers
# Targets whose multiprocessors have 228 KB of shared memory, and the maximum number of bytes of a block so that two blocks fit.
ROOMY, ROOMY_BYTES = Features(["sm_90a", "sm_100a"]), 100 << 10
SPARE_BYTES = 2 << 10  # bytes of shared memory for the block's numbers of rows, tokens and pages
MOST_WORDS = 32  # maximum number of words of values that a lane loads at once
FOUR = 4  # number of adjacent elements along the summed axis that a lane multiplies


def query_pitch(size: int) -> int:
    """Return the distance in elements between rows of queries."""
    return size + 16


def scratch_pitch(size: int) -> int:
    """Return the distance in floats between rows of scores, and between rows of weighted means of values. With this distance, lanes that
    read weights at the same time use different banks."""
    return max(SPLIT, -(-size // 32) * 32) + 16


def rows_for(size: int, value_size: int, target: Target) -> int:
    """Return the maximum number of rows of a block whose queries, scores and two sets of weighted means of values fit in shared memory.
    Return 0 if no number of rows fits, or if a size is not a multiple of PAGE."""
    is_roomy = bool(ROOMY & target.features)
    room = (ROOMY_BYTES if is_roomy else SHARED_BYTES) - SPARE_BYTES
    for rows in HEIGHTS[not is_roomy :] if size % PAGE == value_size % PAGE == 0 else ():
        if rows * (2 * query_pitch(size) + 4 * value_size + 4 * scratch_pitch(size)) <= room:
            return rows
    return 0


@dataclass(frozen=True, slots=True)
class PageTile(Intrinsic):
    """NAME(c, given, held, pages): the product of a block's rows with the keys, or of its attention weights with the values, in the pages
    of a split. `pages` has the number of each page of the split. `held` begins at page 0 of the cache; page p begins p * `page_stride`
    elements after it."""

    threads: ClassVar[int] = SPLIT
    given: ClassVar[str]  # name of the operand with the block's rows
    given_dtype: ClassVar[DType]
    held: ClassVar[str]  # name of the operand with the pages
    bounds: ClassVar[tuple[str, str]]  # names of the dimensions that say which part of the split is multiplied
    rows: int
    size: int  # number of elements of a key or a value
    blocks: int = ENOUGH_BLOCKS  # number of blocks that must fit a multiprocessor at once

    @property
    def operands(self) -> tuple[Operand, ...]:
        c, given = Operand("c", DType.F32, written=True), Operand(self.given, self.given_dtype)
        return c, given, Operand(self.held, DType.BF16), Operand("pages", DType.I32)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("page_stride", *self.bounds)

    @property
    def enough_blocks(self) -> int:
        return self.blocks

    @property
    def pitch(self) -> int:
        return scratch_pitch(self.size)

    def problems(self) -> Iterator[str]:
        if self.rows % EIGHT or self.rows < EIGHT:
            yield f"rows are {self.rows}, expected a multiple of {EIGHT}"
        if self.size % PAGE or self.size < PAGE:
            yield f"size is {self.size}, expected a multiple of {PAGE}"

    def runs_on(self, target: Target) -> bool:
        return target.system == GPU


@tile_op
class PageScores(PageTile):
    """page_scores(c, queries, keys, pages) dims(page_stride, first, end): c[i, n * 16 + j] = sum over r of queries[i, r] * element r of key
    j of page n, for the pages first .. end - 1 of a split."""

    name: ClassVar[str] = "page_scores"
    given: ClassVar[str] = "queries"
    given_dtype: ClassVar[DType] = DType.BF16
    held: ClassVar[str] = "keys"
    bounds: ClassVar[tuple[str, str]] = ("first", "end")

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, queries, keys, pages), (stride, first, end) = arrays, dims
        rows = queries[: self.rows * query_pitch(self.size)].reshape(self.rows, -1)[:, : self.size].astype(np.float64)
        out = c[: self.rows * self.pitch].reshape(self.rows, self.pitch)
        for n in range(first, end):
            page = keys[int(pages[n]) * stride :][: self.size * PAGE].reshape(self.size, PAGE).astype(np.float64)
            total = np.zeros((self.rows, PAGE), np.float32)
            for r in range(0, self.size, PAGE):
                total = (total + rows[:, r : r + PAGE] @ page[r : r + PAGE]).astype(np.float32)
            out[:, n * PAGE : (n + 1) * PAGE] = total

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        """Emit the code of the tile. Each of the four warps computes every fourth page."""
        b, (stride, first, end) = BlockCode(code), (str(d) for d in dims)
        c, queries, pages = (b.in_shared(pointers[i]) for i in (0, 1, 3))
        own_keys = b.gep(GLOBAL, b.in_global(pointers[2]), b.plus(b.times(b.quad, FOUR * PAGE * 2), b.times(b.group, 4)))
        own_queries = b.gep(SHARED, queries, b.plus(b.times(b.group, query_pitch(self.size) * 2), b.times(b.quad, FOUR * 2)))
        own_scores = b.gep(SHARED, c, b.plus(b.times(b.quad, 2 * self.pitch * 4), b.times(b.group, 8)))
        with code.loop(b.plus(first, b.warp), end, step=str(WARPS)) as n:
            page = b.gep(GLOBAL, own_keys, _page_bytes(b, pages, n, stride))
            sums = [["0.0"] * 4 for _ in range(self.rows // EIGHT)]
            steps = range(self.size // PAGE)
            for some in (steps[at : at + MOST_STEPS] for at in range(0, len(steps), MOST_STEPS)):
                left = [_fragments(b, [b.words(GLOBAL, page, str((s * PAGE + i) * PAGE * 2), 1) for i in range(FOUR)])[0] for s in some]
                for j in range(len(sums)):
                    for s, keys in zip(some, left, strict=True):
                        right = b.words(SHARED, own_queries, str((j * EIGHT * query_pitch(self.size) + s * PAGE) * 2), 2)
                        sums[j] = b.mma(keys, right, sums[j])
            at = b.times(n, PAGE * 4)
            for j, found in enumerate(sums):
                for e in range(2):
                    b.store_vector((found[e], found[e + 2]), own_scores, b.plus(at, str((j * EIGHT + e) * self.pitch * 4)))


@tile_op
class PageValues(PageTile):
    """page_values(c, weights, values, pages) dims(page_stride, low, high): c[i, j] = sum over n of weights[i, n] * values[n, j], for the
    keys low .. high - 1 of a split. Values of other keys are not multiplied, so they may contain anything. Weights are f32 that bf16
    represents exactly, in rows that are as far apart as those of scores. c may overlap the weights. If `key_size` is not 0, values are the
    beginnings of keys of this size, and `values` is the memory of the keys."""

    name: ClassVar[str] = "page_values"
    given: ClassVar[str] = "weights"
    given_dtype: ClassVar[DType] = DType.F32
    held: ClassVar[str] = "values"
    bounds: ClassVar[tuple[str, str]] = ("low", "high")
    key_size: int = 0

    @property
    def pitch(self) -> int:
        return scratch_pitch(self.key_size or self.size)

    def problems(self) -> Iterator[str]:
        yield from PageTile.problems(self)
        if self.key_size and self.key_size < self.size:
            yield f"key_size is {self.key_size}, expected 0, or at least the {self.size} elements of a value"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, weights, values, pages), (stride, low, high) = arrays, dims
        rows = weights[: self.rows * self.pitch].reshape(self.rows, self.pitch).astype(np.float64)
        total = np.zeros((self.rows, self.size), np.float32)
        for n in range(low // PAGE, -(-high // PAGE)):
            page = values[int(pages[n]) * stride :][: self.size * PAGE].astype(np.float64)
            page = page.reshape(self.size, PAGE).T if self.key_size else page.reshape(PAGE, self.size)
            keys = np.arange(n * PAGE, (n + 1) * PAGE)
            seen = np.where(((low <= keys) & (keys < high))[:, None], page, 0.0)
            total = (total + rows[:, keys] @ seen).astype(np.float32)
        c[: self.rows * self.pitch].reshape(self.rows, -1)[:, : self.size] = total

    @property
    def width(self) -> int:
        """The number of elements of values that a warp multiplies at a time."""
        return 32 if self.size % (32 * WARPS) == 0 else 16

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Values(self, code, pointers, dims).run()


class _Values(BlockCode):
    """Emits the code of `PageValues`. Each of the four warps computes every fourth range of `width` elements, for all keys."""

    def __init__(self, op: PageValues, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Compute the addresses from which this lane reads and to which it writes, and allocate its accumulators. `pointers` and `dims` are
        those of the tile `op`."""
        super().__init__(code)
        self.op = op
        self.stride, self.low, self.high = (str(d) for d in dims)
        self.c, weights, self.pages = (self.in_shared(pointers[i]) for i in (0, 1, 3))
        self.own_weights = self.gep(SHARED, weights, self.plus(self.times(self.group, self.op.pitch * 4), self.times(self.quad, FOUR * 4)))
        per_lane = op.width // EIGHT  # number of adjacent elements of a value that a lane multiplies
        # Distances in bytes from the first key of a lane to that of the next lane, and between elements.
        key, element = (FOUR * 2, PAGE * 2) if op.key_size else (FOUR * op.size * 2, 2)
        at = self.plus(self.times(self.quad, key), self.times(self.group, per_lane * element))
        self.own_values = self.gep(GLOBAL, self.in_global(pointers[2]), self.plus(at, self.times(self.warp, op.width * element)))
        row = self.times(self.quad, 2 * op.pitch * 4)
        column = self.plus(self.times(self.group, per_lane * 4), self.times(self.warp, op.width * 4))
        self.own_means = self.gep(SHARED, self.c, self.plus(row, column))
        self.num_ranges = op.size // op.width
        shape = (-(-self.num_ranges // WARPS), op.width // PAGE, op.rows // EIGHT)  # numbers of ranges, 16-element parts, 8-row parts
        words = shape[0] * (2 * per_lane if op.key_size else FOUR * op.width // PAGE)  # number of words of a lane's part of a page
        self.at_once = max(1, MOST_WORDS // words)
        self.sums = [[[self._accumulator() for _ in range(shape[2])] for _ in range(shape[1])] for _ in range(shape[0])]

    def _accumulator(self) -> list[str]:
        places = [self.code.alloca("float") for _ in range(4)]
        self.store_floats(["0.0"] * 4, places)
        return places

    def run(self) -> None:
        """Emit the code: add the pages `at_once` at a time if all their keys are multiplied, otherwise one by one; then store the
        results."""
        code = self.code
        end = self.divided(self.plus(self.high, str(PAGE - 1)), PAGE)
        with code.loop(self.divided(self.low, PAGE), end, step=str(self.at_once)) as first:
            after = code.op(f"call i64 @llvm.smin.i64(i64 {self.plus(first, str(self.at_once))}, i64 {end})")
            is_whole = code.op(f"icmp eq i64 {after}, {self.plus(first, str(self.at_once))}")
            self.code.either(
                code.op(f"and i1 {is_whole}, {self._sees_all(first, after)}"),
                lambda: self._add_pages([self.plus(first, str(u)) for u in range(self.at_once)]),
                lambda: self._add_each_page(first, after),
            )
        self.barrier()  # c may overlap the weights, so wait until all warps have read them
        for number, sums in enumerate(self.sums):
            with self._of_warp(number):
                self._store(number, sums)

    def _add_each_page(self, first: str, after: str) -> None:
        """Add the products of pages one by one, masked if some keys of a page are not multiplied."""
        with self.code.loop(first, after) as n:
            is_whole = self._sees_all(n, self.plus(n, "1"))
            self.code.either(is_whole, lambda: self._add_pages([n]), lambda: self._add_pages([n], masked=True))

    def _sees_all(self, first: str, after: str) -> str:
        """Return whether all keys of the pages `first` to `after` - 1 are multiplied."""
        code = self.code
        begins = code.op(f"icmp sge i64 {self.times(first, PAGE)}, {self.low}")
        ends = code.op(f"icmp sle i64 {self.times(after, PAGE)}, {self.high}")
        return code.op(f"and i1 {begins}, {ends}")

    def _add_pages(self, numbers: Sequence[str], *, masked: bool = False) -> None:
        """Add the products of some pages. If `masked`, there is one page, of which some keys are not multiplied, and loaded values pass
        through selects; the assembler waits for such loads at once. Without selects, the loads of all pages are in flight together."""
        op = self.op
        pages = [self.gep(GLOBAL, self.own_values, _page_bytes(self, self.pages, n, self.stride)) for n in numbers]
        weights = [self.gep(SHARED, self.own_weights, self.times(n, PAGE * 4)) for n in numbers]
        right = [[self._weights(of_page, j) for j in range(op.rows // EIGHT)] for of_page in weights]
        seen: list[str] | None = None
        if masked:
            (n,) = numbers
            key = self.plus(self.times(n, PAGE), self.times(self.quad, FOUR))
            seen = [self._is_seen(self.plus(key, str(i))) for i in range(FOUR)]
        read = self._from_keys if op.key_size else self._from_values
        for number, sums in enumerate(self.sums):
            with self._of_warp(number):
                lines = [read(page, number) for page in pages]
                for of_page, factors in zip(lines, right, strict=True):
                    self._multiply(of_page, seen, factors, sums)

    def _of_warp(self, number: int) -> AbstractContextManager[None]:
        """Open a block of code that runs only on the warps that have a range with this number."""
        if (number + 1) * WARPS <= self.num_ranges:
            return nullcontext()
        return self.code.when(self.code.op(f"icmp ult i64 {self.warp}, {self.num_ranges - number * WARPS}"))

    def _is_seen(self, key: str) -> str:
        """Return whether a key is multiplied."""
        lower, upper = self.code.op(f"icmp sge i64 {key}, {self.low}"), self.code.op(f"icmp slt i64 {key}, {self.high}")
        return self.code.op(f"and i1 {lower}, {upper}")

    def _weights(self, base: str, j: int) -> list[str]:
        """Return this lane's weights of the `j`-th 8 rows: those of four keys for one row, as two pairs of bf16."""
        held = self.words(SHARED, base, str(j * EIGHT * self.op.pitch * 4), 4)
        return [self.high_halves(held[i], held[i + 1]) for i in (0, 2)]

    def _multiply(
        self, lines: Sequence[Sequence[str]], seen: Sequence[str] | None, right: Sequence[Sequence[str]], sums: list[list[list[str]]]
    ) -> None:
        """Add the products of one page to `sums`. `lines` are the words of values that the lane has loaded, `right` are its weights, and
        `seen` says which of its keys are multiplied; None means all."""
        fragments = self._of_keys(lines, seen) if self.op.key_size else self._of_values(lines, seen)
        for left, of_pair in zip(fragments, sums, strict=True):
            for places, weights in zip(of_pair, right, strict=True):
                self.store_floats(self.mma(left, weights, self.load_floats(places)), places)

    def _from_values(self, page: str, number: int) -> list[list[str]]:
        """Load this lane's part of a page: for each of its four keys, the words of adjacent elements."""
        op = self.op
        begin = number * WARPS * op.width
        return [self.words(GLOBAL, page, str((i * op.size + begin) * 2), op.width // PAGE) for i in range(FOUR)]

    def _of_values(self, lines: Sequence[Sequence[str]], seen: Sequence[str] | None) -> list[list[str]]:
        """Return the left operands, with zeros in place of the values of keys that are not multiplied."""
        if seen is None:
            return _fragments(self, lines)
        chosen = [[self.code.op(f"select i1 {key}, i32 {word}, i32 0") for word in words] for key, words in zip(seen, lines, strict=True)]
        return _fragments(self, chosen)

    def _from_keys(self, page: str, number: int) -> list[list[str]]:
        """Load this lane's part of a page in which values are the beginnings of keys. Return two words for each of the lane's elements in
        the range `number` of a warp: this element of the lane's four keys. A word already is a pair of neighbours on the summed axis, as
        the instruction needs it."""
        begin = number * WARPS * self.op.width
        return [self.words(GLOBAL, page, str((begin + e) * PAGE * 2), 2) for e in range(self.op.width // EIGHT)]

    def _of_keys(self, lines: Sequence[Sequence[str]], seen: Sequence[str] | None) -> list[list[str]]:
        """Return the left operands from the words of `_from_keys`, with zeros for keys that are not multiplied."""
        code, elements = self.code, [list(line) for line in lines]
        if seen is not None:
            halves = [
                [code.op(f"select i1 {seen[2 * pair + i]}, i32 {(0xFFFF, -0x10000)[i]}, i32 0") for i in range(2)] for pair in range(2)
            ]
            masks = [code.op(f"or i32 {low}, {high}") for low, high in halves]
            elements = [[code.op(f"and i32 {word}, {mask}") for word, mask in zip(words, masks, strict=True)] for words in elements]
        return [[line[pair] for pair in range(2) for line in elements[e : e + 2]] for e in range(0, len(elements), 2)]

    def _store(self, number: int, sums: list[list[list[str]]]) -> None:
        """Store the results of this warp's range `number` in c."""
        for j in range(self.op.rows // EIGHT):
            found = [self.load_floats(of_pair[j]) for of_pair in sums]
            for e in range(2):
                at = ((j * EIGHT + e) * self.op.pitch + number * WARPS * self.op.width) * 4
                self.store_vector([x for sums_of in found for x in (sums_of[e], sums_of[e + 2])], self.own_means, str(at))


def _page_bytes(b: BlockCode, pages: str, n: str, stride: str) -> str:
    """Return the offset in bytes, from page 0 of the cache, of the page that is number `n` in the split."""
    page = b.code.op(f"load i32, {SHARED} {b.gep(SHARED, pages, n, 'i32')}, align 4")
    return b.times(b.code.op(f"mul i64 {b.code.op(f'sext i32 {page} to i64')}, {stride}"), 2)


def _fragments(b: BlockCode, lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return left operands of `mma.sync`, each made from one word of each of four lines. A word has two neighbours of its line; the four
    lines follow each other along the summed axis."""
    return [
        [half(pair[0], pair[1]) for pair in (words[:2], words[2:]) for half in (b.low_halves, b.high_halves)]
        for words in zip(*lines, strict=True)
    ]
