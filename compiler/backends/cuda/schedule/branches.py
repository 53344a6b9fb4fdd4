"""Branches: nests that read elements of a product directly from its tile. For example, queries and keys are rotated, and values are written
to the cache.

A branch writes one element for each column of a range of the product's columns. An element may also read the other column of a pair, which
is `apart` columns before or after its own. If a tile is too narrow to contain both columns of a pair, the tile has two ranges of columns,
`apart` columns from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from compiler.idioms.product import Product
from compiler.idioms.spatial import SpatialNest, match_spatial
from compiler.ir.dims import Dim, DimVar, product_of, row_major
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Contraction, Guard, Load, Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import free_dims, loads, map_scalar, subscalars
from compiler.ir.loops.write import Kernel, less, less_equal


@dataclass(frozen=True, slots=True)
class Branch:
    """A nest that reads elements of a product."""

    nest: SpatialNest
    source: Buffer  # the buffer of the product
    begin: int  # the first column of the product for which the branch writes elements
    apart: int  # distance in columns between the two columns of a pair; 0 if an element reads only its own column

    @property
    def axes(self) -> list[tuple[str, Dim]]:
        """The axes of the nest except the rows."""
        return [(var.name, extent) for var, extent in self.nest.axes[1:]]

    @property
    def num_columns(self) -> int:
        """The number of columns for which the branch writes an element."""
        return product_of([extent for _, extent in self.axes]).const

    def offset(self, scalar: Scalar) -> int | None:
        """Return the distance in columns from the column of an element to the column of the product that the scalar reads. Return None if
        the scalar is not a load of the product."""
        if not isinstance(scalar, Load) or scalar.buffer is not self.source:
            return None
        return (scalar.indices[-1] - _number(self.nest)).const - self.begin

    @property
    def computes_anywhere(self) -> bool:
        """Whether the branch's values can be computed before the integers of the nest are read, and where the nest's condition does not
        hold."""
        return self._is_safe(self.nest.store.value)

    @property
    def early_integers(self) -> list[tuple[DimVar, Scalar]]:
        """The integers that the nest loads and that can be loaded where its condition does not hold, each with its value."""
        return [(var, value) for var, value in self.nest.lets if any(loads(value)) and self._is_safe(value)]

    def _is_safe(self, scalar: Scalar) -> bool:
        """Return whether a scalar can be computed where the nest's condition does not hold: it uses no integer that the nest reads, and its
        loads stay inside their buffers without the condition."""
        nest, extents = self.nest, dict(self.nest.axes)
        if {var for var, _ in nest.lets} & set(free_dims(scalar)):
            return False
        checked = set[DimVar]() if nest.cond is None else set(free_dims(nest.cond))
        places = [(d, extent) for load in loads(scalar) if load.buffer is not self.source for d, extent in _places(load)]
        return all(not checked & set(d.vars()) or (d.var is not None and extents.get(d.var) == extent) for d, extent in places)

    def where_it_reads(self, k: Kernel, column: Dim) -> AbstractContextManager[None]:
        """Open the block of code that runs if the branch writes an element for the column."""
        return k.when(less_equal(self.begin, column) & less(column, self.begin + self.num_columns))

    def point(self, k: Kernel, row: Dim, column: Dim) -> dict[DimVar, Dim]:
        """Return the values of the nest's loop variables at which it writes the element for a row and a column of the product."""
        number = k.let("element", column - self.begin, self.num_columns - 1)
        return dict(zip((var for var, _ in self.nest.axes), (row, *k.unravel(number, self.axes)), strict=True))

    def value(self, element: Callable[[int], Scalar]) -> Scalar:
        """Return the value that the branch stores. `element(offset)` is the product's element `offset` columns after the column for which
        the nest writes."""

        def read(scalar: Scalar) -> Scalar:
            offset = self.offset(scalar)
            return scalar if offset is None else element(offset)

        return map_scalar(self.nest.store.value, read)


def _places(load: Load) -> list[tuple[Dim, Dim]]:
    """Return each index of a load with the extent of its dimension."""
    return list(zip(load.indices, load.buffer.shape, strict=True))


def read_branches(product: Product[Contraction], stmts: Sequence[Stmt]) -> tuple[Branch, ...] | None:
    """Return the statements as branches of the product. Return None if one of them is not a branch, if pairs have different distances, or
    if the product does not store [rows, columns] with a constant number of columns."""
    source, indices = product.nest.store.buffer, product.nest.store.indices
    if indices != tuple(map(Dim.of, product.nest.vars)) or len(indices) != 2 or not product.num_columns.is_const:
        return None
    found = [_branch(stmt, source, product.nest.axes[0][1]) for stmt in stmts]
    branches = tuple(b for b in found if b is not None)
    return branches if len(branches) == len(found) and len({b.apart for b in branches} - {0}) < 2 else None


def _branch(stmt: Stmt, source: Buffer, num_rows: Dim) -> Branch | None:
    """Return a statement as a branch of the product in `source`, which has `num_rows` rows. Return None if it is no branch. A branch is an
    elementwise nest over the rows of the product and further axes of constant extent. Only the value that the nest stores reads the
    product, in the same row, and at the column of the element or at that of its pair."""
    nest = match_spatial(stmt)
    if nest is None or len(nest.axes) < 2 or nest.axes[0][1] != num_rows or not all(extent.is_const for _, extent in nest.axes[1:]):
        return None
    read = [load for load in loads(stmt) if load.buffer is source]
    own_row, number = nest.axes[0][0].dim, _number(nest)
    if not read or any(load.indices[0] != own_row or not (load.indices[1] - number).is_const for load in read):
        return None
    conditions = () if nest.cond is None else (nest.cond,)
    if any(load.buffer is source for value in (*(v for _, v in nest.lets), *conditions) for load in loads(value)):
        return None
    columns = sorted({(load.indices[1] - number).const for load in read})
    begin, apart = columns[len(columns) // 2], columns[-1] - columns[len(columns) // 2]
    branch = Branch(nest, source, begin, apart)
    return branch if columns in ([begin], [begin - apart, begin, begin + apart]) and (not apart or _reads_pairs(branch)) else None


def _number(nest: SpatialNest) -> Dim:
    """Return the index of an element in its row."""
    return row_major([var.dim for var, _ in nest.axes[1:]], [extent for _, extent in nest.axes[1:]])


def _reads_pairs(branch: Branch) -> bool:
    """Return whether each element reads only its own column and the other column of its pair. Columns form periods of 2 * `apart` columns.
    The other column is `apart` columns after an element of the first half of a period, and `apart` columns before an element of the second
    half."""
    var, size = branch.nest.axes[-1]
    period, apart = 2 * branch.apart, branch.apart
    if size.const % period or branch.begin % period:
        return False

    def fits(scalar: Scalar, j: int) -> bool:
        """Return whether a part of the expression reads only the pair of element `j`."""
        if isinstance(scalar, Guard):
            known = [tuple(dim.substitute({var: j}) for dim in condition) for condition in scalar.conditions]
            if all(dim.is_const for condition in known for dim in condition):
                inside = all(low.const <= dim.const < high.const for low, dim, high in known)
                return fits(scalar.value if inside else scalar.otherwise, j)
        offset = branch.offset(scalar)
        if offset is not None:
            return offset in (0, apart if j % period < apart else -apart)
        return all(fits(part, j) for part in subscalars(scalar))

    return all(fits(branch.nest.store.value, j) for j in range(size.const))
