"""Emit the code of `dot_panel` and `dot_words` (dot_panel.py): exact sums of products of signed by unsigned integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.llvm.ssa import Code, fence, in_register, splat, vec
from compiler.machine.formats import FOUR, THIRDS
from compiler.machine.intrinsics.prefetch import AHEAD, prefetch_line, prefetch_lines, prefetch_twice
from compiler.machine.intrinsics.product import ProductOp
from compiler.machine.product_steps.step import LARGEST, Halves, Parts, Step
from compiler.machine.target import LINE_BYTES

FOURS = {8: 1, 6: 4, 4: 2, 2: 4}  # number of groups of four neighbours along k that a step reads, by bits of a weight
UNROLLED = 4  # number of loads of each register of b per iteration of the loop along k, if a has a single row
SIGN = 0x80  # sign bit of a byte
FEW_ROWS = 4  # up to this many rows of a tile, a product waits for memory rather than for instructions
LINES = 4  # maximum number of lines of a panel that an iteration over upper planes covers
FEW = 4  # up to this many accumulators do not hide the latency of additions, so lower and upper halves of bytes get separate accumulators

Place = tuple[int, int]  # a row of the tile, and a register of its columns


class Panel:
    """The code of one product. `c`, `a`, `b` and `later` are the pointers of the operands, and `k` and `stride` are the dimensions of the
    tile."""

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
        """`bits` is the number of bits of a weight. `table` has the unsigned numbers that codes stand for, and is empty if weights are no
        codes. `prefetches` says whether the product prefetches the panel."""
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
        # If the instruction multiplies signed bytes, and numbers of the panel may be above 127, `_half` subtracts 128 from each number. At
        # the end, 128 times the sum of each row's elements is added back.
        self.is_shifted = step.signed and (self.bits == 8 or max((0, *table)) >= SIGN)
        if table and self.is_shifted:
            self.table = [n ^ SIGN for n in table]
        # Functions that add up products in 16 bits. None if the step has none, or if 16 bits cannot hold the sum of the products of one
        # load.
        self.in_halves = step.halves if step.halves is not None and self.most_halves(step.halves) >= self.halves else None
        self.in_order = step.in_order and self.rows == 1 and self.in_halves is not None
        self.places = [(i, j) for i in range(self.rows) for j in self.vectors]

    def run(self) -> None:
        """Emit the product of rows that are not `capped`: if they have planes, each plane counts as a row."""
        self._store(self._sums(self._begins(), self._rows()))

    def run_capped(self) -> None:
        """Add the products of both planes of each row. In the upper plane, multiply only those lines of the panel for which a row has
        numbers other than zero."""
        if self.in_halves is None:
            self._store(self._sums(self._with_upper(), self._rows(1)))
        else:
            self._store(self._sums(self._begins(), self._rows(1)))
            self._add_upper()

    def _begins(self) -> dict[Place, str]:
        """Load the accumulators at c."""
        return {place: self._load(self._accumulator(*place)) for place in self.places}

    def _sums(self, begins: Mapping[Place, str], rows: Sequence[str]) -> dict[Place, str]:
        """Return the sums of all products of the rows. The sums begin with the values in `begins`."""
        code = self.code
        totals, added = self._totals(begins)
        deep, unrolled = self._steps()
        with code.loop("0", deep, runs=not deep.startswith("%")) as index:
            gathered: dict[str, str] = {}
            for u in range(unrolled):
                self._deep(totals, gathered, added, rows, code.op(f"add nuw nsw i64 {self._times(index, unrolled)}, {u}"))
                if self.in_order:
                    gathered = dict(zip(gathered, fence(code, list(gathered.values()), self.half_vector), strict=True))
            assert self.in_halves is None or unrolled * self.halves <= self.most_halves(self.in_halves)
            self._widen(gathered)
        return {place: self._total(totals, added, *place) for place in self.places}

    def _store(self, sums: Mapping[Place, str]) -> None:
        """Store sums at c."""
        for place, total in sums.items():
            self.code.do(f"store {self.vector} {total}, ptr {self._accumulator(*place)}, align 4")

    # --- upper planes ----------------------------------------------------------------------------------------------------

    def _with_upper(self) -> dict[Place, str]:
        """Return the accumulators plus 256 times the products of the upper planes. For each row, multiply only the lines of the panel for
        which this row has numbers other than zero.

        The core cannot predict where outliers are. Scalar instructions look for them, before the products of the lower planes. Scalar
        instructions do not wait for vector units, so the core notices a mispredicted branch while vector units still compute products of
        earlier groups."""
        code, rows, size = self.code, self._rows(0), FOUR * self.halves  # bytes of a row that a line of the panel multiplies
        count = LINES if self.rows == 1 and isinstance(self.k, int) and self.k % (LINES * size) == 0 else 1
        chunks = self.k // (count * size) if isinstance(self.k, int) else code.op(f"sdiv i64 {self.k}, {size}")
        totals, added = self._totals(dict.fromkeys(self.places, "zeroinitializer"))
        with code.loop("0", str(chunks), runs=isinstance(chunks, int)) as chunk:
            for number in range(count):
                line = code.op(f"add nsw i64 {self._times(chunk, count)}, {number}")
                for row, pointer in enumerate(rows):
                    place = code.op(f"getelementptr i{8 * size}, ptr {pointer}, i64 {line}")
                    numbers = code.op(f"load i{8 * size}, ptr {place}, align 1")
                    with code.when(code.op(f"icmp ne i{8 * size} {numbers}, 0")):
                        self._deep(totals, {}, added, {row: pointer}, line, prefetches=False)
        return {place: self._plus_upper(place, self._total(totals, added, *place)) for place in self.places}

    def _plus_upper(self, place: Place, upper: str) -> str:
        """Return an accumulator plus 256 times a sum of the upper plane."""
        value = self.code.op(f"shl {self.vector} {upper}, {splat('8', 'i32', self.step.lanes)}")
        return self.code.op(f"add {self.vector} {self._load(self._accumulator(*place))}, {value}")

    def _add_upper(self) -> None:
        """Add 256 times the products of the upper planes to the accumulators. If one row has a number other than zero for a line of the
        panel, all rows multiply this line, so that the sums of several lines are widened to 32 bits once."""
        code, size = self.code, FOUR * self.halves
        count = next(n for n in (LINES, 2, 1) if n == 1 or (isinstance(self.k, int) and self.k % (n * size) == 0))
        rows = self._rows(0)
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
                    self._deep(totals, gathered, added, rows, code.op(f"add nsw i64 {first}, {line}"), prefetches=False)
                    if half_sums:
                        self._join(gathered, half_sums)
                    else:
                        self._widen(gathered)
                self._widen({total: code.op(f"load {self.half_vector}, ptr {place}") for total, place in half_sums.items()})
                self._store({place: self._plus_upper(place, self._total(totals, added, *place)) for place in self.places})

    def _half_sums(self, count: int, totals: Sequence[str]) -> dict[str, str]:
        """Return a variable for each total, for 16-bit sums of `count` lines that must still be added to the total. Return no variables if
        such sums may exceed 16 bits."""
        assert self.in_halves is not None
        if count * self.halves > self.most_halves(self.in_halves):
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
        """Return an integer with a bit for each of `count` lines: 1 if a row has a number other than zero that this line multiplies. A line
        multiplies `bits` bits of a row."""
        code, kind = self.code, vec(f"i{bits}", count)
        places = [code.op(f"getelementptr i{bits}, ptr {row}, i64 {first}") for row in rows]
        numbers = [code.op(f"load {kind}, ptr {place}, align 1") for place in places]
        found = numbers[0]
        for other in numbers[1:]:
            found = code.op(f"or {kind} {found}, {other}")
        differ = code.op(f"icmp ne {kind} {found}, {splat('0', f'i{bits}', count)}")
        differ = differ if count == 1 else code.op(f"bitcast <{count} x i1> {differ} to i{count}")
        return code.op(f"zext i{count} {differ} to i64")

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _rows(self, plane: int | None = None) -> list[str]:
        """Return pointers to the rows. If a plane is given, rows have two planes, and the pointers are those of this plane."""
        element = "i16" if self.words == 2 else "i8"
        numbers = range(self.rows) if plane is None else range(plane, 2 * self.rows, 2)
        return [self.code.op(f"getelementptr {element}, ptr {self.a}, i64 {self._times(self.stride, i)}") for i in numbers]

    def _totals(self, begins: Mapping[tuple[int, int], str]) -> tuple[dict[tuple[int, int, int], str], list[str]]:
        """Return variables for the sums, which begin with the values of `begins`, and, if 128 is subtracted from the bytes of the panel
        (`is_shifted`), for the sum of each row's elements."""
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
        """Return the finished sum of row `i` and the columns of register `j`: the variables for the lower and the upper halves of bytes
        together and, if 128 was subtracted from the bytes of the panel (`is_shifted`), 128 times the sum of the row's elements."""
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
        """Return the number of iterations of the loop along k, and the loads of each register of b per iteration: one if k is known only at
        run time, otherwise a divisor of the number of loads along k."""
        if not isinstance(self.k, int):
            return self.code.op(f"sdiv i64 {self.k}, {FOUR * self.halves}"), 1
        deep = self.k // (FOUR * self.halves)
        most = UNROLLED if self.rows == 1 else self.step.unrolled
        if self.table and self.in_halves is not None:
            most = min(most, self.most_halves(self.in_halves) // self.halves)
        unrolled = next(u for u in (most, 2, 1) if deep % u == 0)
        return str(deep // unrolled), unrolled

    def most_halves(self, halves: Halves) -> int:
        """Return the maximum number of results of `halves.product` that can be added up in 16 bits."""
        return halves.most * LARGEST // (max(self.table) if self.table else (1 << self.bits) - 1)

    def _deep(
        self,
        totals: Mapping[tuple[int, int, int], str],
        gathered: dict[str, str],
        added: Sequence[str],
        rows: Sequence[str] | Mapping[int, str],
        at: str,
        *,
        prefetches: bool | None = None,
    ) -> None:
        """Emit the products of one load of each register of b with `rows`: all rows, or some rows by their numbers. With weights of 6 bits,
        emit the products of three loads of each register instead. `gathered` maps a total to 16-bit sums that must still be added to it.
        `added` holds the sum of each row's elements, if 128 is subtracted from the bytes of the panel (`is_shifted`)."""
        code, step = self.code, self.step
        panel = code.op(f"getelementptr [{self.loads * self.columns} x i32], ptr {self.b}, i64 {at}")
        loaded = [] if self.bits == 6 else [self._line(panel, 0, j) for j in self.vectors]
        last: dict[int, str] = {}  # with weights of 6 bits, for each register: the parts read so far of the last four neighbours along k
        if self.prefetches if prefetches is None else prefetches:
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
            for i, row in rows.items() if isinstance(rows, Mapping) else enumerate(rows):
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
        """Add the products of two operands to a total, or in 16 bits to the sums that `gathered` has for it."""
        code, halves = self.code, self.in_halves
        if halves is None:
            code.do(f"store {self.vector} {self.step.add(code, self._load(total), left, right)}, ptr {total}, align 4")
            return
        product = halves.product(code, left, right)
        gathered[total] = halves.join(code, gathered[total], product) if total in gathered else product

    def _half(self, words: str, half: int) -> str:
        """Return the weights in one part of each byte: the whole byte, a half of it (weights of 4 bits) or a quarter (2 bits). Codes are
        looked up in the table. If `in_place`, leave the bits of upper halves where they are: their sums are then 16 times too large, and
        `_total` divides them."""
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
        """Return one of the four groups of neighbours along k that three lines hold in the format `PANEL6`. Each of the first three groups
        is read with its line, which also has a part of the last group. `last` collects these parts. In this way, only few registers are in
        use."""
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
