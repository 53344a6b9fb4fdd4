"""Any nest with independent iterations: outer axes to threads, the innermost to vectors, reductions in order within each lane.

    for parallel p in claims {               # a claim is some rows, or a part of a long one; a row is a point of the outer axes
      full vectors, then one masked vector
    }

A vector at the edge computes with the same instructions as any other, so an element's bits do not depend on where it falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.backends.cpu.schedule.nests import below, lanes, loop, parallel, seq, unravel, when
from compiler.backends.cpu.schedule.streaming import past_caches, stream
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_min, product_of
from compiler.ir.loops import For, Let, LoopKind, Scalar, Stmt, Store
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import free_dims, loads, rewrite_dims

CHUNK = 4096  # elements that one claim covers: enough to hide the claim, little enough to share the work


@dataclass(frozen=True, slots=True)
class SpatialNest:
    """Loops with integers read between them, down to one store that no iteration reads."""

    axes: tuple[tuple[DimVar, Dim], ...]
    lets: tuple[tuple[DimVar, Scalar], ...]
    store: Store


def match_spatial(stmt: Stmt) -> SpatialNest | None:
    axes: list[tuple[DimVar, Dim]] = []
    lets: list[tuple[DimVar, Scalar]] = []
    while True:
        match stmt:
            case For(var=var, extent=extent, body=body, kind=LoopKind.SERIAL):
                if any(v is let for v in extent.vars() for let, _ in lets):
                    return None  # an extent that was read from memory differs between iterations
                axes.append((var, extent))
                stmt = body
            case Let(var=var, value=value, body=body):
                lets.append((var, value))
                stmt = body
            case Store(buffer=buffer, value=value):
                carried = any(load.buffer is buffer for load in loads(value))
                return None if carried or not axes else SpatialNest(tuple(axes), tuple(lets), stmt)
            case _:
                return None


def schedule_spatial(stmt: Stmt, width: int) -> Stmt | None:
    nest = match_spatial(stmt)
    if nest is None:
        return None
    inner, length = nest.axes[-1]
    vectorised = not any(inner in free_dims(value) for _, value in nest.lets)  # else the integer differs from lane to lane

    def span(point: dict[DimVar, Dim], first: Dim, end: Dim) -> Stmt:
        if not vectorised:
            return loop("j", end - first, lambda j: element(nest, {**point, inner: first + j}))
        return with_lets(nest, point, lambda known: vectors(nest, known, first, end, width))

    return for_rows(nest.axes[:-1], length, span)


def for_rows(outer: tuple[tuple[DimVar, Dim], ...], length: Dim, span: Callable[[dict[DimVar, Dim], Dim, Dim], Stmt]) -> Stmt:
    """Share `length` elements at every point of the outer axes among threads; `span(point, first, end)` does a stretch of one row."""
    num_rows = product_of([e for _, e in outer])
    names = [(v.name, e) for v, e in outer]

    def at(row: Dim, first: Dim, end: Dim) -> Stmt:
        if not outer:
            return span({}, first, end)
        return unravel(row, names, lambda place: span(dict(zip((v for v, _ in outer), place, strict=True)), first, end))

    if length.is_const and length.const <= CHUNK:
        group = max(1, CHUNK // max(1, length.const))
        if group == 1:
            return parallel("p", num_rows, lambda row: at(row, Dim.of(0), length))

        def rows(p: Dim) -> Stmt:
            count = dim_min(num_rows - p * group, group)
            return loop("g", count, lambda g: at(p * group + g, Dim.of(0), length))

        return parallel("p", ceil_div(num_rows, group), rows)
    chunks = ceil_div(length, CHUNK)

    def chunk(p: Dim) -> Stmt:
        first = p % chunks * CHUNK
        return at(p // chunks, first, dim_min(length, first + CHUNK))

    return parallel("p", num_rows * chunks, chunk)


def with_lets(nest: SpatialNest, point: dict[DimVar, Dim], body: Callable[[dict[DimVar, Dim]], Stmt]) -> Stmt:
    """Read the integers at this point, then run the body, which sees them under new names."""
    known = dict(point)
    fresh: list[tuple[DimVar, Scalar]] = []
    for var, value in nest.lets:
        new = DimVar(var.name, var.lower, var.upper, var.multiple_of)
        fresh.append((new, rewrite_dims(value, known)))
        known[var] = Dim.of(new)
    stmt = body(known)
    for var, value in reversed(fresh):
        stmt = Let(var, value, stmt)
    return stmt


def vectors(
    nest: SpatialNest,
    point: dict[DimVar, Dim],
    first: Dim,
    end: Dim,
    width: int,
    beside: Callable[[Dim], Sequence[Stmt]] = lambda _: (),
    *,
    read_again: bool = False,
) -> Stmt:
    """`beside(start)` is done with every full vector. What is read again at once stays in the caches, however much there is."""
    inner = nest.axes[-1][0]
    count = end - first

    def vector(start: Dim, *, masked: bool) -> Stmt:
        def lane_body(lane: Dim) -> Stmt:
            put = store_at(nest.store, {**point, inner: start + lane})
            return when(below(start + lane, end), put) if masked else put

        return lanes(width, lane_body)

    def whole(put: Callable[[Dim], Stmt]) -> Stmt:
        return loop("c", count // width, lambda c: seq(*beside(first + c * width), put(first + c * width)))

    def streamed(start: Dim) -> Stmt:
        return stream(nest.store, {**point, inner: start}, lambda lane: store_at(nest.store, {**point, inner: start + lane}).value)

    def plain() -> Stmt:
        return whole(lambda start: vector(start, masked=False))

    full = plain() if read_again else past_caches(nest.axes, nest.store, width, plain, lambda: whole(streamed))
    if prove_divisible(count, width):
        return full
    edge = first + count // width * width
    return seq(full, when(below(edge, end), vector(edge, masked=True)))


def element(nest: SpatialNest, point: dict[DimVar, Dim]) -> Stmt:
    return with_lets(nest, point, lambda known: store_at(nest.store, known))


def store_at(store: Store, point: dict[DimVar, Dim]) -> Store:
    return Store(store.buffer, tuple(d.substitute(point) for d in store.indices), rewrite_dims(store.value, point))
