"""Results that are larger than caches are written past them: by the time they are read, none of them would be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compiler.backends.cpu.codegen.intrinsics.stream import LANES
from compiler.backends.cpu.schedule.nests import lanes, seq, when
from compiler.backends.cpu.schedule.pieces import le, local
from compiler.forms.nest import allocated
from compiler.ir.dims import Dim, DimVar, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops import Load, Scalar, Scope, Stmt, Store, Tile
from compiler.ir.prove import prove_le, prove_lt
from compiler.ir.visit_loops import loads

LARGE = 64 << 20  # bytes of a result: more than the caches that one process may count on


Axes = tuple[tuple[DimVar, Dim], ...]


def past_caches(axes: Axes, store: Store, width: int, plain: Callable[[], Stmt], streamed: Callable[[], Stmt]) -> Stmt:
    """One of two ways to write vectors along the last axis, by the size of what all axes write: at run time where it is not known now."""
    size = product_of([extent for _, extent in axes]) * store.buffer.dtype.num_bytes
    if not _whole_vectors(store, axes[-1][0], width) or prove_lt(size, LARGE):
        return plain()
    return streamed() if prove_le(LARGE, size) else when(le(Dim.of(LARGE), size), streamed(), plain())


def _whole_vectors(store: Store, inner: DimVar, width: int) -> bool:
    """Lanes lie side by side, and nothing that is replaced was read just before."""
    *outer, last = store.indices
    beside = not any(inner in dim.vars() for dim in (*outer, last - inner))
    fresh = not any(load.buffer is store.buffer for load in loads(store.value))
    return beside and fresh and store.buffer.dtype is DType.F32 and store.buffer.scope is Scope.GLOBAL and width == LANES


def stream(store: Store, at: Mapping[DimVar, Dim], value: Callable[[Dim], Scalar]) -> Stmt:
    """A vector of values to where the store has its first lane."""
    row = local("row", LANES)
    place = Load(store.buffer, tuple(d.substitute(at) for d in store.indices))
    put = Tile("stream", (place, Load(row, (Dim.of(0),))))
    return allocated((row,), seq(lanes(LANES, lambda lane: Store(row, (lane,), value(lane))), put))
