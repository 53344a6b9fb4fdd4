"""The loops over the result of a product: panels of columns, blocks of rows, tiles of rows.

    with panels.claims(k) as claim:        # adjacent panels with a block of rows
        for tiles in claim.tiles(k):       # tiles of one height
            with tiles.each(k) as tile:    # one tile

A thread claims a block of rows with one panel. With many rows, or with a single row, a claim has more panels if the caller requests them
(`together` and `abreast`). A block of rows is divided into tiles of the largest height. Each further tile reads the panel again, so the
remaining rows should form few tiles. On vectors, the tiles of the remaining rows have 16, 8 and 4 rows, as far as these are fewer than the
largest height, and the last tile has one to three rows. A matrix unit can compute all remaining rows as one tile, `claim.remainders`, whose
height is known only at run time. The bits of a row must not depend on its tile. The caller's `for` emits its code once per height.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.product.choices import chosen_blocks
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, Point, TileOrigin
from compiler.idioms.product import AnyProduct
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min, product_of
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, less
from compiler.machine.products import TileShape

BLOCK_ROWS = 256  # rows of a block, which share one read of a panel; so many rows of the left operand fit in the second-level cache
ROWS_PER_PANEL = 32  # a claim has one panel per this many rows, because more panels per claim would leave too few claims for the threads


@dataclass(frozen=True, slots=True)
class Panels:
    """Divides the columns of a product into panels of the width of `shape`, and the rows into tiles of at most the height of `shape`."""

    product: AnyProduct
    shape: TileShape
    together: int = 1  # maximum number of panels of a claim with many rows
    abreast: int = 1  # number of panels of a claim with a single row: several, if additions for one panel would wait for each other
    block_rows: int = BLOCK_ROWS
    rows_per_panel: int = ROWS_PER_PANEL  # a claim has one panel per this many rows, and at most `together` panels

    @contextmanager
    def claims(self, k: Kernel) -> Generator[Claim]:
        """Loop over the claims, which are distributed among threads. Claims with adjacent numbers share their panels or, if rows choose
        among matrices, their rows."""
        if self.product.choice is not None:
            with self.chosen_claims(k) as claim:
                yield claim
            return
        row, extents = self.product.row_axis, dict(self.product.nest.axes)
        outer = [(var, extent) for var, extent in self.product.nest.axes[:-1] if var is not row]
        panels = ceil_div(self.product.num_columns, self.shape.columns)
        num_rows = Dim.of(1) if row is None else extents[row]
        blocks = ceil_div(num_rows, self.block_rows)
        many = dim_max(dim_min(num_rows // self.rows_per_panel, self.together), 1) if self.together > 1 else Dim.of(1)
        most = many + (self.abreast - 1) * (1 - dim_min(num_rows - 1, 1))
        groups = ceil_div(panels, most)
        axes = [*((var.name, extent) for var, extent in outer), ("panel" if most == Dim.of(1) else "group", groups), ("block", blocks)]
        with k.parallel("p", product_of([extent for _, extent in outer]) * groups * blocks) as p:
            *values, group, block = k.unravel(p, axes)
            point = dict(zip((var for var, _ in outer), values, strict=True))
            panel = k.let("panel", group * most, panels - 1)
            num_panels = k.let("panels", dim_min(most, panels - panel), max(self.together, self.abreast))
            first = block * self.block_rows
            end = k.let("end", dim_min(num_rows, first + self.block_rows), num_rows)
            yield Claim(self, point, panel, num_panels, first, end)

    @contextmanager
    def chosen_claims(self, k: Kernel) -> Generator[Claim]:
        """Loop over the claims of a product whose rows choose among matrices. The rows of a claim have the same choice. The number of
        panels of a claim does not depend on its number of rows, which is known only at run time."""
        most = max(self.together, self.abreast)
        panels = ceil_div(self.product.num_columns, self.shape.columns)
        with chosen_blocks(k, self.product, self.block_rows, ceil_div(panels, most)) as (point, first, end, group):
            panel = k.let("panel", group * most, panels - 1)
            num_panels = k.let("panels", dim_min(most, panels - panel), most)
            yield Claim(self, point, panel, num_panels, first, end)


@dataclass(frozen=True, slots=True)
class Claim:
    """Adjacent panels, with the rows `first` to `end` - 1. The nest's other axes have the values of `point`."""

    walk: Panels  # the loops that the claim belongs to
    point: Point
    panel: Dim  # index of the first panel
    num_panels: Dim
    first: Dim
    end: Dim

    @contextmanager
    def panels(self, k: Kernel) -> Generator[Dim]:
        """Loop over the panels."""
        if self.num_panels == Dim.of(1):
            yield self.panel
        else:
            with k.serial("nearby", self.num_panels) as i:
                yield self.panel + i

    @contextmanager
    def lines(self, k: Kernel, num_rows: Dim) -> Generator[tuple[Dim, Dim, TileOrigin]]:
        """Loop over the first `num_rows` rows one by one, and over all panels of each. Yield the number of the row in the claim, the number
        of the panel in the claim, and the tile of this row in this panel."""
        with k.serial("m", num_rows) as m, self.panels(k) as panel:
            yield m, panel - self.panel, self.tile(panel, self.first + m, 1)

    def tile(self, panel: Dim, row: Dim, rows: int) -> TileOrigin:
        """Return the tile of `rows` rows, from row `row` of the product on, in a panel."""
        return TileOrigin(self.walk.product, replace(self.walk.shape, rows=rows), self.point, panel, row)

    # --- tiles ---------------------------------------------------------------------------------------------------------

    def tiles(self, k: Kernel) -> Iterator[Tiles]:
        """Yield the tiles of full height, then those of the remaining rows. If a single remaining row computes `abreast` panels together,
        yield its tile twice: for claims of that many panels, and for claims of fewer or more panels."""
        yield self.full_tiles
        for rest in self.rest_tiles:
            with k.when(rest.exist):
                if rest.rows > 1 or self.walk.abreast == 1:
                    yield rest
                else:
                    with k.when(less(self.walk.abreast - 1, self.num_panels) & less(self.num_panels, self.walk.abreast + 1)):
                        yield replace(rest, claim=replace(self, num_panels=Dim.of(self.walk.abreast)), are_abreast=True)
                    with k.orelse():
                        yield rest

    @property
    def full_tiles(self) -> Tiles:
        return Tiles(self, self.rows, self.first, (self.end - self.first) // self.rows)

    @property
    def rest_tiles(self) -> list[Tiles]:
        """The tiles of the remaining rows. There is an entry for each height below the largest one: 16, 8, 4, 3, 2 and 1. An entry has one
        tile or none, so that together they have all remaining rows."""
        left = (self.end - self.first) % self.rows
        sizes = [size for size in (16, 8, 4) if size < self.rows]
        tiles = [Tiles(self, size, self.end - left + left // (2 * size) * (2 * size), left // size % 2, is_rest=True) for size in sizes]
        last = left % 4
        # number of rows of the last tile -> 1 if it has that many, else 0
        exist = {3: last // 3, 2: last % 3 // 2, 1: last % 2 * (1 - last // 3)} if self.rows > 2 else {1: last}
        return [*tiles, *(Tiles(self, size, self.end - last, count, is_rest=True) for size, count in exist.items() if size < self.rows)]

    def remainders(self, k: Kernel, register: int) -> Iterator[Remainder]:
        """Yield the rows that do not fill a full tile, as one tile. The caller's `for` emits its code once for at most `register` rows,
        which fit in one register, and, if a full tile has more rows, once for more rows. Yield nothing if a full tile has one row."""
        left = k.let("left", (self.end - self.first) % self.rows, self.rows - 1) if self.rows > 1 else ZERO
        least = 1
        for most in sorted({min(register, self.rows), self.rows}) if self.rows > 1 else ():
            with k.when(less(least - 1, left) & less(left, most + 1)):
                yield Remainder(self, most, self.end - left, left)
            least = most + 1

    @property
    def rows(self) -> int:
        """The largest number of rows of a tile. If a product has no row axis, this is 1."""
        return 1 if self.walk.product.row_axis is None else self.walk.shape.rows


@dataclass(frozen=True, slots=True)
class Remainder:
    """The rows of a claim after its tiles of full height, as one tile."""

    claim: Claim
    most: int  # largest number of rows of this tile, for which the caller's code is written
    first: Dim
    num_rows: Dim  # number of rows, known only at run time

    @contextmanager
    def each(self, k: Kernel) -> Generator[TileOrigin]:
        """Yield the tile of these rows in each panel of the claim."""
        with self.claim.panels(k) as panel:
            yield self.tile(panel)

    def tile(self, panel: Dim) -> TileOrigin:
        return replace(self.claim.tile(panel, self.first, self.most), height=self.num_rows)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one height, with all panels of a claim. The tiles are either all tiles of full height, one after another from row `first`,
    or at most one tile of fewer rows."""

    claim: Claim
    rows: int  # number of rows of a tile
    first: Dim
    count: Dim  # number of tiles
    is_rest: bool = False  # whether this is at most one tile of the remaining rows
    are_abreast: bool = False  # whether this is a single row that computes `abreast` panels together

    @property
    def exist(self) -> Scalar:
        return less(0, self.count)

    @property
    def num_rows(self) -> Dim:
        return self.count * self.rows

    @contextmanager
    def each(self, k: Kernel) -> Generator[TileOrigin]:
        """Yield each of the tiles, in each panel of the claim."""
        with self.claim.panels(k) as panel, self.first_rows(k) as row:
            yield self.claim.tile(panel, row, self.rows)

    @contextmanager
    def first_rows(self, k: Kernel) -> Generator[Dim]:
        """Loop over the tiles. Yield the first row of each."""
        if self.is_rest:
            yield self.first
        else:
            with k.serial("io", self.count) as io:
                yield self.first + io * self.rows
