"""A few pages of keys and values for some rows of paged attention: scores, weights, weighted values.

Scores and sums are made in register tiles of several rows, which share what they load of keys and values. Every score adds its products in
the order of elements, and every sum in the order of keys (attention_products.py): so a row has the same bits whatever stands beside it in
the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from compiler.backends.cpu.schedule.attention_products import Keys, Pairs, Singles
from compiler.backends.cpu.schedule.attention_rows import F32, PAGE, Column, Rows, Seen, ask, capped, hidden_unless
from compiler.backends.cpu.schedule.nests import lanes, loop, seq, unroll, when
from compiler.backends.cpu.schedule.pieces import exp_of_difference, f32, larger, local, mul, plus, to_all_lanes
from compiler.backends.cpu.schedule.spot import TileShape
from compiler.forms.nest import allocated
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops import Apply, Buffer, Const, Fn, Load, Scalar, Stmt, Store

UNROLLED = 4  # steps of a product written out


@dataclass(frozen=True, slots=True)
class Kernel:
    """The register tiles of a walk."""

    rows: Rows
    cache: Buffer
    scales: Buffer | None  # of an 8-bit cache
    layer: Dim
    size: int
    width: int  # lanes of a part of a value
    softcap: float
    tile: TileShape
    products: Singles | Pairs

    @property
    def parts(self) -> int:
        return self.size // self.width

    @property
    def most(self) -> int:
        """Accumulators of a register tile."""
        return self.tile.rows * self.tile.vectors

    # --- scores --------------------------------------------------------------------------------------------------------

    def scores(self, columns: Sequence[Column], n: int, seen: Seen | None) -> Stmt:
        """Of `n` rows of each column; they see all of it, or what `seen` says."""
        score = local("score", len(columns), n, PAGE)

        def each(body: Callable[[int, Dim, Dim], Stmt]) -> Stmt:
            return seq(*(unroll("m", n, lambda m, v=v: lanes(PAGE, lambda lane: body(v, m, lane))) for v in range(len(columns))))

        unrolled = self.products.step * next(u for u in (UNROLLED, 2, 1) if self.size % (u * self.products.step) == 0)

        def elements(r: Dim) -> Stmt:
            asked = [s for c in columns for s in self.ask(c, 0, r * (unrolled * PAGE), unrolled * PAGE)]
            steps = range(0, unrolled, self.products.step)
            return seq(*asked, *(self.products.scores(columns, n, r * unrolled + u, score) for u in steps))

        def put(v: int, m: Dim, lane: Dim) -> Stmt:
            column = columns[v]
            value = self.score(column, Load(score, (Dim.of(v), m, lane)), lane)
            if seen is not None:
                value = hidden_unless(seen, column.start + lane, value)
            return Store(self.rows.scores, (column.row + m, column.place, lane), value)

        start = each(lambda v, m, lane: Store(score, (Dim.of(v), m, lane), Const(0.0, F32)))
        return allocated((score,), seq(start, loop("r", self.size // unrolled, elements), each(put)))

    def score(self, column: Column, value: Scalar, lane: Dim) -> Scalar:
        if self.scales is not None:
            value = mul(value, self.scale(column, 0, lane))
        return capped(value, self.softcap)

    # --- weights -------------------------------------------------------------------------------------------------------

    def weigh(self, row: Dim, block: Sequence[Column]) -> Stmt:
        """Scores become weights; `sums` takes them in. The scale of an 8-bit value goes into its weight."""
        w, most = self.rows, local("most", PAGE)

        def score(column: Column, lane: Dim) -> Load:
            return Load(w.scores, (row, column.place, lane))

        def weight(column: Column, lane: Dim) -> Stmt:
            return Store(w.scores, (row, column.place, lane), exp_of_difference(score(column, lane), Load(w.top, (row, lane))))

        def summed(lane: Dim) -> Stmt:
            found = [f32(Load(w.weights, (row, column.place, lane))) for column in block]
            return Store(w.sums, (row, lane), plus(Load(w.sums, (row, lane)), reduce(plus, found)))

        def decoded(column: Column, lane: Dim) -> Stmt:
            return Store(w.scores, (row, column.place, lane), mul(score(column, lane), self.scale(column, 1, lane)))

        def each_page(body: Callable[[Column, Dim], Stmt]) -> list[Stmt]:
            return [lanes(PAGE, lambda lane, column=column: body(column, lane)) for column in block]

        raises = Apply(Fn.LT, (Load(w.top, (row, Dim.of(0))), Load(most, (Dim.of(0),))))
        return allocated(
            (most,),
            seq(
                lanes(PAGE, lambda lane: Store(most, (lane,), reduce(larger, [score(column, lane) for column in block]))),
                *to_all_lanes(most),
                when(raises, self.raised(row, most)),
                *each_page(weight),
                *(s for column in block for s in self.products.weigh(row, column)),
                lanes(PAGE, summed),
                *(each_page(decoded) if self.scales is not None else []),
            ),
        )

    def raised(self, row: Dim, most: Buffer) -> Stmt:
        """All that was summed before changes with the maximum."""
        w, change = self.rows, local("change", PAGE)

        def times_change(buffer: Buffer, at: Callable[[Dim], tuple[Dim, ...]], width: int) -> Stmt:
            return lanes(width, lambda lane: Store(buffer, at(lane), mul(Load(buffer, at(lane)), Load(change, (lane,)))))

        return allocated(
            (change,),
            seq(
                lanes(PAGE, lambda lane: Store(change, (lane,), exp_of_difference(Load(w.top, (row, lane)), Load(most, (lane,))))),
                lanes(PAGE, lambda lane: Store(w.top, (row, lane), Load(most, (lane,)))),
                times_change(w.sums, lambda lane: (row, lane), PAGE),
                loop("c", self.parts, lambda c: times_change(w.values, lambda lane: (row, c, lane), self.width)),
            ),
        )

    # --- values --------------------------------------------------------------------------------------------------------

    def values(self, columns: Sequence[Column], n: int, seen: Seen | None) -> Stmt:
        """Add the weighted values of columns that belong to the same `n` rows. Keys that are not seen have no weight, but 0 * value is no
        0 where memory holds a NaN: they are left out."""
        at_once = min(self.parts, max(1, self.most // n))
        whole, left = divmod(self.parts, at_once)
        some = loop("c", whole, lambda c: self.values_of(columns, n, c * at_once, at_once, seen))
        rest = [self.values_of(columns, n, Dim.of(whole * at_once), left, seen)] if left else []
        return seq(some, *rest)

    def values_of(self, columns: Sequence[Column], n: int, first: Dim, parts: int, seen: Seen | None) -> Stmt:
        w, width, row = self.rows, self.width, columns[0].row
        total, step = local("total", n, parts, width), self.products.step

        def each(body: Callable[[Dim, int, Dim], Stmt]) -> Stmt:
            return unroll("m", n, lambda m: seq(*(lanes(width, lambda lane, c=c: body(m, c, lane)) for c in range(parts))))

        def begin(m: Dim, c: int, lane: Dim) -> Stmt:
            return Store(total, (m, Dim.of(c), lane), Load(w.values, (row + m, first + c, lane)))

        def put(m: Dim, c: int, lane: Dim) -> Stmt:
            return Store(w.values, (row + m, first + c, lane), Load(total, (m, Dim.of(c), lane)))

        def some(column: Column, keys: Keys) -> Stmt:
            asked = [s for u in range(step) for s in self.ask(column, 1, (keys.at + u) * self.size + first * width, parts * width)]
            return seq(*asked, self.products.values(column, n, keys, first * width, total))

        def page(column: Column) -> Stmt:
            if seen is None:
                unrolled, all_keys = step * UNROLLED, (Dim.of(0), Dim.of(PAGE))
                steps = range(0, unrolled, step)
                return loop("j", PAGE // unrolled, lambda j: seq(*(some(column, Keys(j * unrolled + u, *all_keys)) for u in steps)))
            hidden = dim_min(PAGE, dim_max(0, seen.low - column.start)) if seen.from_low else Dim.of(0)
            end = dim_max(0, dim_min(PAGE, seen.high + 1 - column.start))
            count = dim_max(0, ceil_div(end, step) - hidden // step)
            return loop("j", count, lambda j: some(column, Keys((hidden // step + j) * step, hidden, end)))

        return allocated((total,), seq(each(begin), *map(page, columns), each(put)))

    # --- the cache -----------------------------------------------------------------------------------------------------

    def scale(self, column: Column, which: int, lane: Dim) -> Scalar:
        assert self.scales is not None
        return f32(Load(self.scales, (self.layer, Dim.of(which), column.page, column.kv_head, lane)))

    def ask(self, column: Column, which: int, first: Dim, length: int) -> list[Stmt]:
        return ask(self.cache, self.layer, column, which, first, length)
