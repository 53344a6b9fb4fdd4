"""Write the elements of a product that a thread has in one column, several rows at a time.

All rows of a group are computed before any of them is stored. So their loads are in flight together; otherwise they would not be, because
the assembler does not move a load over a store. A row after the last one is computed as the last row, and not stored. Where all rows of a
group exist, a product's own store (`StoreWriter`) has no conditions between rows, because LLVM would move the loads of each row behind its
condition. `BranchWriter` always has these conditions, because threads have no registers for a second copy of the code. If the values of its
branch (branches.py) depend on integers that the branch's nest reads, or cannot be computed without the nest's condition, the writer
computes each row just before it stores the row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from compiler.backends.cuda.schedule.branches import Branch
from compiler.backends.cuda.schedule.hold import hold
from compiler.idioms.spatial import read_integers, where_computed
from compiler.ir.dims import Dim, DimVar, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Store
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Kernel, const, equal, less, select

Element = Callable[[Dim, int], Scalar]  # returns the product's element in a row of the tile, at a distance from the thread's column


class Writer(ABC):
    """Writes the elements of the thread's column in some rows."""

    @abstractmethod
    def where_it_applies(self, k: Kernel) -> AbstractContextManager[None]:
        """Return a context manager for the block of the kernel that runs only if this writer stores the thread's column."""

    @abstractmethod
    def write(self, k: Kernel, rows: Rows) -> None:
        """Write the elements of some rows."""

    @abstractmethod
    def write_row(self, k: Kernel, first: Dim, row: Dim) -> None:
        """Write the element of one row of a tile whose row 0 is row `first` of the product."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tile in increasing order. Row 0 of the tile is row `first` of the product, and `count` rows from there on are to be
    written."""

    numbers: tuple[Dim, ...]
    first: Dim
    count: Dim

    def clamped(self, k: Kernel) -> list[Dim]:
        """Return the number of each row, or that of the last row to be written instead of rows after it."""
        return [k.let("near", dim_min(row, self.count - 1)) for row in self.numbers]


@dataclass(frozen=True, slots=True)
class StoreWriter(Writer):
    """Writes elements by the store of the product's own nest."""

    store: Store
    row_axis: DimVar
    point: Mapping[DimVar, Dim]  # the other axes
    element: Element

    def where_it_applies(self, k: Kernel) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, k: Kernel, rows: Rows) -> None:
        """Write the elements of some rows. One condition covers the usual case that all rows exist. Otherwise each row has its own
        condition."""
        with k.when(less(rows.numbers[-1], rows.count)):
            for row, value in zip(rows.numbers, hold(k, [self.element(row, 0) for row in rows.numbers]), strict=True):
                self._store(k, rows.first + row, value)
        with k.orelse():
            held = hold(k, [self.element(row, 0) for row in rows.clamped(k)])
            for number, row in enumerate(rows.numbers):
                with k.when(less(row, rows.count)):
                    self._store(k, rows.first + row, held[number])

    def write_row(self, k: Kernel, first: Dim, row: Dim) -> None:
        self._store(k, first + row, self.element(row, 0))

    def _store(self, k: Kernel, row: Dim, value: Scalar) -> None:
        at = {**self.point, self.row_axis: row}
        k.array(self.store.buffer)[tuple(d.substitute(at) for d in self.store.indices)] = value


@dataclass(frozen=True, slots=True)
class BranchWriter(Writer):
    """Writes elements by a branch."""

    branch: Branch
    column: Dim  # the thread's column of the product
    element: Element

    @property
    def store(self) -> Store:
        return self.branch.nest.store

    def where_it_applies(self, k: Kernel) -> AbstractContextManager[None]:
        return self.branch.where_it_reads(k, self.column)

    def write(self, k: Kernel, rows: Rows) -> None:
        """Write the elements of some rows. First compute the conditions of all rows, and the integers and values that need no condition.
        Then store row after row."""
        nest, branch = self.branch.nest, self.branch
        near = rows.clamped(k)
        points = [branch.point(k, rows.first + row, self.column) for row in near]
        applies: list[Scalar] = [less(row, rows.count) for row in rows.numbers]
        if nest.cond is not None:
            runs = hold(k, [select(rewrite_dims(nest.cond, point), const(1, DType.I32), 0) for point in points])
            applies = [first & equal(then, 1) for first, then in zip(applies, runs, strict=True)]
        integers = {var: hold(k, [rewrite_dims(value, point) for point in points]) for var, value in branch.early_integers}
        is_early = branch.computes_anywhere
        held = hold(k, [self._value(row, point) for row, point in zip(near, points, strict=True)]) if is_early else []
        for number, point in enumerate(points):
            with k.when(applies[number]):
                known = read_integers(k, nest, point, {var: values[number] for var, values in integers.items()})
                value = held[number] if is_early else self._value(near[number], known)
                k.array(self.store.buffer)[tuple(d.substitute(known) for d in self.store.indices)] = value

    def write_row(self, k: Kernel, first: Dim, row: Dim) -> None:
        nest, point = self.branch.nest, self.branch.point(k, first + row, self.column)
        with where_computed(k, nest, point):
            known = read_integers(k, nest, point)
            k.array(self.store.buffer)[tuple(d.substitute(known) for d in self.store.indices)] = self._value(row, known)

    def _value(self, row: Dim, point: Mapping[DimVar, Dim]) -> Scalar:
        """Return the value that the branch stores for a row of the tile."""
        return rewrite_dims(self.branch.value(lambda offset: self.element(row, offset)), point)
