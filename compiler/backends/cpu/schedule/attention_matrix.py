"""A block of keys and values for some rows of paged attention on a matrix unit.

The unit multiplies bf16, which pages hold: queries and weights are rounded to it. Keys and values are interleaved in pairs as they are
taken from their page, for all rows that share them; values that nobody sees become zero on the way, as 0 * NaN is no 0.

A row has the same bits whatever stands beside it: what a block gives is summed apart and joined to the row's own sums by the row alone.
What it does not see has weight 0, and adds a zero: that changes at most the sign of a zero, which is lost where the unit adds to its +0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from compiler.backends.cpu.schedule.attention_rows import BLOCK, F32, PAGE, PAGES, Column, Rows, Seen, ask, capped, hidden_unless
from compiler.backends.cpu.schedule.nests import halves, lanes, loop, seq, when
from compiler.backends.cpu.schedule.pieces import exp_of_difference, f32, larger, local, plus, to_all_lanes
from compiler.forms.nest import allocated
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Const, Fn, Load, Scalar, Stmt, Store, Tile

HEIGHT = 32  # rows of a product, at most
CHUNK = 2 * 8  # rows that are interleaved at a time
BF16 = DType.BF16


def rows_of_unit(count: int, blocks: int, size: int) -> Rows:
    """Queries are [rows, depth]; scores of the blocks at hand are [blocks, rows, BLOCK], weights those of one block."""
    return Rows(
        local("queries", count, depth_of(size), dtype=BF16),
        local("scores", blocks, count, BLOCK),
        local("weights", count, BLOCK, dtype=BF16),
        local("top", count, PAGE),
        local("sums", count, PAGE),
        local("values", count, size // PAGE, PAGE),
    )


def blank_queries(rows: Rows, row: Dim, size: int) -> list[Stmt]:
    """Zeros up to a whole number of steps."""
    return [zeros(Load(rows.queries, (row, Dim.of(at)))) for at in range(size, depth_of(size), PAGE)]


@dataclass(frozen=True, slots=True)
class MatrixKernel:
    rows: Rows
    cache: Buffer
    layer: Dim
    size: int
    softcap: float
    count: int  # rows that share a kv head
    keys: Buffer  # [depth / 2, BLOCK, 2]
    taken: Buffer  # [panels, BLOCK / 2, BLOCK, 2]: the values of a block
    products: Buffer  # [panels, rows, BLOCK]: of weights and values
    change: Buffer  # [rows]: what the maximum's change makes of what was summed before

    @staticmethod
    def of(rows: Rows, cache: Buffer, layer: Dim, size: int, softcap: float, count: int) -> MatrixKernel:
        depth, panels = depth_of(size), -(-size // BLOCK)
        keys = local("keys", depth // 2, 2 * BLOCK, dtype=BF16)
        taken, products = local("taken", panels, BLOCK // 2, 2 * BLOCK, dtype=BF16), local("products", panels, count, BLOCK)
        return MatrixKernel(rows, cache, layer, size, softcap, count, keys, taken, products, local("change", count))

    def around(self, body: Stmt) -> Stmt:
        """The body with the unit made ready for it."""
        configure = Tile("amx_configure", (), (), {"rows": self.height})
        buffers = (self.keys, self.taken, self.products, self.change)
        return allocated(buffers, seq(configure, *(self.blanks() if self.size % BLOCK else []), body))

    def blanks(self) -> list[Stmt]:
        """Zeros where neither keys nor values come."""
        pairs, depth, left = self.size // 2, depth_of(self.size), self.size % BLOCK
        panel = self.taken.shape[0] - 1
        keys = loop("r", depth // 2 - pairs, lambda r: loop("c", 2 * PAGES, lambda c: zeros(Load(self.keys, (pairs + r, c * PAGE)))))
        parts = 2 * (BLOCK - left) // PAGE
        values = loop("r", BLOCK // 2, lambda r: loop("c", parts, lambda c: zeros(Load(self.taken, (panel, r, 2 * left + c * PAGE)))))
        return [keys, values]

    @property
    def height(self) -> int:
        """Of the tiles of rows, all of them alike."""
        return next(h for h in range(HEIGHT, 0, -1) if self.count % h == 0)

    # --- scores --------------------------------------------------------------------------------------------------------

    def scores(self, block: Sequence[Column], row: Dim, place: Dim) -> Stmt:
        """Of the rows from `row` on."""
        depth = depth_of(self.size)

        def tile(m: Dim) -> Stmt:
            places = Load(self.rows.scores, (place, row + m, Dim.of(0))), Load(self.rows.queries, (row + m, Dim.of(0)))
            return self.product(*places, Load(self.keys, (Dim.of(0), Dim.of(0))), depth)

        return seq(*(self.take_keys(v, column) for v, column in enumerate(block)), self.tiles(tile))

    def take_keys(self, v: int, column: Column) -> Stmt:
        """A page holds elements of keys as rows."""

        def some(r: Dim) -> Stmt:
            target, source = Load(self.keys, (r * (CHUNK // 2), Dim.of(2 * PAGE * v))), self.place(column, 0, r * (CHUNK * PAGE))
            pairs = Tile("amx_pairs", (target, source), (Dim.of(2 * BLOCK), Dim.of(PAGE)), {"columns": PAGE})
            return seq(*self.ask(column, 0, r * (CHUNK * PAGE), CHUNK * PAGE), pairs)

        return loop("r", self.size // CHUNK, some)

    # --- weights -------------------------------------------------------------------------------------------------------

    def weigh(self, m: Dim, row: Dim, place: Dim, start: Dim, seen: Seen | None) -> Stmt:
        """Scores of a row become weights, `sums` takes them in, and what was summed before is to change with the maximum."""
        w, pages = self.rows, range(PAGES)
        found, most, top = local("found", PAGES, PAGE), local("most", PAGE), Load(w.top, (row, Dim.of(0)))

        def score(v: int, lane: Dim) -> Scalar:
            value = capped(Load(w.scores, (place, row, v * PAGE + lane)), self.softcap)
            return value if seen is None else hidden_unless(seen, start + v * PAGE + lane, value)

        def weight(v: int, lane: Dim) -> Load:
            return Load(found, (Dim.of(v), lane))

        def each(value: Callable[[int, Dim], Scalar]) -> list[Stmt]:
            return [lanes(PAGE, lambda lane, v=v: Store(found, (Dim.of(v), lane), value(v, lane))) for v in pages]

        def rounded(v: int) -> Stmt:
            return Tile("round_bf16", (Load(w.weights, (m, Dim.of(v * PAGE))), weight(v, Dim.of(0))))

        def total(lane: Dim) -> Stmt:
            weights = [f32(Load(w.weights, (m, v * PAGE + lane))) for v in pages]
            return Store(w.sums, (row, lane), Apply(Fn.FMA, (Load(w.sums, (row, lane)), Load(self.change, (m,)), reduce(plus, weights))))

        raised = seq(
            Store(self.change, (m,), exp_of_difference(top, Load(most, (Dim.of(0),)))),
            lanes(PAGE, lambda lane: Store(w.top, (row, lane), Load(most, (lane,)))),
        )
        return allocated(
            (found, most),
            seq(
                *each(score),
                lanes(PAGE, lambda lane: Store(most, (lane,), reduce(larger, [weight(v, lane) for v in pages]))),
                *to_all_lanes(most),
                Store(self.change, (m,), Const(1.0, F32)),
                when(Apply(Fn.LT, (top, Load(most, (Dim.of(0),)))), raised),
                *each(lambda v, lane: exp_of_difference(weight(v, lane), Load(w.top, (row, lane)))),
                *map(rounded, pages),
                lanes(PAGE, total),
            ),
        )

    # --- values --------------------------------------------------------------------------------------------------------

    def take_values(self, block: Sequence[Column], low: Dim, high: Dim) -> Stmt:
        """Of the keys from `low` to `high`; zeros of others."""

        def panel(v: int, column: Column, p: Dim, columns: int) -> Stmt:
            target, source = Load(self.taken, (p, Dim.of(v * PAGE // 2), Dim.of(0))), self.place(column, 1, p * BLOCK)
            dims = (Dim.of(2 * BLOCK), Dim.of(self.size), low - column.start, high + 1 - column.start)
            asked = self.ask(column, 1, p * (BLOCK * PAGE), columns * PAGE)
            return seq(*asked, Tile("amx_pairs", (target, source), dims, {"columns": columns}))

        def page(v: int, column: Column) -> Stmt:
            whole, left = divmod(self.size, BLOCK)
            rest = [panel(v, column, Dim.of(whole), left)] if left else []
            return seq(*([loop("p", whole, lambda p: panel(v, column, p, BLOCK))] if whole else []), *rest)

        return seq(*(page(v, column) for v, column in enumerate(block)))

    def multiply(self) -> Stmt:
        """The weights of all rows by the values at hand."""

        def tile(m: Dim, p: Dim) -> Stmt:
            places = Load(self.products, (p, m, Dim.of(0))), Load(self.rows.weights, (m, Dim.of(0)))
            return self.product(*places, Load(self.taken, (p, Dim.of(0), Dim.of(0))), BLOCK)

        return loop("p", self.products.shape[0], lambda p: self.tiles(lambda m: tile(m, p)))

    def add(self, m: Dim, row: Dim) -> Stmt:
        def part(c: Dim, lane: Dim) -> Stmt:
            at, found = (row, c, lane), Load(self.products, (c // PAGES, m, c % PAGES * PAGE + lane))
            return Store(self.rows.values, at, Apply(Fn.FMA, (Load(self.rows.values, at), Load(self.change, (m,)), found)))

        return loop("c", self.size // PAGE, lambda c: lanes(PAGE, lambda lane: part(c, lane)))

    def spoiled(self, suspect: Scalar, body: Callable[[Scalar], Stmt]) -> Stmt:
        """Whether a value at hand is no finite number, so that it would reach rows which do not see it; only looked for in a suspect."""
        found, (panels, pairs, length) = local("found", PAGE), self.taken.shape

        def look(p: Dim, r: Dim, c: Dim, lane: Dim) -> Stmt:
            x = f32(Load(self.taken, (p, r, c * PAGE + lane)))
            return Store(found, (lane,), plus(Load(found, (lane,)), Apply(Fn.SUB, (x, x))))

        def line(p: Dim, r: Dim) -> Stmt:
            return loop("c", length // PAGE, lambda c: lanes(PAGE, lambda lane: look(p, r, c, lane)))

        return allocated(
            (found,),
            seq(
                lanes(PAGE, lambda lane: Store(found, (lane,), Const(0.0, F32))),
                when(suspect, loop("p", panels, lambda p: loop("r", pairs, lambda r: line(p, r)))),
                *halves(found, Fn.ADD),
                body(Apply(Fn.NE, (Load(found, (Dim.of(0),)), Const(0.0, F32)))),
            ),
        )

    # --- pieces --------------------------------------------------------------------------------------------------------

    def tiles(self, tile: Callable[[Dim], Stmt]) -> Stmt:
        return loop("io", self.count // self.height, lambda io: tile(io * self.height))

    def product(self, total: Load, rows: Load, pairs: Load, depth: int) -> Stmt:
        attrs = {"rows": self.height, "columns": BLOCK, "fresh": 1}
        return Tile("amx_bf16_near", (total, rows, pairs), (Dim.of(depth), Dim.of(depth)), attrs)

    def ask(self, column: Column, which: int, first: Dim, length: int) -> list[Stmt]:
        return ask(self.cache, self.layer, column, which, first, length)

    def place(self, column: Column, which: int, index: Dim) -> Load:
        return Load(self.cache, (self.layer, Dim.of(which), column.page, column.kv_head, index))


def depth_of(size: int) -> int:
    """Of products with keys, in whole steps of the unit."""
    return -(-size // BLOCK) * BLOCK


def zeros(place: Load) -> Stmt:
    *outer, last = place.indices
    return lanes(PAGE, lambda lane: Store(place.buffer, (*outer, last + lane), Const(0.0, BF16)))
