"""How pages are multiplied: queries by keys, and weights by values, into a register tile of `n` rows.

  Singles    one element of the contracted axis at a time: all factors are f32, and a product and its addition are rounded once
  Pairs      two at a time (`dot_rows`), where that is faster: all factors are bf16, queries and weights rounded to what pages hold

The rows of a page that make a pair are interleaved as they are loaded, for all rows of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compiler.backends.cpu.schedule.attention_rows import PAGE, Column, Rows
from compiler.backends.cpu.schedule.nests import lanes, seq, unroll
from compiler.backends.cpu.schedule.pieces import f32, local
from compiler.forms.nest import allocated
from compiler.ir.dims import Dim, dim_max, dim_min, product_of
from compiler.ir.loops import Apply, Buffer, Fn, Load, Scalar, Stmt, Store, Tile


@dataclass(frozen=True, slots=True)
class Keys:
    """Those of a step, from a multiple of it on, as far as they lie within a range that is seen."""

    at: Dim
    begin: Dim
    end: Dim


@dataclass(frozen=True, slots=True)
class _Products:
    rows: Rows
    cache: Buffer
    layer: Dim
    size: int

    def place(self, column: Column, which: int, index: Dim) -> Load:
        return Load(self.cache, (self.layer, Dim.of(which), column.page, column.kv_head, index))


@dataclass(frozen=True, slots=True)
class Singles(_Products):
    step: ClassVar[int] = 1

    def scores(self, columns: Sequence[Column], n: int, r: Dim, score: Buffer) -> Stmt:
        """What element `r` adds to the scores of each column."""
        keys = local("keys", len(columns), PAGE)

        def fetched(v: int, lane: Dim) -> Stmt:
            return Store(keys, (Dim.of(v), lane), self.element(columns[v], 0, r * PAGE + lane))

        def added(v: int, m: Dim, lane: Dim) -> Stmt:
            at = (Dim.of(v), m, lane)
            terms = (Load(self.rows.queries, (columns[v].row + m, r)), Load(keys, (at[0], lane)), Load(score, at))
            return Store(score, at, Apply(Fn.FMA, terms))

        def column(v: int) -> Stmt:
            return unroll("m", n, lambda m: lanes(PAGE, lambda lane: added(v, m, lane)))

        all_fetched = (lanes(PAGE, lambda lane, v=v: fetched(v, lane)) for v in range(len(columns)))
        return allocated((keys,), seq(*all_fetched, *map(column, range(len(columns)))))

    def values(self, column: Column, n: int, keys: Keys, first: Dim, total: Buffer) -> Stmt:
        """What a key adds to the weighted values of a column: to the elements from `first` on that `total` has."""
        _, parts, width = (d.const for d in total.shape)
        value = local("value", parts, width)

        def fetched(c: int, lane: Dim) -> Stmt:
            return Store(value, (Dim.of(c), lane), self.element(column, 1, keys.at * self.size + first + c * width + lane))

        def added(m: Dim, c: int, lane: Dim) -> Stmt:
            at = (m, Dim.of(c), lane)
            terms = (Load(self.rows.weights, (column.row + m, column.place, keys.at)), Load(value, at[1:]), Load(total, at))
            return Store(total, at, Apply(Fn.FMA, terms))

        def row(m: Dim) -> Stmt:
            return seq(*(lanes(width, lambda lane, c=c: added(m, c, lane)) for c in range(parts)))

        all_fetched = (lanes(width, lambda lane, c=c: fetched(c, lane)) for c in range(parts))
        return allocated((value,), seq(*all_fetched, unroll("m", n, row)))

    def weigh(self, row: Dim, column: Column) -> list[Stmt]:
        """Weights are multiplied as they are."""
        return []

    def element(self, column: Column, which: int, index: Dim) -> Scalar:
        return f32(self.place(column, which, index))


@dataclass(frozen=True, slots=True)
class Pairs(_Products):
    step: ClassVar[int] = 2

    def scores(self, columns: Sequence[Column], n: int, r: Dim, score: Buffer) -> Stmt:
        def column(v: int, c: Column) -> Tile:
            factors = Load(self.rows.queries, (c.row, r))
            return dot_rows(n, Load(score, (Dim.of(v), Dim.of(0), Dim.of(0))), factors, self.place(c, 0, r * PAGE), columns=PAGE)

        return seq(*(column(v, c) for v, c in enumerate(columns)))

    def values(self, column: Column, n: int, keys: Keys, first: Dim, total: Buffer) -> Stmt:
        """A key that is not seen has no weight, but its values may be no numbers: it stands for its neighbour."""
        _, parts, width = (d.const for d in total.shape)
        factors = Load(self.rows.weights, (column.row, column.place, keys.at))
        pair = (
            self.place(column, 1, key * self.size + first) for key in (dim_max(keys.at, keys.begin), dim_min(keys.at + 1, keys.end - 1))
        )
        return dot_rows(n, Load(total, (Dim.of(0), Dim.of(0), Dim.of(0))), factors, *pair, columns=parts * width)

    def weigh(self, row: Dim, column: Column) -> list[Stmt]:
        """Weights are rounded."""
        at = (row, column.place, Dim.of(0))
        return [Tile("round_bf16", (Load(self.rows.weights, at), Load(self.rows.scores, at)))]


def dot_rows(n: int, total: Load, factors: Load, *pair: Load, columns: int) -> Tile:
    stride = product_of(factors.buffer.shape[1:])
    return Tile("dot_rows", (total, factors, *pair), (stride,), {"rows": n, "columns": columns})
