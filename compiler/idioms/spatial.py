"""Match spatial nests: loops around one store whose iterations are independent, because none reads the buffer that the nest stores to. The
nest may also read integers between its loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.ir.dims import Dim, DimVar
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import For, Let, LoopKind, Stmt, Store
from compiler.ir.loops.visit import loads, rewrite_dims, statements
from compiler.ir.loops.write import Kernel

Axes = tuple[tuple[DimVar, Dim], ...]


@dataclass(frozen=True, slots=True)
class SpatialNest:
    axes: Axes
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


def stages(stmt: Stmt) -> list[Stmt]:
    """Split a body into its statements. If a `Let` contains several statements, each statement gets its own copy of the `Let`."""
    if isinstance(stmt, Let):
        return [Let(stmt.var, stmt.value, s) for s in stages(stmt.body)]
    return [s for inner in statements(stmt) for s in (stages(inner) if isinstance(inner, Let) else [inner])]


def read_integers(k: Kernel, nest: SpatialNest, point: Mapping[DimVar, Dim]) -> dict[DimVar, Dim]:
    """Return the point extended by the integers that the nest reads there."""
    known = dict(point)
    for var, value in nest.lets:
        known[var] = k.let(var.name, rewrite_dims(value, known), var.upper, lower=var.lower, multiple_of=var.multiple_of)
    return known


def write_element(k: Kernel, store: Store, point: Mapping[DimVar, Dim]) -> None:
    """Write the store's element at a point of its axes."""
    k.array(store.buffer)[tuple(d.substitute(point) for d in store.indices)] = rewrite_dims(store.value, point)
