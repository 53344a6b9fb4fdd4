"""Schedule any nest with independent iterations: threads share the outer axes, and vectors run along the innermost.

    for parallel p in claims {               # a claim has whole rows, or a part of a long row; the outer axes count the rows
      full vectors, then one masked vector
    }

The masked vector runs the same instructions as full vectors, so an element's bits do not depend on its place in the row.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from compiler.backends.cpu.schedule.prefetch import NO_PREFETCH, Prefetch
from compiler.backends.cpu.schedule.streaming import is_streamed, stream
from compiler.idioms.spatial import Axes, SpatialNest, match_spatial, read_integers, where_computed, write_element
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_min, product_of
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.sweep import full_vectors, masked_vectors
from compiler.ir.loops.visit import free_dims
from compiler.ir.loops.write import Kernel
from compiler.ir.prove import prove_le

CHUNK = 4096  # maximum number of elements of a claim: enough to amortise the cost of claiming, few enough to share the work


def schedule_spatial(stmt: Stmt, width: int) -> Stmt | None:
    """Schedule a nest with independent iterations: threads share the outer axes, and vectors of `width` lanes run along the innermost axis.
    If an integer that the nest reads depends on the innermost axis, write the elements of a row one by one. Return None for any other
    nest."""
    nest = match_spatial(stmt)
    if nest is None:
        return None
    inner, length = nest.axes[-1]
    integers_per_lane = any(inner in free_dims(value) for _, value in nest.lets)
    k = Kernel()
    with claimed_rows(k, nest.axes[:-1], length) as (point, first, end), where_computed(k, nest, point):
        if integers_per_lane:
            with k.serial("j", end - first) as j:
                write_element(k, nest.store, read_integers(k, nest, {**point, inner: first + j}))
        else:
            write_vectors(k, nest, read_integers(k, nest, point), first, end, width)
    return k.body()


@contextmanager
def claimed_rows(k: Kernel, outer: Axes, length: Dim) -> Generator[tuple[dict[DimVar, Dim], Dim, Dim]]:
    """Distribute rows of `length` elements among threads: there is one row for each combination of indices of the outer axes. A claim is a
    part of a long row, one row, or several short rows. Yield the indices of a row, `first` and `end`: the thread computes the elements
    `first` to `end` - 1 of that row."""
    num_rows = product_of([e for _, e in outer])
    length = Dim.of(0) if prove_le(length, 0) else length  # the bounds of a variable may prove that it is 0
    if not length.is_const or length.const > CHUNK:
        chunks = ceil_div(length, CHUNK)
        with k.parallel("p", num_rows * chunks) as p:
            first = p % chunks * CHUNK
            yield _point(k, p // chunks, outer), first, dim_min(length, first + CHUNK)
    elif (group := CHUNK // max(1, length.const)) == 1:
        with k.parallel("p", num_rows) as row:
            yield _point(k, row, outer), Dim.of(0), length
    else:
        with k.parallel("p", ceil_div(num_rows, group)) as p, k.serial("g", dim_min(num_rows - p * group, group)) as g:
            yield _point(k, p * group + g, outer), Dim.of(0), length


def _point(k: Kernel, row: Dim, outer: Axes) -> dict[DimVar, Dim]:
    """Return the values of the outer axes in a row, given its number."""
    return dict(zip((v for v, _ in outer), k.unravel(row, [(v.name, e) for v, e in outer]), strict=True))


def write_vectors(
    k: Kernel,
    nest: SpatialNest,
    point: Mapping[DimVar, Dim],
    first: Dim,
    end: Dim,
    width: int,
    prefetch: Prefetch = NO_PREFETCH,
    *,
    read_again: bool = False,
) -> None:
    """Write the elements `first` to `end` - 1 of a row. Each full vector prefetches the same elements of the row in `prefetch`. With
    `read_again`, the result is never streamed past the caches, because the kernel soon reads it again."""
    inner, store = nest.axes[-1][0], nest.store

    def write_full(*, streamed: bool) -> None:
        """Write the full vectors, past the caches if `streamed`."""
        for vector in full_vectors(k, first, end, width):
            prefetch.vector(k, vector.start)
            if streamed:
                stream(k, store, point, inner, vector.start)
            else:
                with vector.lanes() as (_, index):
                    write_element(k, store, {**point, inner: index})

    streamed = not read_again and is_streamed(nest.axes, store, width)
    if isinstance(streamed, bool):
        write_full(streamed=streamed)
    else:
        with k.when(streamed):
            write_full(streamed=True)
        with k.orelse():
            write_full(streamed=False)
    for vector in masked_vectors(k, first, end, width):
        with vector.lanes() as (_, index):
            write_element(k, store, {**point, inner: index})
