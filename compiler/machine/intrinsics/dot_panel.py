"""Exact sums of products of signed by unsigned integers, in registers: `dot_panel` for rows of bytes, `dot_words` for rows of 16-bit
words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.numbers import Kind
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, fence, in_register, splat, vec
from compiler.machine.formats import FOUR, PANEL6, PANEL8_WORDS, TABLE_PANELS, THIRDS
from compiler.machine.intrinsics.prefetch import AHEAD, prefetch_line, prefetch_lines, prefetch_twice
from compiler.machine.intrinsics.product import ProductOp
from compiler.machine.product_steps import avx2, avx512, neon, portable, wasm
from compiler.machine.product_steps.step import LARGEST, Halves, Parts, Step
from compiler.machine.target import LINE_BYTES, Target

FOURS = {8: 1, 6: 4, 4: 2, 2: 4}  # number of groups of four neighbours along k that a step reads, by bits of a weight
UNROLLED = 4  # number of loads of each register of b per iteration of the loop along k, if a has a single row
SIGN = 0x80  # sign bit of a byte
MOST_SMALL = 127  # largest number of a table in steps for small numbers: they add two products with rows of bytes in 16 bits
FEW_ROWS = 4  # up to this many rows of a tile, a product waits for memory rather than for instructions
LINES = 4  # number of lines of a panel beside which zeros are looked for at once
FEW = 4  # up to this many accumulators do not hide the latency of additions, so each half of the bytes gets separate accumulators

# The steps for rows of bytes and for rows of words, the fastest first. A tile uses the first one that the target supports.
_BYTES = (
    avx512.SIGNED_BY_UNSIGNED,
    avx2.SIGNED_BY_UNSIGNED,
    neon.SIGNED_BY_UNSIGNED,
    neon.SIGNED_BY_SIGNED,
    avx512.SIGNED_BY_SMALL,
    avx2.SIGNED_BY_SMALL,
    wasm.SIGNED_BY_SMALL,
    wasm.WIDE_BY_SMALL,
    portable.SIGNED_BY_SMALL,
)
_WORDS = (avx512.WORDS_BY_UNSIGNED, avx2.WORDS_BY_UNSIGNED, wasm.WORDS_BY_UNSIGNED, portable.WORDS_BY_UNSIGNED)


@dataclass(frozen=True, slots=True)
class _PanelOp(ProductOp):
    """A product by a panel in a format of compiler/machine/formats.py. Sums are modulo 2^32. `columns` is a multiple of the lanes of a
    register (16, 8 or 4).

    If the panel is in L1, the product does not prefetch it. Instead, it can prefetch memory that is read later: each four elements along k
    prefetch one cache line of each operand `later0`, `later1` and so on, one line after another.
    """

    accumulator: ClassVar[DType] = DType.I32
    panel_dtype: ClassVar[DType] = DType.U8

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return operands with a panel of any element type, because the format `ScaledPanels` stores panels in words."""
        given = Operand("c", self.accumulator, written=True), Operand("a", self.row_dtype), Operand("b", None)
        return *given, *(Operand(f"later{i}", None) for i in range(self.num_later))

    @property
    def num_later(self) -> int:
        raise NotImplementedError

    def step(self, target: Target) -> Step | None:
        raise NotImplementedError

    def runs_on(self, target: Target) -> bool:
        return self.step(target) is not None

    def _add(self, fours: Array, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        """Add to c the product of the rows of a and `fours`: the weights of a panel, [k / 4, columns, 4]."""
        (c, a, *_), (k, stride), (rows, columns) = arrays, dims, (self.rows, self.columns)
        left = np.stack([a[i * stride : i * stride + k] for i in range(rows)]).astype(np.int32)
        c[: rows * columns] += (left @ fours.swapaxes(1, 2).reshape(k, columns).astype(np.int32)).reshape(-1)

    def _emit(
        self,
        bits: int,
        code: Code,
        pointers: Sequence[str],
        dims: Sequence[int | str],
        target: Target,
        *,
        cached: bool,
        table: Sequence[int] = (),
        upper: bool = False,
    ) -> None:
        step = self.step(target)
        assert step is not None, (target, self)
        # A single row needs prefetches too: a core computes so much for each byte that the loads it has begun cover too few bytes.
        panel = _Panel(self, bits, code, pointers, dims, step, table, prefetches=not cached)
        if upper:
            panel.run_upper()
        else:
            panel.run()


@tile_op
class DotPanel(_PanelOp):
    """dot_panel(c, a, b) dims(k, stride): a product as in product.py. 32 bits of a column hold 4 weights of 8 bits, 8 of 4 bits
    or 16 of 2 bits, and 96 bits hold 16 weights of 6 bits. So k is a multiple of 4, 8 or 16."""

    name: ClassVar[str] = "dot_panel"
    row_dtype: ClassVar[DType] = DType.I8
    bits: int  # bits of an element of b: 8, 6, 4 or 2
    kind: str = Kind.INT  # the kind of numbers of b. If it has a table, b is a panel of `TABLE_PANELS`
    cached_panel: bool = False
    later: int = 0
    # a is the upper plane of rows of 16 bits, which is zero except for outliers: products count 256 times, and zeros are skipped.
    upper: bool = False

    def problems(self) -> Iterator[str]:
        if self.kind != Kind.INT and self.kind not in TABLE_PANELS:
            yield f"kind is {self.kind}, expected {Kind.INT} or one of {', '.join(TABLE_PANELS)}"
        elif self.bits not in (known := (8, 6, 4) if self.kind == Kind.INT else (TABLE_PANELS[Kind(self.kind)].bits,)):
            yield f"bits are {self.bits}, expected {' or '.join(map(str, known))} for numbers of kind {self.kind}"
        if self.upper and (self.bits == 6 or self.later):
            yield f"bits are {self.bits} and later is {self.later}, expected 8, 4 or 2, and 0 with upper planes"

    @property
    def table(self) -> tuple[int, ...]:
        """The unsigned number for each pattern of 4 bits; empty if the patterns are the numbers."""
        if self.kind == Kind.INT or self.bits != 4:
            return ()
        format = TABLE_PANELS[Kind(self.kind)]
        return tuple(int(n) + format.offset for n in format.numbers)

    @property
    def num_later(self) -> int:
        return self.later

    def step(self, target: Target) -> Step | None:
        step = next((s for s in _BYTES if s.runs_on(target)), None)
        if step is None or self.bits > step.bits or (self.table and step.look_up is None):
            return None
        return step if step.bits == 8 or max((0, *self.table)) <= MOST_SMALL else None

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        if self.upper:
            wide = (arrays[0], arrays[1].astype(np.int32) << 8, *arrays[2:])
            replace(self, upper=False).meaning(wide, dims)
            return
        stored = arrays[2].view(np.uint8)[: dims[0] * self.columns * self.bits // 8].reshape(-1, 1, self.columns, FOUR)
        if self.bits == 6:
            numbers = PANEL6.stored(stored.reshape(1, -1, self.columns * FOUR))  # [columns, k]
            self._add(numbers.reshape(self.columns, -1, FOUR).swapaxes(0, 1), arrays, dims)
            return
        mask = (1 << self.bits) - 1
        halves = stored if self.bits == 8 else np.concatenate([stored >> shift & mask for shift in range(0, 8, self.bits)], 1)
        halves = np.array(self.table, np.uint8)[halves] if self.table else halves
        self._add(halves.reshape(-1, self.columns, FOUR), arrays, dims)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        self._emit(self.bits, code, pointers, dims, target, cached=self.cached_panel or self.upper, table=self.table, upper=self.upper)


@tile_op
class DotWords(_PanelOp):
    """dot_words(c, a, b) dims(k, stride): a product as in product.py. Rows are i16, b is a panel in the format `PANEL8_WORDS`, and k is a
    multiple of 4."""

    name: ClassVar[str] = "dot_words"
    row_dtype: ClassVar[DType] = DType.I16
    cached_panel: bool = False
    later: int = 0

    @property
    def num_later(self) -> int:
        return self.later

    def step(self, target: Target) -> Step | None:
        return next((s for s in _WORDS if s.runs_on(target)), None)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        stored = arrays[2][: dims[0] * self.columns].reshape(-1, self.columns, FOUR)
        self._add(stored[..., PANEL8_WORDS.order], arrays, dims)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        self._emit(8, code, pointers, dims, target, cached=self.cached_panel)


class _Panel:
    def __init__(
        self,
        op: ProductOp,
        bits: int,
        code: Code,
        pointers: Sequence[str],
        dims: Sequence[int | str],
        step: Step,
        table: Sequence[int],
        *,
        prefetches: bool,
    ) -> None:
        self.code, self.step, self.table, self.prefetches = code, step, table, prefetches
        self.c, self.a, self.b, *self.later = pointers
        self.k, self.stride = dims
        self.rows, self.columns, self.bits = op.rows, op.columns, bits
        assert self.columns % step.lanes == 0, (self.columns, step.lanes)
        self.vector, self.half_vector = vec("i32", step.lanes), vec("i16", 2 * step.lanes)
        self.vectors = range(self.columns // step.lanes)
        self.halves = FOURS[self.bits]
        self.loads = THIRDS if self.bits == 6 else 1  # number of loads of each register of b in a step
        self.words = op.row_dtype.num_bytes  # number of 32-bit words that four neighbours along k of a row fill
        self.separate_halves = self.halves == 2 and self.rows * len(self.vectors) <= FEW and step.bits == 8 and not step.signed
        self.in_place = self.separate_halves and not table  # whether the upper four bits of bytes stay where they are
        # The instruction multiplies signed bytes, so `_half` subtracts 128 from the bytes of the panel. At the end, 128 times the sum of
        # each row's elements is added back.
        self.is_shifted = step.signed and (self.bits == 8 or max((0, *table)) >= SIGN)
        if table and self.is_shifted:
            self.table = [n ^ SIGN for n in table]
        # Functions that add up products in 16 bits, if they can add up those of one load.
        self.in_halves = step.halves if step.halves is not None and self.most_halves(step.halves) >= self.halves else None
        self.in_order = step.in_order and self.rows == 1 and self.in_halves is not None
        self.places = [(i, j) for i in range(self.rows) for j in self.vectors]

    def run(self) -> None:
        code = self.code
        totals, added = self._totals({place: self._load(self._accumulator(*place)) for place in self.places})
        rows = self._rows()
        deep, unrolled = self._steps()
        with code.loop("0", deep, runs=not deep.startswith("%")) as index:
            gathered: dict[str, str] = {}
            for u in range(unrolled):
                self._deep(totals, gathered, added, rows, code.op(f"add nuw nsw i64 {self._times(index, unrolled)}, {u}"))
                if self.in_order:
                    gathered = dict(zip(gathered, fence(code, list(gathered.values()), self.half_vector), strict=True))
            assert self.in_halves is None or unrolled * self.halves <= self.most_halves(self.in_halves)
            self._widen(gathered)
        for place in self.places:
            code.do(f"store {self.vector} {self._total(totals, added, *place)}, ptr {self._accumulator(*place)}, align 4")

    def run_upper(self) -> None:
        """Add 256 times the products of those lines of the panel beside which a row has a number other than zero."""
        code, size = self.code, FOUR * self.halves  # bytes of a row beside a line of the panel
        count = next(n for n in (LINES, 2, 1) if n == 1 or (isinstance(self.k, int) and self.k % (n * size) == 0))
        rows = self._rows()
        chunks = self.k // (count * size) if isinstance(self.k, int) else code.op(f"sdiv i64 {self.k}, {size}")
        with code.loop("0", str(chunks), runs=isinstance(chunks, int)) as chunk:
            first = code.op(f"mul nsw i64 {chunk}, {count}")
            lines, left = self._lines(rows, first, count, 8 * size), code.alloca("i64")
            with code.when(code.op(f"icmp ne i64 {lines}, 0")):
                code.do(f"store i64 {lines}, ptr {left}")
                totals, added = self._totals(dict.fromkeys(self.places, "zeroinitializer"))
                half_sums = self._half_sums(count, (*totals.values(), *added))
                with code.loop("0", code.op(f"call i64 @llvm.ctpop.i64(i64 {lines})"), runs=True):
                    some = code.op(f"load i64, ptr {left}")
                    line = code.op(f"call i64 @llvm.cttz.i64(i64 {some}, i1 true)")
                    less, gathered = code.op(f"sub i64 {some}, 1"), dict[str, str]()
                    code.do(f"store i64 {code.op(f'and i64 {some}, {less}')}, ptr {left}")
                    self._deep(totals, gathered, added, rows, code.op(f"add nsw i64 {first}, {line}"))
                    if half_sums:
                        self._join(gathered, half_sums)
                    else:
                        self._widen(gathered)
                self._widen({total: code.op(f"load {self.half_vector}, ptr {place}") for total, place in half_sums.items()})
                for place in self.places:
                    value = code.op(f"shl {self.vector} {self._total(totals, added, *place)}, {splat('8', 'i32', self.step.lanes)}")
                    accumulator = self._accumulator(*place)
                    total = code.op(f"add {self.vector} {self._load(accumulator)}, {value}")
                    code.do(f"store {self.vector} {total}, ptr {accumulator}, align 4")

    def _half_sums(self, count: int, totals: Sequence[str]) -> dict[str, str]:
        """Return variables for 16-bit sums of `count` lines, which must still be added to the totals. Return none of them if such sums do
        not fit in 16 bits."""
        if self.in_halves is None or count * self.halves > self.most_halves(self.in_halves):
            return {}
        found = {total: self.code.alloca(self.half_vector) for total in totals}
        for place in found.values():
            self.code.do(f"store {self.half_vector} zeroinitializer, ptr {place}")
        return found

    def _join(self, gathered: Mapping[str, str], sums: Mapping[str, str]) -> None:
        """Add the 16-bit sums of a line to those of the lines before."""
        code = self.code
        for total, some in gathered.items():
            assert self.in_halves is not None
            before = code.op(f"load {self.half_vector}, ptr {sums[total]}")
            code.do(f"store {self.half_vector} {self.in_halves.join(code, before, some)}, ptr {sums[total]}")

    def _lines(self, rows: Sequence[str], first: str, count: int, bits: int) -> str:
        """Return an integer with a bit for each of `count` lines: 1 if a row has a number other than zero beside this line. A row has
        `bits` bits beside a line."""
        code, kind = self.code, vec(f"i{bits}", count)
        places = [code.op(f"getelementptr i{bits}, ptr {row}, i64 {first}") for row in rows]
        numbers = [code.op(f"load {kind}, ptr {place}, align 1") for place in places]
        found = numbers[0]
        for other in numbers[1:]:
            found = code.op(f"or {kind} {found}, {other}")
        differ = code.op(f"icmp ne {kind} {found}, {splat('0', f'i{bits}', count)}")
        differ = differ if count == 1 else code.op(f"bitcast <{count} x i1> {differ} to i{count}")
        return code.op(f"zext i{count} {differ} to i64")

    def _rows(self) -> list[str]:
        element = "i16" if self.words == 2 else "i8"
        return [self.code.op(f"getelementptr {element}, ptr {self.a}, i64 {self._times(self.stride, i)}") for i in range(self.rows)]

    def _totals(self, begins: Mapping[tuple[int, int], str]) -> tuple[dict[tuple[int, int, int], str], list[str]]:
        """Return variables for the sums, which begin with these values, and for the sums of the elements of each row."""
        code = self.code
        totals = {(*place, part): code.alloca(self.vector) for place in self.places for part in range(2 if self.separate_halves else 1)}
        for (i, j, part), total in totals.items():
            code.do(f"store {self.vector} {'zeroinitializer' if part else begins[i, j]}, ptr {total}")
        added = [code.alloca(self.vector) for _ in range(self.rows if self.is_shifted else 0)]
        for place in added:
            code.do(f"store {self.vector} zeroinitializer, ptr {place}")
        return totals, added

    def _widen(self, gathered: Mapping[str, str]) -> None:
        """Add the 16-bit sums to their totals."""
        for total, some in gathered.items():
            assert self.in_halves is not None
            self.code.do(f"store {self.vector} {self.in_halves.widen(self.code, self._load(total), some)}, ptr {total}, align 4")

    def _total(self, totals: Mapping[tuple[int, int, int], str], added: Sequence[str], i: int, j: int) -> str:
        """Return the finished sum of row `i` and the columns of register `j`."""
        code, lanes = self.code, self.step.lanes
        value = self._load(totals[i, j, 0])
        if self.separate_halves:
            upper = self._load(totals[i, j, 1])
            if self.in_place:
                upper = code.op(f"ashr {self.vector} {upper}, {splat('4', 'i32', lanes)}")
            value = code.op(f"add {self.vector} {value}, {upper}")
        if added:
            missing = code.op(f"shl {self.vector} {self._load(added[i])}, {splat('7', 'i32', lanes)}")
            value = code.op(f"add {self.vector} {value}, {missing}")
        return value

    def _steps(self) -> tuple[str, int]:
        """Return the number of iterations of the loop along k, and the loads of each register of b per iteration."""
        if not isinstance(self.k, int):
            return self.code.op(f"sdiv i64 {self.k}, {FOUR * self.halves}"), 1
        deep = self.k // (FOUR * self.halves)
        most = UNROLLED if self.rows == 1 else self.step.unrolled
        if self.table and self.in_halves is not None:
            most = min(most, self.most_halves(self.in_halves) // self.halves)
        unrolled = next(u for u in (most, 2, 1) if deep % u == 0)
        return str(deep // unrolled), unrolled

    def most_halves(self, halves: Halves) -> int:
        """Return the number of products that can be added up in 16 bits."""
        return halves.most * LARGEST // (max(self.table) if self.table else (1 << self.bits) - 1)

    def _deep(self, totals: dict[tuple[int, int, int], str], gathered: dict[str, str], added: list[str], rows: list[str], at: str) -> None:
        """Emit the products of one load of each register of b. `gathered` maps a total to 16-bit sums that must still be added to it.
        `added` holds the sum of each row's elements, if the bytes of the panel are shifted."""
        code, step = self.code, self.step
        panel = code.op(f"getelementptr [{self.loads * self.columns} x i32], ptr {self.b}, i64 {at}")
        loaded = [] if self.bits == 6 else [self._line(panel, 0, j) for j in self.vectors]
        last: dict[int, str] = {}  # with weights of 6 bits, for each register: the parts read so far of the last four neighbours along k
        if self.prefetches:
            read = self.loads * self.columns * FOUR
            if self.bits == 8 or self.rows > FEW_ROWS:
                prefetch_lines(code, panel, AHEAD, read, far=True)
            else:
                prefetch_twice(code, panel, read)
        for place in self.later:
            line = code.op(f"getelementptr [{LINE_BYTES} x i8], ptr {place}, i64 {at}")
            prefetch_line(code, line, far=True)
        for half in range(self.halves):
            fours = [self._sixes(panel, j, half, last) if self.bits == 6 else self._half(loaded[j], half) for j in self.vectors]
            right = [step.right(code, x) for x in fours]
            for i, row in enumerate(rows):
                left = self._left(
                    code.op(f"getelementptr [{self.halves * self.words} x i32], ptr {row}, i64 {at}, i64 {half * self.words}")
                )
                if added:
                    ones = step.right(code, splat(str(0x01010101), "i32", step.lanes))
                    self._add(added[i], gathered, left, ones)
                for j in self.vectors:
                    self._add(totals[i, j, half if self.separate_halves else 0], gathered, left, right[j])

    def _left(self, place: str) -> Parts:
        """Load four neighbours along k of a row of a, and prepare them as left operands."""
        code = self.code
        found = [code.op(f"load i32, ptr {code.op(f'getelementptr i32, ptr {place}, i64 {w}')}, align 1") for w in range(self.words)]
        return tuple(part for x in found for part in self.step.left(code, x))

    def _add(self, total: str, gathered: dict[str, str], left: Parts, right: Parts) -> None:
        code, halves = self.code, self.in_halves
        if halves is None:
            code.do(f"store {self.vector} {self.step.add(code, self._load(total), left, right)}, ptr {total}, align 4")
            return
        product = halves.product(code, left, right)
        gathered[total] = halves.join(code, gathered[total], product) if total in gathered else product

    def _half(self, words: str, half: int) -> str:
        """Return the weights in one part of each byte: the whole byte, a half of it (weights of 4 bits) or a quarter (2 bits). Codes are
        looked up in the table. If the upper halves have accumulators of their own, leave their bits in place: the sums are then 16 times
        too large, and `run` divides them."""
        lanes = self.step.lanes
        if self.bits == 8:
            signs = splat(str(SIGN * 0x01010101 - 2**32), "i32", lanes)
            return self.code.op(f"xor {self.vector} {words}, {signs}") if self.is_shifted else words
        if half and self.in_place:
            return self.code.op(f"and {self.vector} {words}, {splat(str(0xF0F0F0F0 - 2**32), 'i32', lanes)}")
        if half:
            words = self.code.op(f"lshr {self.vector} {words}, {splat(str(half * self.bits), 'i32', lanes)}")
        mask = splat(str(((1 << self.bits) - 1) * 0x01010101), "i32", lanes)
        mask = in_register(self.code, mask, self.vector) if self.step.in_order else mask
        bits = self.code.op(f"and {self.vector} {words}, {mask}")
        if not self.table:
            return bits
        assert self.step.look_up is not None, self.step
        return self.step.look_up(self.code, [(n ^ SIGN) - SIGN for n in self.table], bits)  # LLVM writes bytes as signed numbers

    def _sixes(self, panel: str, j: int, four: int, last: dict[int, str]) -> str:
        """Return one of the four groups of neighbours along k that three lines hold in the format `PANEL6`. A line is read when its own
        group is multiplied, and adds its third to the last group, so that few registers are in use."""
        code, lanes = self.code, self.step.lanes
        if four == THIRDS:
            return last[j]
        words = self._line(panel, four, j)
        moved = code.op(f"lshr {self.vector} {words}, {splat(str(6 - 2 * four), 'i32', lanes)}")
        part = code.op(f"and {self.vector} {moved}, {splat(str(0x03030303 << 2 * four), 'i32', lanes)}")
        last[j] = code.op(f"or {self.vector} {last[j]}, {part}") if four else part
        return code.op(f"and {self.vector} {words}, {splat(str(0x3F3F3F3F), 'i32', lanes)}")

    def _line(self, panel: str, line: int, j: int) -> str:
        """Load a register of a line."""
        return self._load(self.code.op(f"getelementptr i32, ptr {panel}, i64 {line * self.columns + j * self.step.lanes}"))

    def _times(self, a: int | str, b: int) -> str:
        return self.code.op(f"mul nsw i64 {a}, {b}")

    def _accumulator(self, row: int, vector: int) -> str:
        return self.code.op(f"getelementptr i32, ptr {self.c}, i64 {row * self.columns + vector * self.step.lanes}")

    def _load(self, pointer: str) -> str:
        return self.code.op(f"load {self.vector}, ptr {pointer}, align 4")
