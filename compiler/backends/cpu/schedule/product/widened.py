"""Sums of 4-bit weights that are widened to 8 bits for a matrix unit.

A thread widens a part of a panel into memory that stays in the first-level cache, and multiplies all rows of its block by it. The sum of a
channel is exact, and is in memory between parts. Few rows are multiplied on vectors instead, because widening would take longer than
reading the weights (compiler/machine/intrinsics/dot_widened.py). Their sums are exact, too, so a row has the same bits either way.

A tile computes the second plane only if one of its rows needs two planes. Rows that need one plane ignore the sum of the second, so a row
does not depend on the other rows of its tile.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from compiler.backends.cpu.schedule.product.blocks import Blocks, Heights, NextPart, Part, multiply
from compiler.backends.cpu.schedule.product.panels import Panels, Tiles
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, Point, TileOrigin, local_per_sum
from compiler.idioms.product import GroupedSum, Product
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast, const, fma, fold, less, total
from compiler.machine.formats import EIGHTHS, PANEL4
from compiler.machine.intrinsics.amx import AmxStayAwake
from compiler.machine.intrinsics.dot_widened import LONGEST, DotWidened
from compiler.machine.intrinsics.group_sums import GroupSums
from compiler.machine.products import ProductTile

F32, I32 = DType.F32, DType.I32
BLOCK_ROWS = 512  # rows that share a widened panel; widening costs as much as the product with about sixty rows
PLANES = 2  # maximum number of planes of a row


@dataclass(frozen=True, slots=True)
class Widened:
    name: ClassVar[str] = "widened"
    product: Product[GroupedSum]
    tile: ProductTile

    def write(self, k: Kernel) -> None:
        p = self.product
        blocks = Blocks(Dim.of(p.sums[0].group), self.tile, p.num_columns, len(p.sums))
        with Panels(p, self.tile.shape, together=blocks.together, block_rows=BLOCK_ROWS).claims(k) as claim:
            sums = [self.allocate(k, s, number, blocks.together) for number, s in enumerate(p.sums)]
            heights = Heights(claim, self.tile)
            for tiles in heights.all:
                with k.when(tiles.exist), tiles.first_rows(k) as row:
                    for s in sums:
                        s.count_planes(row - claim.first, claim.tile(claim.panel, row, tiles.rows))
            most = 0 if self.tile.few is None else self.tile.few.rows
            with k.when(less(claim.end - claim.first, most + 1)):
                for tiles in (tiles for tiles in heights.all if tiles.rows <= most):
                    with k.when(tiles.exist):
                        self.write_few(k, sums, tiles)
            with k.orelse():
                self.write_many(k, blocks, heights, sums)
            with claim.lines(k, claim.end - claim.first) as (m, beside, line):
                self.store_line(k, sums, beside, m, line)

    def write_many(self, k: Kernel, blocks: Blocks, heights: Heights, sums: Sequence[WidenedSum]) -> None:
        """Compute the exact sums of a claim on the matrix unit."""
        claim = heights.claim
        heights.configure(k)
        for panel, part, later in blocks.parts(k, claim):
            for s in sums:
                self.widen(k, s, panel, part, later)
            for tile in heights.each(k, panel):
                for s in sums:
                    self.add(k, s, panel - claim.panel, tile.first - claim.first, tile, part)

    def allocate(self, k: Kernel, s: GroupedSum, number: int, together: int) -> WidenedSum:
        shape, rows = self.tile.shape, 1 if self.product.row_axis is None else BLOCK_ROWS
        assert self.tile.block is not None, self.tile
        exact = k.local(f"exact{number}", PLANES, together, rows, shape.vectors, shape.lanes, dtype=I32)
        wide = k.local(f"wide{number}", self.tile.block * shape.columns, dtype=DType.I8)
        return WidenedSum(s, exact, wide, k.local(f"planes{number}", rows, dtype=I32))

    def widen(self, k: Kernel, s: WidenedSum, panel: Dim, part: Part, later: NextPart) -> None:
        panels, multipliers = s.grouped.element.buffers
        depth, group = s.grouped.format.depth, shared_multiplier(s.grouped)

        def places(panel: Dim, begin: Dim) -> tuple[Load, Load]:
            return Load(panels, (panel, begin // depth, ZERO)), Load(multipliers, (panel, begin // group, ZERO))

        assert self.tile.widen is not None, self.tile
        op, length = replace(self.tile.widen, group=group), self.tile.depth
        with k.serial("some", part.depth // length) as some:
            at = some * length
            wide, columns = s.wide[at * self.tile.shape.columns], places(panel, part.begin + at)
            k.tile(op, wide, *columns, *places(later.panel, later.begin + at), dims=(Dim.of(length),))
            k.tile(AmxStayAwake())

    def add(self, k: Kernel, s: WidenedSum, beside: Dim, m: Dim, tile: TileOrigin, part: Part) -> None:
        """Multiply the planes of a tile by a widened part of a panel. The first part overwrites the exact sums."""
        op = self.tile.product(tile.shape.rows, fresh=part.is_first)
        with s.planes(k, m) as plane:
            multiply(k, op, s.exact[plane, beside, m, ZERO, ZERO], s.row(tile, plane, part.begin), s.wide[0], part, s.stride)

    # --- few rows ------------------------------------------------------------------------------------------------------

    def write_few(self, k: Kernel, sums: Sequence[WidenedSum], tiles: Tiles) -> None:
        """Compute the exact sums of a tile of few rows."""
        claim, m = tiles.claim, tiles.first - tiles.claim.first
        begins = [self.begin_groups(k, s, m, claim.tile(claim.panel, tiles.first, tiles.rows)) for s in sums]
        with claim.panels(k) as panel:
            tile = claim.tile(panel, tiles.first, tiles.rows)
            for s, begin in zip(sums, begins, strict=True):
                with s.planes(k, m) as plane:
                    for first in range(0, s.grouped.group, LONGEST):
                        part = Part(Dim.of(first), Dim.of(min(LONGEST, s.grouped.group - first)))
                        self.add_few(k, s, begin, plane, panel - claim.panel, m, tile, part)

    def begin_groups(self, k: Kernel, s: WidenedSum, m: Dim, tile: TileOrigin) -> Array:
        """Store the value with which the sum of each group begins, for each plane and row: minus what the weights' offset adds."""
        group = shared_multiplier(s.grouped)
        begin = k.local("begin", PLANES, tile.shape.rows, s.grouped.group // group, dtype=I32)
        with s.planes(k, m) as plane, tile.lines(k) as (i, line):
            op = GroupSums(group, times=PANEL4.offset)
            k.tile(op, begin[plane, i, ZERO], s.row(line, plane, ZERO), dims=(begin.shape[-1],))
        return begin

    def add_few(self, k: Kernel, s: WidenedSum, begin: Array, plane: Dim, beside: Dim, m: Dim, tile: TileOrigin, part: Part) -> None:
        """Multiply one plane of a tile by a part of a panel. The products are summed in eighths, without half a step per weight."""
        group, depth, rows = shared_multiplier(s.grouped), s.grouped.format.depth, tile.shape.rows
        panels, multipliers = s.grouped.element.buffers
        eighths = k.local("eighths", rows, tile.shape.vectors, tile.shape.lanes, dtype=I32)
        with k.serial("i", rows) as i:
            offsets = total((part.depth // group,), lambda g: begin[plane, i, part.begin // group + g])  # -8 times the sum of the row
            with tile.vectors(k) as (v, lane):
                eighths[i, v, lane] = (offsets >> 1) * -1
        places = Load(panels, (tile.panel, part.begin // depth, ZERO)), Load(multipliers, (tile.panel, part.begin // group, ZERO))
        op = DotWidened(rows, tile.shape.columns, group)
        columns = begin[plane, ZERO, part.begin // group], *places
        k.tile(op, eighths[ZERO, ZERO, ZERO], s.row(tile, plane, part.begin), *columns, dims=(part.depth, s.stride, begin.shape[-1]))
        with k.serial("i", rows) as i, tile.vectors(k) as (v, lane):
            found = eighths[i, v, lane] >> EIGHTHS
            s.exact[plane, beside, m + i, v, lane] = found if part.is_first else s.exact[plane, beside, m + i, v, lane] + found

    def store_line(self, k: Kernel, sums: Sequence[WidenedSum], beside: Dim, m: Dim, line: TileOrigin) -> None:
        """Store one row of the result. A channel is one group, so its exact sum times its factor is the whole sum."""
        seconds = local_per_sum(k, self.product, "second", line.shape.vectors, line.shape.lanes)
        for s, second in zip(sums, seconds, strict=True):  # the sum of the second plane, or 0 if the row has one plane
            with k.when(s.two_planes(line.corner)), line.vectors(k) as (v, lane):
                second[v, lane] = cast(s.exact[1, beside, m, v, lane], F32)
            with k.orelse(), line.vectors(k) as (v, lane):
                second[v, lane] = 0.0
        with line.vectors(k) as (v, lane):
            totals: list[Scalar] = []
            for s, second in zip(sums, seconds, strict=True):
                node = s.grouped.node
                exact = node.joined(cast(s.exact[0, beside, m, v, lane], F32), second[v, lane])
                totals.append(fma(exact, s.at(node.factor, line.at(ZERO, v, lane)), const(0.0, F32)))
            line.store(k, (ZERO, v, lane), totals)


@dataclass(frozen=True, slots=True)
class WidenedSum:
    """One sum of the product, and the thread's own memory for a block of rows."""

    grouped: GroupedSum
    exact: Array  # exact sums by plane, panel, row, vector and lane
    wide: Array  # the widened part of a panel
    num_planes: Array  # number of planes that each tile multiplies, stored at the tile's first row

    def count_planes(self, m: Dim, tile: TileOrigin) -> None:
        """Store the number of planes that a tile multiplies: two if one of its rows needs two, else one."""
        some = fold(ReduceFn.ANY, (tile.shape.rows,), lambda r: self.two_planes(tile.at(r, ZERO, ZERO)))
        self.num_planes[m] = cast(some, I32) + 1

    @contextmanager
    def planes(self, k: Kernel, m: Dim) -> Generator[Dim]:
        """Loop over the planes that the tile with first row `m` multiplies."""
        with k.scope(), k.serial("plane", k.let("planes", self.num_planes[m], PLANES, lower=1)) as plane:
            yield plane

    def row(self, tile: TileOrigin, plane: Dim, at: Dim) -> Load:
        """Return the place of element `at` along k, in a plane of the tile's first row."""
        q = self.grouped.q
        return Load(q.buffer, (*(d.substitute(tile.corner) for d in q.indices[:-2]), plane, at))

    @property
    def stride(self) -> Dim:
        """The number of elements from one row to the next."""
        *_, planes, length = self.grouped.q.buffer.shape
        return planes * length

    def two_planes(self, place: Point) -> Scalar:
        assert self.grouped.node.two_planes is not None, self.grouped
        return self.at(self.grouped.node.two_planes, place)

    def at(self, scalar: Scalar, place: Point) -> Scalar:
        """Return the scalar at an element. The group's index is 0, because the only group is the whole of k."""
        return rewrite_dims(scalar, {**place, self.grouped.axis: ZERO})


def is_widened(s: GroupedSum, tile: ProductTile) -> bool:
    """Return whether the sum has a single group, as long as the channel, and a second plane that only some rows need."""
    if not tile.reads(s.element) or not tile.widens(s.group, shared_multiplier(s)):
        return False
    return s.num_groups == Dim.of(1) and s.node.two_planes is not None and not s.node.begins


def shared_multiplier(s: GroupedSum) -> int:
    """Return the number of weights along k that share a multiplier."""
    return s.group // s.element.buffers[1].shape[-2].const
