"""Sums of groups of integers: each group is summed exactly in i32, and the groups are added in order in f32.

The exact sum of a group has the same bits in any tile. Rows of 16-bit integers may be stored as two planes, which are their upper and their
lower bytes. Each plane of a row is a row of the tile, so the planes share the weights that the tile reads. With weights of 4 bits, most
numbers of the upper plane are zero. For such weights, some tiles add both planes to one sum, and skip zeros of the upper plane. Otherwise,
each plane has a sum. The two sums of a group are joined as integers if the joined sum fits in 32 bits. Converted to f32, the joined sum
equals the two sums joined as floats.

Memory limits the speed of a single row, and a core reads a single dense stream fastest. So for a single row, the kernel first reads the
scales of several groups, stores the factors in the first-level cache, and then reads the panels of these groups. If scales are stored
behind the weights of their group (streams.py), the kernel reads them there, group by group. If a product has several sums, the kernel
computes several panels of one sum for a single row, and then these panels of the next sum.

If one group is the whole of k, the axis that is summed, a matrix unit computes k in parts, and the exact sums of a block of rows are in
memory between parts. A claim is what a thread computes at a time: a block of rows with one or more panels (panels.py).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from compiler.backends.cpu.schedule.product.blocks import UNIT_BLOCK_ROWS, Blocks, LinesAhead, Part, configure, configure_counted, multiply
from compiler.backends.cpu.schedule.product.panels import BLOCK_ROWS, Panels, Remainder, Tiles
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, Element, Point, TileOrigin, local_per_sum
from compiler.idioms.product import GroupedSum, Product
from compiler.ir.dims import Dim, ceil_div, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast, const
from compiler.ir.prove import prove_divisible
from compiler.machine.intrinsics.amx import TILE_ROWS
from compiler.machine.products import ProductTile
from compiler.passes.number_schemes import LONGEST

F32, I32 = DType.F32, DType.I32
ABREAST = 4  # minimum number of panels of one sum that are computed for a single row before the next sum
LONGEST_JOINED = 4096  # maximum number of products of 4-bit weights and 16-bit rows whose sum fits in 32 bits
BLOCK_BYTES = 256 << 10  # maximum size of the rows of a block, a quarter of the second-level cache; blocks of 32 rows may exceed it
BLOCKS = (BLOCK_ROWS, 128, 64, 32)  # possible numbers of rows of a block
AT_ONCE = 8  # number of groups whose scales are read at once for a single row: with groups of 32, 0.5 KB, for 4 KB of 4-bit weights


@dataclass(frozen=True, slots=True)
class Groups:
    """A product whose sums multiply integers in groups."""

    name: ClassVar[str] = "integer"  # the attribute `schedule` of the kernel
    product: Product[GroupedSum]
    tile: ProductTile

    def write(self, k: Kernel) -> None:
        """Write the loops of the product. Sums are in memory if a matrix unit computes them and each sum has one group, otherwise in
        registers."""
        if self.tile.on_matrix_unit and all(s.num_groups == Dim.of(1) for s in self.product.sums):
            self.write_in_memory(k)
        else:
            self.write_in_registers(k)

    @property
    def num_planes(self) -> int:
        """The number of planes of a row, the same for all sums."""
        return self.product.sums[0].num_planes

    @property
    def joins_planes(self) -> bool:
        """Whether both planes of a row share one sum."""
        return self.num_planes == 2 and self.tile.capped(1) is not None and all(s.group <= LONGEST_JOINED for s in self.product.sums)

    @property
    def joins_sums(self) -> bool:
        """Whether the sums of the two planes of a row are joined as integers: each plane has a sum, and the joined sums fit in 32 bits.
        Floating-point units are busy with the multiplications by factors, but integer units have time to join sums."""
        return self.num_planes == 2 and not self.joins_planes and all(s.group <= LONGEST[16] for s in self.product.sums)

    @property
    def abreast(self) -> int:
        """The number of panels of one sum that are computed for a single row before the next sum. It is 1 if there is one sum, or no row
        axis."""
        return 1 if len(self.product.sums) == 1 or self.product.row_axis is None else ABREAST

    @property
    def panels(self) -> Panels:
        """The panels of the product. If BLOCK_ROWS rows take more than BLOCK_BYTES, a block has fewer rows, so that these rows stay in the
        second-level cache while several panels are multiplied. A claim then has more panels, so that it is as much work as BLOCK_ROWS rows
        with one panel. A block has BLOCK_ROWS rows if a matrix unit multiplies, if rows choose among matrices, or if the length of a row is
        not known at compile time."""
        shape, q = self.tile.shape_of(self.num_planes), self.product.sums[0].q.buffer
        row_bytes = q.shape[-1].const * self.num_planes * q.dtype.num_bytes if q.shape[-1].is_const else 0
        rows = next((n for n in BLOCKS if n * row_bytes <= BLOCK_BYTES), BLOCKS[-1])
        if self.product.choice is not None or self.tile.on_matrix_unit or rows == BLOCK_ROWS:
            return Panels(self.product, shape, abreast=self.abreast)
        return Panels(self.product, shape, BLOCK_ROWS // rows, self.abreast, block_rows=rows, rows_per_panel=rows)

    # --- sums in registers -----------------------------------------------------------------------------------------------

    def write_in_registers(self, k: Kernel) -> None:
        """Write the loops of the product, with the sums of a tile in registers. For a single row, several panels of one sum may be computed
        before the next sum."""
        with self.panels.claims(k) as claim:
            for tiles in claim.tiles(k):
                if tiles.are_abreast:
                    self.write_abreast(k, tiles)
                else:
                    with tiles.each(k) as tile:
                        self.write_tile(k, tile)

    def write_tile(self, k: Kernel, tile: TileOrigin) -> None:
        """Compute each sum of a tile over the whole of k, and store the results."""
        accs = local_per_sum(k, self.product, "acc", tile.shape.rows, tile.shape.vectors, tile.shape.lanes)
        configure(k, self.tile, tile.shape.rows * self.num_planes)
        for s, acc in zip(self.product.sums, accs, strict=True):
            self.write_sum(k, s, tile, acc)
        with tile.elements(k) as at:
            tile.store(k, at, [acc[at] for acc in accs])

    def write_abreast(self, k: Kernel, row: Tiles) -> None:
        """Compute all panels of one sum for a single row, then all panels of the next sum. At the end, store the results."""
        claim, shape = row.claim, self.tile.shape
        finished = local_per_sum(k, self.product, "held", self.abreast, shape.vectors, shape.lanes)
        configure(k, self.tile, self.num_planes)
        for s, total in zip(self.product.sums, finished, strict=True):
            with row.each(k) as tile:
                acc = k.local("acc", 1, shape.vectors, shape.lanes)
                self.write_sum(k, s, tile, acc)
                with tile.vectors(k) as (v, lane):
                    total[tile.panel - claim.panel, v, lane] = acc[ZERO, v, lane]
        with row.each(k) as tile, tile.elements(k) as (m, v, lane):
            tile.store(k, (m, v, lane), [total[tile.panel - claim.panel, v, lane] for total in finished])

    def write_sum(self, k: Kernel, s: GroupedSum, tile: TileOrigin, acc: Array) -> None:
        """Compute one sum of a tile in `acc`, group after group. For a single row of several groups, `write_runs` reads the factors of some
        groups before their weights."""
        self.begin(k, s, tile, acc)
        if tile.shape.rows == 1 and s.num_groups != Dim.of(1):
            self.write_runs(k, s, tile, acc)
        else:
            with k.serial("g", s.num_groups) as g, self.exact_sums(k, s, tile, g) as (at, total):
                acc[at] += total * of_group(s.node.factor, s, tile, g, at)

    def begin(self, k: Kernel, s: GroupedSum, tile: TileOrigin, acc: Array) -> None:
        """Set `acc` to the value with which a sum begins: the sum of the groups' terms, or 0 if there are no terms."""
        with tile.elements(k) as at:
            acc[at] = 0.0
        if s.node.term is not None:
            with k.serial("g", s.num_groups) as g, tile.elements(k) as at:
                acc[at] += of_group(s.node.term, s, tile, g, at)

    def write_runs(self, k: Kernel, s: GroupedSum, tile: TileOrigin, acc: Array) -> None:
        """Compute a sum for a single row. For each run of adjacent groups, first read all factors, then sum the groups."""
        with self.runs(k, s.num_groups) as (first, count):
            factors = k.local("factors", AT_ONCE, tile.shape.vectors, tile.shape.lanes)
            with k.serial("i", count) as i, tile.elements(k) as at:
                factors[i, *at[1:]] = of_group(s.node.factor, s, tile, first + i, at)
            with k.serial("i", count) as i, self.exact_sums(k, s, tile, first + i) as (at, total):
                acc[at] += total * factors[i, *at[1:]]

    @contextmanager
    def runs(self, k: Kernel, num_groups: Dim) -> Generator[tuple[Dim, Dim]]:
        """Loop over the groups in runs of up to AT_ONCE adjacent groups. Yield the first group and the number of groups of each run."""
        if prove_divisible(num_groups, AT_ONCE):
            with k.serial("run", num_groups // AT_ONCE) as run:
                yield run * AT_ONCE, Dim.of(AT_ONCE)
        else:
            with k.serial("run", ceil_div(num_groups, AT_ONCE)) as run:
                yield run * AT_ONCE, k.let("count", dim_min(AT_ONCE, num_groups - run * AT_ONCE), AT_ONCE)

    @contextmanager
    def exact_sums(self, k: Kernel, s: GroupedSum, tile: TileOrigin, g: Dim) -> Generator[tuple[Element, Scalar]]:
        """Sum one group exactly: each plane of a row by itself, or both planes in one sum. Yield each element of the tile with its sum of
        all planes as f32."""
        num_sums, joins = 1 if self.joins_planes else s.num_planes, self.joins_planes or self.joins_sums
        exact = k.local("exact", tile.shape.rows * num_sums, tile.shape.vectors, tile.shape.lanes, dtype=I32)
        part = Part(s.first.substitute({s.axis: g}), Dim.of(s.group))
        with tile.elements(k) as (m, v, lane):
            place = {**tile.at(m, v, lane), s.axis: g}
            for plane, begin in enumerate(joined_begins(s, place, num_sums) if joins else begins(s, place)):
                exact[m * num_sums + plane, v, lane] = begin
        if self.joins_planes:
            self.add_joined(k, s, exact[ZERO, ZERO, ZERO], tile, part)
        else:
            self.add(k, s, exact[ZERO, ZERO, ZERO], tile, part)
        with tile.elements(k) as (m, v, lane):
            planes = [exact[m * num_sums + plane, v, lane] for plane in range(num_sums)]
            whole = (planes[0] << 8) + planes[1] if self.joins_sums else planes[0]
            total = cast(whole, F32) if joins else s.node.exact(planes)
            yield (m, v, lane), rewrite_dims(total, {**tile.at(m, v, lane), s.axis: g})

    # --- sums in memory --------------------------------------------------------------------------------------------------

    def write_in_memory(self, k: Kernel) -> None:
        """Write the loops of the product on a matrix unit, for sums of one group. Each claim computes its tiles of full height, and then
        its remaining rows."""
        sums = self.product.sums
        blocks = Blocks(Dim.of(sums[0].group), self.tile, self.product.num_columns, sum(s.num_planes for s in sums))
        with Panels(self.product, self.tile.shape, together=blocks.together, block_rows=UNIT_BLOCK_ROWS).claims(k) as claim:
            with k.scope():
                self.write_block(k, blocks, claim.full_tiles)
            for rest in claim.remainders(k, TILE_ROWS // self.num_planes):
                self.write_rest(k, rest)

    def write_block(self, k: Kernel, blocks: Blocks, tiles: Tiles) -> None:
        """Compute the sums of all tiles of full height, one part of k after another, and store the results."""
        claim, shape, sums, num_planes = tiles.claim, self.tile.shape, self.product.sums, self.num_planes
        exact = local_per_sum(
            k, self.product, "exact", blocks.together, UNIT_BLOCK_ROWS * num_planes, shape.vectors, shape.lanes, dtype=I32
        )
        configure(k, self.tile, tiles.rows * num_planes)
        for tile, part, ahead in blocks.tiles(k, tiles):
            beside, m = tile.panel - claim.panel, tile.first - claim.first
            for s, e in zip(sums, exact, strict=True):
                self.add(k, s, e[beside, m * num_planes, ZERO, ZERO], tile, part, ahead, fresh=part.is_first)
        with claim.lines(k, tiles.num_rows) as (m, beside, line):
            self.store_line(k, line, exact, beside, m)

    def write_rest(self, k: Kernel, rest: Remainder) -> None:
        """Compute the sums of the remaining rows, over the whole of k at once, and store the results."""
        shape, sums = self.tile.shape, self.product.sums
        exact = local_per_sum(k, self.product, "exact", 1, rest.most * self.num_planes, shape.vectors, shape.lanes, dtype=I32)
        configure_counted(k, self.tile, rest.num_rows * self.num_planes)
        with rest.each(k) as tile:
            for s, e in zip(sums, exact, strict=True):
                self.add(k, s, e[ZERO, ZERO, ZERO, ZERO], tile, Part(ZERO, Dim.of(s.group)), fresh=True)
            with tile.lines(k) as (m, line):
                self.store_line(k, line, exact, ZERO, m)

    def store_line(self, k: Kernel, line: TileOrigin, exact: Sequence[Array], beside: Dim, m: Dim) -> None:
        """Store one row of the result. A column of weights is one group, so the whole sum is the group's term, if there is one, plus its
        exact sum times its factor."""
        sums, shape, num_planes = self.product.sums, self.tile.shape, self.num_planes
        accs = local_per_sum(k, self.product, "acc", 1, shape.vectors, shape.lanes)
        for s, acc in zip(sums, accs, strict=True):
            self.begin(k, s, line, acc)
        with line.elements(k) as at:
            for s, e, acc in zip(sums, exact, accs, strict=True):
                place = {**line.at(*at), s.axis: ZERO}
                planes = [begin + e[beside, m * num_planes + plane, *at[1:]] for plane, begin in enumerate(begins(s, place))]
                acc[at] += rewrite_dims(s.node.exact(planes), place) * rewrite_dims(s.node.factor, place)
            line.store(k, at, [acc[at] for acc in accs])

    # --- helpers of both kinds of sums --------------------------------------------------------------------------------

    def add(
        self, k: Kernel, s: GroupedSum, exact: Load, tile: TileOrigin, part: Part, ahead: LinesAhead | None = None, *, fresh: bool = False
    ) -> None:
        """Add the products of a part of k to the exact sums. If `fresh`, a matrix unit overwrites the sums instead."""
        row = tuple(d.substitute(tile.corner) for d in s.q.indices[:-2])
        rows = Load(s.q.buffer, (*row, ZERO, part.begin))
        columns = self.panel(s, tile, part.begin)
        height = None if tile.height is None else tile.height * s.num_planes
        op = self.tile.product(tile.shape.rows * s.num_planes, fresh=fresh, counted=height is not None)
        multiply(k, op, exact, rows, columns, part, s.q.buffer.shape[-1], ahead=ahead, height=height)

    def add_joined(self, k: Kernel, s: GroupedSum, exact: Load, tile: TileOrigin, part: Part) -> None:
        """Add the products of a part of k to sums that both planes of a row share."""
        op = self.tile.capped(tile.shape.rows)
        assert op is not None, self.tile
        row, columns = tuple(d.substitute(tile.corner) for d in s.q.indices[:-2]), self.panel(s, tile, part.begin)
        multiply(k, op, exact, Load(s.q.buffer, (*row, ZERO, part.begin)), columns, part, s.q.buffer.shape[-1])

    def panel(self, s: GroupedSum, tile: TileOrigin, k: Dim) -> Load:
        """Return the place in the panels at which element `k` of the tile's first column is stored."""
        matrix = tuple(d.substitute(tile.corner) for d in s.matrix)
        return Load(s.panels, (*matrix, tile.panel, s.format.lines(k), ZERO))


def begins(s: GroupedSum, place: Point) -> Sequence[Scalar]:
    """Return the value with which the exact sum of each plane begins: that of `node.begins` of the sum, or 0 if there are no such
    values."""
    return [rewrite_dims(begin, place) for begin in s.node.begins] or [const(0, I32)] * s.num_planes


def joined_begins(s: GroupedSum, place: Point, num_sums: int) -> Sequence[Scalar]:
    """Return the values with which the exact sums begin if the two planes of a row share one sum, or if the sums of the planes are joined.
    The last sum begins with the joined value of both planes. If there are two sums, the first one begins with 0."""
    upper, lower = begins(s, place)
    return [const(0, I32)] * (num_sums - 1) + [(upper << 8) + lower if s.node.begins else lower]


def of_group(scalar: Scalar, s: GroupedSum, tile: TileOrigin, g: Dim, at: Element) -> Scalar:
    """Return the scalar, such as the factor of a sum, for one group at an element of the tile."""
    return rewrite_dims(scalar, {**tile.at(*at), s.axis: g})
