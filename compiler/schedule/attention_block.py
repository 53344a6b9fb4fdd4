"""A few pages of keys and values for some rows of paged attention: scores, weights, weighted values.

A row is a query head of a token. What is known about rows lies in `Rows`, in the thread's own memory. Scores and sums are made in register
tiles of several rows, which share what they load of keys and values. Every score adds its products in the order of elements, and every
sum in the order of keys, with one rounding per step: so a row has the same bits whatever stands beside it in the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from compiler.ir.dims import Dim, DimVar, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Const, DimScalar, Fn, Let, Load, Scalar, Stmt, Store, Tile
from compiler.schedule.nests import allocated, lanes, loop, seq, unroll, when
from compiler.schedule.pieces import exp_of_difference, f32, larger, le, local, mul, plus, to_all_lanes
from compiler.schedule.spot import TileShape

PAGE = 16
PAGES = 2  # of a block
BLOCK = PAGES * PAGE  # keys
UNROLLED = 4  # steps of a product written out
CACHE_LINE = 64  # bytes
F32 = DType.F32


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known about the rows at hand."""

    queries: Buffer  # [rows, size], scaled
    weights: Buffer  # [rows, pages, PAGE]: scores, then weights, of the pages at hand
    top: Buffer  # [rows, PAGE]: the largest score so far, in every lane
    sums: Buffer  # [rows, PAGE]: of the weights so far, a lane per place in a page
    values: Buffer  # [rows, parts, width]: weighted, so far

    @staticmethod
    def of(count: int, pages: int, size: int, width: int) -> Rows:
        return Rows(
            local("queries", count, size),
            local("weights", count, pages, PAGE),
            local("top", count, PAGE),
            local("sums", count, PAGE),
            local("values", count, size // width, width),
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.queries, self.weights, self.top, self.sums, self.values

    def clear(self, row: Dim) -> Stmt:
        def filled(buffer: Buffer, value: float, *at: Dim) -> Stmt:
            return lanes(buffer.shape[-1].const, lambda lane: Store(buffer, (*at, lane), Const(value, F32)))

        values = loop("c", self.values.shape[1], lambda c: filled(self.values, 0.0, row, c))
        return seq(filled(self.top, float("-inf"), row), filled(self.sums, 0.0, row), values)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A page to ask for while another is read: of keys (0) or values (1)."""

    which: Dim
    page: Dim


@dataclass(frozen=True, slots=True)
class Column:
    """A page of one kv head, for rows from `row` on; its scores stand at `place` of theirs."""

    row: Dim
    kv_head: Dim
    page: Dim
    place: Dim
    start: Dim  # the position of its first key
    ahead: Ahead | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The positions that a token sees: low to high."""

    low: Dim
    high: Dim
    from_low: bool  # whether a page may begin before `low`


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
        score, keys = local("score", len(columns), n, PAGE), local("keys", len(columns), PAGE)

        def each(body: Callable[[int, Dim, Dim], Stmt]) -> Stmt:
            return seq(*(unroll("m", n, lambda m, v=v: lanes(PAGE, lambda lane: body(v, m, lane))) for v in range(len(columns))))

        def multiplied(r: Dim, v: int, m: Dim, lane: Dim) -> Stmt:
            at = (Dim.of(v), m, lane)
            terms = (Load(self.rows.queries, (columns[v].row + m, r)), Load(keys, (at[0], lane)), Load(score, at))
            return Store(score, at, Apply(Fn.FMA, terms))

        def element(r: Dim) -> Stmt:
            def key(v: int, lane: Dim) -> Stmt:
                return Store(keys, (Dim.of(v), lane), self.element(columns[v], 0, r * PAGE + lane))

            fetched = [lanes(PAGE, lambda lane, v=v: key(v, lane)) for v in range(len(columns))]
            return allocated((keys,), seq(*fetched, each(lambda v, m, lane: multiplied(r, v, m, lane))))

        unrolled = next(u for u in (UNROLLED, 2, 1) if self.size % u == 0)

        def elements(r: Dim) -> Stmt:
            asked = [s for c in columns for s in self.ask(c, r * (unrolled * PAGE), unrolled * PAGE)]
            return seq(*asked, *(element(r * unrolled + u) for u in range(unrolled)))

        def put(v: int, m: Dim, lane: Dim) -> Stmt:
            column = columns[v]
            value = self.score(column, Load(score, (Dim.of(v), m, lane)), lane)
            if seen is not None:
                value = hidden_unless(seen, column.start + lane, value)
            return Store(self.rows.weights, (column.row + m, column.place, lane), value)

        start = each(lambda v, m, lane: Store(score, (Dim.of(v), m, lane), Const(0.0, F32)))
        return allocated((score,), seq(start, loop("r", self.size // unrolled, elements), each(put)))

    def score(self, column: Column, value: Scalar, lane: Dim) -> Scalar:
        if self.scales is not None:
            value = mul(value, self.scale(column, 0, lane))
        return capped(value, self.softcap)

    # --- weights -------------------------------------------------------------------------------------------------------

    def weigh(self, row: Dim, block: Sequence[Column]) -> Stmt:
        """Scores become weights; `sums` takes them in. The scale of an 8-bit value goes into its weight."""
        w, most, total = self.rows, local("most", PAGE), local("total", PAGE)

        def score(column: Column, lane: Dim) -> Load:
            return Load(w.weights, (row, column.place, lane))

        def weight(column: Column, lane: Dim) -> Stmt:
            found = exp_of_difference(score(column, lane), Load(w.top, (row, lane)))
            so_far = found if column is block[0] else plus(Load(total, (lane,)), found)
            return seq(Store(total, (lane,), so_far), Store(w.weights, (row, column.place, lane), found))

        def decoded(column: Column, lane: Dim) -> Stmt:
            return Store(w.weights, (row, column.place, lane), mul(score(column, lane), self.scale(column, 1, lane)))

        def each_page(body: Callable[[Column, Dim], Stmt]) -> list[Stmt]:
            return [lanes(PAGE, lambda lane, column=column: body(column, lane)) for column in block]

        sums = lanes(PAGE, lambda lane: Store(w.sums, (row, lane), plus(Load(w.sums, (row, lane)), Load(total, (lane,)))))
        raises = Apply(Fn.LT, (Load(w.top, (row, Dim.of(0))), Load(most, (Dim.of(0),))))
        return allocated(
            (most, total),
            seq(
                lanes(PAGE, lambda lane: Store(most, (lane,), reduce(larger, [score(column, lane) for column in block]))),
                *to_all_lanes(most),
                when(raises, self.raised(row, most)),
                *each_page(weight),
                sums,
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
        total, value = local("total", n, parts, width), local("value", parts, width)

        def each(body: Callable[[Dim, int, Dim], Stmt]) -> Stmt:
            return unroll("m", n, lambda m: seq(*(lanes(width, lambda lane, c=c: body(m, c, lane)) for c in range(parts))))

        def begin(m: Dim, c: int, lane: Dim) -> Stmt:
            return Store(total, (m, Dim.of(c), lane), Load(w.values, (row + m, first + c, lane)))

        def put(m: Dim, c: int, lane: Dim) -> Stmt:
            return Store(w.values, (row + m, first + c, lane), Load(total, (m, Dim.of(c), lane)))

        def key(column: Column, j: Dim) -> Stmt:
            def fetch(c: int, lane: Dim) -> Stmt:
                return Store(value, (Dim.of(c), lane), self.element(column, 1, j * self.size + (first + c) * width + lane))

            def add(m: Dim, c: int, lane: Dim) -> Stmt:
                at = (m, Dim.of(c), lane)
                terms = (Load(w.weights, (row + m, column.place, j)), Load(value, at[1:]), Load(total, at))
                return Store(total, at, Apply(Fn.FMA, terms))

            fetched = [lanes(width, lambda lane, c=c: fetch(c, lane)) for c in range(parts)]
            asked = self.ask(column, j * self.size + first * width, parts * width)
            return seq(*asked, allocated((value,), seq(*fetched, each(add))))

        def page(column: Column) -> Stmt:
            if seen is None:
                return loop("j", PAGE // UNROLLED, lambda j: seq(*(key(column, j * UNROLLED + u) for u in range(UNROLLED))))
            hidden = dim_min(PAGE, dim_max(0, seen.low - column.start)) if seen.from_low else Dim.of(0)
            return loop("j", dim_max(0, dim_min(PAGE, seen.high + 1 - column.start) - hidden), lambda j: key(column, j + hidden))

        return allocated((total,), seq(each(begin), *map(page, columns), each(put)))

    # --- the cache -----------------------------------------------------------------------------------------------------

    def element(self, column: Column, which: int, index: Dim) -> Scalar:
        return f32(Load(self.cache, (self.layer, Dim.of(which), column.page, column.kv_head, index)))

    def scale(self, column: Column, which: int, lane: Dim) -> Scalar:
        assert self.scales is not None
        return f32(Load(self.scales, (self.layer, Dim.of(which), column.page, column.kv_head, lane)))

    def ask(self, column: Column, first: Dim, length: int) -> list[Stmt]:
        return ask(self.cache, self.layer, column, first, length)


# --- pieces ------------------------------------------------------------------------------------------------------------


def ask(cache: Buffer, layer: Dim, column: Column, first: Dim, length: int) -> list[Stmt]:
    """For the cache lines that begin in a stretch of the page ahead."""
    if column.ahead is None:
        return []
    at = (layer, column.ahead.which, column.ahead.page, column.kv_head)
    lines = range(0, length, CACHE_LINE // cache.dtype.num_bytes)
    return [Tile("prefetch", (Load(cache, (*at, first + line)),), attrs={"far": True}) for line in lines]


def capped(score: Scalar, softcap: float) -> Scalar:
    if not softcap:
        return score
    cap = Const(softcap, F32)
    return mul(Apply(Fn.TANH, (Apply(Fn.DIV, (score, cap)),)), cap)


def in_tiles(count: int, most: int, body: Callable[[Dim, int], Stmt]) -> Stmt:
    """`body(first row, rows)`, by `most` rows, then by powers of two."""
    whole = count // most
    stmts: list[Stmt] = [loop("io", whole, lambda io: body(io * most, most))] if whole else []
    at, size = whole * most, most
    while at < count:
        while size > count - at:
            size //= 2
        stmts.append(body(Dim.of(at), size))
        at += size
    return seq(*stmts)


def hidden_unless(seen: Seen, key: Dim, value: Scalar) -> Scalar:
    visible = le(key, seen.high)
    if seen.from_low:
        visible = Apply(Fn.AND, (visible, le(seen.low, key)))
    return Apply(Fn.SELECT, (visible, value, Const(float("-inf"), F32)))


def integer(name: str, value: Scalar | Dim, body: Callable[[Dim], Stmt]) -> Stmt:
    """An integer, computed once."""
    var = DimVar(name)
    return Let(var, DimScalar(value) if isinstance(value, Dim) else Cast(value, DType.I64), body(Dim.of(var)))
