"""Where a tile is in the result of a product: its rows and columns in the axes of the nest, and how its results are stored."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from compiler.idioms.product import AnyProduct
from compiler.idioms.spatial import write_element
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Store
from compiler.ir.loops.visit import map_scalar
from compiler.ir.loops.write import Array, Kernel, less
from compiler.ir.prove import prove_divisible
from compiler.machine.products import TileShape

ZERO = Dim.of(0)

Point = dict[DimVar, Dim]  # the values of axes of the nest
Element = tuple[Dim, Dim, Dim]  # a row, vector and lane of a tile


@dataclass(frozen=True, slots=True)
class TileOrigin:
    """A tile: `shape.rows` rows from row `first`, and the columns of `panel`. The nest's other axes have the values of `point`. If the
    number of rows is known only at run time, it is `height`, and `shape.rows` is its largest value."""

    product: AnyProduct
    shape: TileShape
    point: Point
    panel: Dim
    first: Dim
    height: Dim | None = None

    @contextmanager
    def elements(self, k: Kernel) -> Generator[Element]:
        """Loop over the elements of the tile, by row, vector and lane. The loop covers `shape.rows` rows, whatever `height` is."""
        with k.unroll("m", self.shape.rows) as m, self.vectors(k) as (v, lane):
            yield m, v, lane

    @contextmanager
    def vectors(self, k: Kernel) -> Generator[tuple[Dim, Dim]]:
        """Loop over the vectors and lanes of one row."""
        with k.unroll("v", self.shape.vectors) as v, k.vector(self.shape.lanes) as lane:
            yield v, lane

    @contextmanager
    def lines(self, k: Kernel) -> Generator[tuple[Dim, TileOrigin]]:
        """Loop over the rows of the tile. Yield the number of each row in the tile, and the tile of that one row."""
        with k.serial("m", self.shape.rows if self.height is None else self.height) as m:
            yield m, replace(self, shape=replace(self.shape, rows=1), first=self.first + m, height=None)

    def at(self, m: Dim, v: Dim, lane: Dim) -> Point:
        """Return the value of each axis of the nest, and of each variable of a choice, at an element of the tile."""
        place = {**self.point, self.product.column_axis: self.column(v, lane)}
        row_axis = self.product.row_axis
        return place if row_axis is None else {**place, row_axis: self.first + m}

    @property
    def corner(self) -> Point:
        """The values of the axes at the tile's first element."""
        return self.at(ZERO, ZERO, ZERO)

    def column(self, v: Dim, lane: Dim) -> Dim:
        """Return the column of the product at a lane of a vector."""
        return self.panel * self.shape.columns + v * self.shape.lanes + lane

    @property
    def is_whole(self) -> bool:
        """Whether no panel has columns after the last column of the product."""
        return prove_divisible(self.product.num_columns, self.shape.columns)

    def is_inside(self, v: Dim, lane: Dim) -> Scalar:
        """Return whether a lane of a vector is a column of the product."""
        return less(self.column(v, lane), self.product.num_columns)

    def store(self, k: Kernel, element: Element, totals: Sequence[Scalar]) -> None:
        """Store the result of the nest for an element of the tile, unless its lane is after the product's last column. The values `totals`
        replace the sums in the nest's value."""

        def total(scalar: Scalar) -> Scalar:
            number = self.product.number_of(scalar)
            return scalar if number is None else totals[number]

        _, v, lane = element
        store = self.product.nest.store
        with nullcontext() if self.is_whole else k.when(self.is_inside(v, lane)):
            write_element(k, Store(store.buffer, store.indices, map_scalar(store.value, total)), self.at(*element))


def local_per_sum(k: Kernel, product: AnyProduct, name: str, *shape: int, dtype: DType = DType.F32) -> list[Array]:
    """Allocate a local array for each sum of the product."""
    return [k.local(f"{name}{i}", *shape, dtype=dtype) for i in range(len(product.sums))]
