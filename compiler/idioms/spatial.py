"""Match spatial nests: loops around one store, with independent iterations. No two iterations store to the same element, provided that
slots (indices that are read from memory, such as places in a cache) differ if they are read from different places (`_stores_are_apart`). No
iteration reads an element that another iteration stores. The nest may also read integers between its loops, and skip iterations of its
outer loops."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from compiler.idioms.nest import writes_apart
from compiler.idioms.product import is_loaded
from compiler.ir.dims import Dim, DimVar, FloorDiv, Mod
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import For, Let, LoopKind, Stmt, Store, When
from compiler.ir.loops.visit import free_dims, loads, rewrite_dims, statements, written_buffers
from compiler.ir.loops.write import Kernel

Axes = tuple[tuple[DimVar, Dim], ...]

_MOST = 1 << 62  # an upper bound of the indices of elements


@dataclass(frozen=True, slots=True)
class SpatialNest:
    """Loops around one store. `lets` has the integers that the nest reads from memory between its loops."""

    axes: Axes
    lets: tuple[tuple[DimVar, Scalar], ...]
    store: Store
    cond: Scalar | None = None  # the nest computes only iterations in which this condition holds, and reads integers only in them


def match_spatial(stmt: Stmt) -> SpatialNest | None:
    """Return the spatial nest that a statement is, or None for any other statement."""
    axes: list[tuple[DimVar, Dim]] = []
    lets: list[tuple[DimVar, Scalar]] = []
    cond: Scalar | None = None
    rows = 0  # number of axes around the condition
    while True:
        match stmt:
            case For(var=var, extent=extent, body=body, kind=LoopKind.SERIAL):
                if {outer for outer, _ in (*axes, *lets)} & set(extent.vars()):
                    return None  # the extent differs between iterations of a loop around it
                axes.append((var, extent))
                stmt = body
            case Let(var=var, value=value, body=body):
                lets.append((var, value))
                stmt = body
            case When(cond=found, then=then, orelse=None) if cond is None and not {var for var, _ in lets} & set(free_dims(found)):
                cond, rows, stmt = found, len(axes), then
            case Store(buffer=buffer, indices=indices, value=value):
                read = [value, *(integer for _, integer in lets), *([] if cond is None else [cond])]
                # Several integers that the nest reads may be equal, so iterations that add to the places they name are not independent.
                own = None if {var for var, _ in lets} & {var for index in indices for var in index.vars()} else indices
                carried = any(load.buffer is buffer and load.indices != own for scalar in read for load in loads(scalar))
                if not _stores_are_apart(tuple(axes), lets, indices):
                    return None
                # If the condition selects single elements, several of them may write to one place, as in `scatter`: their order matters.
                whole_rows = cond is None or rows < len(axes)
                return None if carried or not axes or not whole_rows else SpatialNest(tuple(axes), tuple(lets), stmt, cond)
            case _:
                return None


def _stores_are_apart(axes: Axes, lets: Sequence[tuple[DimVar, Scalar]], indices: Sequence[Dim]) -> bool:
    """Whether iterations that store at `indices` provably store to different elements. Slots (`_is_slot`) that are read from different
    places of memory are taken to be different: if the indices determine such an integer, they determine the variables of the place from
    which it is read."""
    extents, values = dict(axes), dict(lets)
    varying = set(extents)
    for var, value in lets:
        if varying & set(free_dims(value)):
            varying.add(var)
    determined = {var for var, extent in axes if extent == Dim.of(1)}
    pending = [tuple(indices)]
    while pending:
        places = pending.pop()
        unknown = [v for v in dict.fromkeys(v for index in places for v in index.vars()) if v in varying - determined]
        integers = [v for v in unknown if v in values]
        if not all(_is_slot(v, values[v]) for v in integers):
            return False
        numbers = {v: _digits(v, places) for v in integers}
        digits = [digit for _, found in numbers.values() for digit in found]
        moved = [index.substitute({v: number for v, (number, _) in numbers.items()}) for index in places]
        if not writes_apart([*((v, extents[v]) for v in unknown if v in extents), *digits], moved):
            return False
        determined.update(unknown)
        pending += [load.indices for v in integers for load in loads(values[v])]
    return determined.issuperset(extents)


def _is_slot(var: DimVar, value: Scalar) -> bool:
    """Whether an integer is read from memory as it is, and is not negative, like the slots of a cache."""
    return var.lower >= 0 and is_loaded(value) and all(load.buffer.dtype.is_int for load in loads(value))


def _digits(var: DimVar, indices: Sequence[Dim]) -> tuple[Dim, list[tuple[DimVar, Dim]]]:
    """Return an integer as an expression of two digits, and the digits, each with its extent. If an index contains the integer's quotient
    or remainder by a number, such as the page of a slot or the slot's offset in the page, the digits are this quotient and this remainder.
    Otherwise the upper digit is the integer itself, and the lower digit is 0."""
    atoms = [atom for index in indices for atom in index.atoms() if isinstance(atom, FloorDiv | Mod) and atom.numerator == var.dim]
    divisor = next((atom.divisor for atom in atoms), Dim.of(1))
    most = Dim.of(_MOST if var.upper is None else var.upper) // divisor
    high, low = DimVar(f"{var.name}.high", upper=most), DimVar(f"{var.name}.low", upper=divisor - 1)
    return high * divisor + low, [(high, most + 1), (low, divisor)]


def stages(stmt: Stmt) -> list[Stmt]:
    """Split a body into its statements. If a `Let` contains several statements, each statement gets its own copy of the `Let`, unless a
    statement changes what the `Let` reads."""
    if isinstance(stmt, Let):
        if any(load.buffer in written_buffers(stmt.body) for load in loads(stmt.value)):
            return [stmt]
        return [Let(stmt.var, stmt.value, s) for s in stages(stmt.body)]
    return [s for inner in statements(stmt) for s in (stages(inner) if isinstance(inner, Let) else [inner])]


@contextmanager
def where_computed(k: Kernel, nest: SpatialNest, point: Mapping[DimVar, Dim]) -> Generator[None]:
    """Open the block that runs if the nest's condition holds for the values `point` of its loop variables."""
    if nest.cond is None:
        yield
        return
    with k.when(rewrite_dims(nest.cond, point)):
        yield


def read_integers(
    k: Kernel, nest: SpatialNest, point: Mapping[DimVar, Dim], held: Mapping[DimVar, Scalar] | None = None
) -> dict[DimVar, Dim]:
    """Return the values of the loop variables, which are those of `point`, and the values of the integers that the nest reads. Integers in
    `held` are not read again."""
    known = dict(point)
    for var, value in nest.lets:
        read = held[var] if held and var in held else rewrite_dims(value, known)
        known[var] = k.let(var.name, read, var.upper, lower=var.lower, multiple_of=var.multiple_of)
    return known


def write_element(k: Kernel, store: Store, point: Mapping[DimVar, Dim]) -> None:
    """Write the element that the store computes for the values `point` of the loop variables."""
    k.array(store.buffer)[tuple(d.substitute(point) for d in store.indices)] = rewrite_dims(store.value, point)
