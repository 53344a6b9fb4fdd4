"""What paged attention is about: rows, pages of keys and values for them, and the positions that are seen; and pieces of loops over them.

A row is a query head of a token. What is known about rows lies in `Rows`, in the thread's own memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.backends.cpu.codegen.intrinsics.prefetch import LINE_BYTES
from compiler.backends.cpu.schedule.nests import lanes, loop, seq
from compiler.backends.cpu.schedule.pieces import le, local, mul
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Const, DimScalar, Fn, Let, Load, Scalar, Stmt, Store, Tile

PAGE = 16
PAGES = 2  # of a block
BLOCK = PAGES * PAGE  # keys

F32 = DType.F32


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known about the rows at hand."""

    queries: Buffer  # [rows, size], scaled
    scores: Buffer  # [rows, pages, PAGE]: of the pages at hand; weights take their place
    rounded: Buffer | None  # weights, where they are rounded before they are multiplied
    top: Buffer  # [rows, PAGE]: the largest score so far, in every lane
    sums: Buffer  # [rows, PAGE]: of the weights so far, a lane per place in a page
    values: Buffer  # [rows, parts, width]: weighted, so far

    @staticmethod
    def of(count: int, pages: int, size: int, width: int, factors: DType) -> Rows:
        """`factors`: the type of what pages are multiplied by."""
        return Rows(
            local("queries", count, size, dtype=factors),
            local("scores", count, pages, PAGE),
            None if factors is F32 else local("weights", count, pages, PAGE, dtype=factors),
            local("top", count, PAGE),
            local("sums", count, PAGE),
            local("values", count, size // width, width),
        )

    @property
    def weights(self) -> Buffer:
        """What values are multiplied by."""
        return self.scores if self.rounded is None else self.rounded

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        rounded = () if self.rounded is None else (self.rounded,)
        return self.queries, self.scores, *rounded, self.top, self.sums, self.values

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
class Again:
    """A kv head that is read soon: of the page that is read, or (`turned` 1, else 0) of the one ahead."""

    kv_head: Dim
    turned: Dim


@dataclass(frozen=True, slots=True)
class Column:
    """A page of one kv head, for rows from `row` on; its scores stand at `place` of theirs."""

    row: Dim
    kv_head: Dim
    page: Dim
    place: Dim
    start: Dim  # the position of its first key
    ahead: Ahead | None = None
    again: Again | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The positions that a token sees: low to high."""

    low: Dim
    high: Dim
    from_low: bool  # whether a page may begin before `low`


# --- pieces ------------------------------------------------------------------------------------------------------------


def ask(cache: Buffer, layer: Dim, column: Column, which: int, first: Dim, length: int) -> list[Stmt]:
    """For the cache lines that begin in a stretch of the page ahead, while keys (0) or values (1) are read."""
    ahead, again = column.ahead, column.again
    if ahead is None:
        return []
    places = [(ahead.which, ahead.page, column.kv_head)]
    if again is not None:
        turned = again.turned
        places.append((which + turned * (ahead.which - which), column.page + turned * (ahead.page - column.page), again.kv_head))
    lines = range(0, length, LINE_BYTES // cache.dtype.num_bytes)
    return [Tile("prefetch", (Load(cache, (layer, *place, first + line)),), attrs={"far": True}) for place in places for line in lines]


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
