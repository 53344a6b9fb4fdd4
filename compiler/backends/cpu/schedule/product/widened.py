"""Sums of 4-bit weights that are widened to 8 bits for a matrix unit. A row of 8-bit integers is one plane, and a row of 16-bit integers
has two planes of bytes.

A thread widens a part of a panel into memory that stays in the first-level cache, and multiplies all rows of its block by this part. While
the unit multiplies a part, vector instructions widen the part that is multiplied next (compiler/machine/intrinsics/amx_widening.py). The
sum over a whole column of weights is exact, and is in memory between parts. If the sums of all rows of a claim (what a thread computes at a
time: panels.py) fit in the unit's registers, and no row needs two planes, the sums can stay in registers over the whole of k, the axis that
is summed (compiler/machine/intrinsics/amx_channels.py). A single row is multiplied on vectors instead, because widening would take longer
than reading the weights (compiler/machine/intrinsics/dot_widened.py). All three ways compute exact sums, so a row has the same bits in
each.

A tile computes the second plane only if one of its rows needs two planes. Rows that need one plane ignore the sum of the second plane, so a
row does not depend on the other rows of its tile.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from compiler.backends.cpu.schedule.product.blocks import UNIT_BLOCK_ROWS, Blocks, Part
from compiler.backends.cpu.schedule.product.panels import Claim, Panels, Tiles
from compiler.backends.cpu.schedule.product.tile_origin import ZERO, Point, TileOrigin, local_per_sum
from compiler.idioms.product import GroupedSum, Product
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast, const, equal, fma, fold, index, less, maximum, total
from compiler.machine.formats import EIGHTHS, PANEL4
from compiler.machine.intrinsics.amx import TILE_ROWS, AmxConfigureRows, AmxStayAwake
from compiler.machine.intrinsics.amx_channels import AHEAD, MOST_REGISTERS, RING, STEP, AmxChannels
from compiler.machine.intrinsics.amx_widening import SHARE_BITS, AmxWidening
from compiler.machine.intrinsics.dot_widened import LONGEST, DotWidened
from compiler.machine.intrinsics.group_sums import GroupSums
from compiler.machine.intrinsics.widen_panel import COLUMNS, STRETCH, WidenPanel
from compiler.machine.products import ProductTile

F32, I32 = DType.F32, DType.I32
AWAKE_ROWS = 8  # number of rows that a thread stores between two `AmxStayAwake`, without which the idle unit's next product would be late
PLANES = 2  # maximum number of planes of a row


@dataclass(frozen=True, slots=True)
class Widened:
    """A product whose 4-bit weights are widened to 8 bits."""

    name: ClassVar[str] = "widened"  # the attribute `schedule` of the kernel
    product: Product[GroupedSum]
    tile: ProductTile

    def write(self, k: Kernel) -> None:
        """Write the loops of the product. If the weights allow it (`has_channels`), a claim whose sums fit in the unit's registers is
        computed by `write_channels`. Any other claim is computed by `write_parts`."""
        p = self.product
        blocks = Blocks(Dim.of(p.sums[0].group), self.tile, p.num_columns, len(p.sums))
        with Panels(p, self.tile.shape, together=blocks.together, block_rows=UNIT_BLOCK_ROWS).claims(k) as claim:
            sums = [self.allocate(k, s, number, blocks.together) for number, s in enumerate(p.sums)]
            registers = Registers.of(k, claim)
            for s in sums:
                s.count_planes(k, registers)
            if self.has_channels:
                with k.when(self.fits_registers(registers, sums)):
                    self.write_channels(k, blocks, registers, sums)
                with k.orelse():
                    self.write_parts(k, blocks, registers, sums)
            else:
                self.write_parts(k, blocks, registers, sums)

    def write_parts(self, k: Kernel, blocks: Blocks, registers: Registers, sums: Sequence[WidenedSum]) -> None:
        """Compute a claim of any number of rows, and store the results. A claim of at most `few` rows is multiplied on vectors. The sums of
        a larger claim are in memory between parts of k."""
        claim = registers.claim
        with k.when(less(claim.end - claim.first, self.few + 1)):
            for tiles in (tiles for tiles in (claim.full_tiles, *claim.rest_tiles) if tiles.rows <= self.few):
                with k.when(tiles.exist):
                    self.write_few(k, sums, tiles)
        with k.orelse():
            self.write_many(k, blocks, registers, sums)
        with claim.lines(k, claim.end - claim.first) as (m, beside, line):
            self.store_line(k, sums, beside, registers.place(m), line)

    @property
    def few(self) -> int:
        """The largest number of rows that are multiplied without widening."""
        return 0 if self.tile.few is None else self.tile.few.rows

    def write_many(self, k: Kernel, blocks: Blocks, registers: Registers, sums: Sequence[WidenedSum]) -> None:
        """Compute the exact sums of a claim on the matrix unit, one part of k for all panels, then the next part. The first part is widened
        before the unit starts, and each further part while the unit multiplies the previous one."""
        claim = registers.claim
        wide = k.local("wide", 2, blocks.size * self.tile.shape.columns, dtype=DType.I8)
        order = Order.of(k, blocks, claim)
        k.tile(AmxConfigureRows(), dims=(registers.height,))
        self.widen(k, sums[0], wide, claim, order)
        with claim.panels(k) as panel:
            self.add(k, sums, wide, registers, order, ZERO, panel)
        if order.num_parts > 1:
            with k.serial("part", order.num_parts - 1) as part, claim.panels(k) as panel:
                self.add(k, sums, wide, registers, order, part + 1, panel)

    def allocate(self, k: Kernel, s: GroupedSum, number: int, together: int) -> WidenedSum:
        """Allocate memory for the results of a sum, for `together` panels. `number` is the number of the sum, and becomes a part of the
        arrays' names."""
        shape, rows = self.tile.shape, TILE_ROWS if self.product.row_axis is None else UNIT_BLOCK_ROWS
        exact = k.local(f"exact{number}", PLANES, together, rows, shape.vectors, shape.lanes, dtype=I32)
        return WidenedSum(s, exact, k.local(f"planes{number}", rows // TILE_ROWS, dtype=I32))

    def widen(self, k: Kernel, s: WidenedSum, wide: Array, claim: Claim, order: Order) -> None:
        """Widen the first part of the first panel of a claim."""
        length, first, later = self.tile.depth, order.part(k, ZERO), order.part(k, Dim.of(1))
        with k.serial("some", first.depth // length) as some:
            at = some * length
            ahead = later.begin + dim_min(at, later.depth - length)  # the later part may be shorter
            places = *s.places(claim.point, first.panel, first.begin + at), *s.places(claim.point, later.panel, ahead)
            k.tile(self.widening(s), wide[0, at * self.tile.shape.columns], *places, dims=(Dim.of(length),))
            k.tile(AmxStayAwake())

    def widening(self, s: WidenedSum) -> WidenPanel:
        """Return the tile that widens the weights of a sum."""
        assert isinstance(self.tile.widen, WidenPanel), self.tile
        return replace(self.tile.widen, group=shared_multiplier(s.grouped))

    def add(self, k: Kernel, sums: Sequence[WidenedSum], wide: Array, registers: Registers, order: Order, part: Dim, panel: Dim) -> None:
        """For each sum, multiply all rows by a part of a panel, and meanwhile widen the part that is multiplied next. The first part
        overwrites the exact sums."""
        claim, columns = registers.claim, self.tile.shape.columns
        with k.scope():
            number = part * order.panels + (panel - claim.panel)
            own, later, after = (order.part(k, number + i) for i in range(3))
            for i, s in enumerate(sums):
                is_last = i == len(sums) - 1
                following, wanted, then = (sums[0], later, after) if is_last else (sums[i + 1], own, later)
                items = wanted.depth // STRETCH * (columns // COLUMNS) * (1 - wanted.is_over)
                steps = own.depth // self.tile.depth
                share = k.let("share", ceil_div(items * (1 << SHARE_BITS), registers.num_tiles * steps))
                turn = number * len(sums) + i
                parts = (
                    wide[(turn + 1) % 2, ZERO],
                    *following.places(claim.point, wanted.panel, wanted.begin),
                    *following.places(claim.point, then.panel, then.begin),
                )
                for blocks, at in registers.tiles(k):
                    first = registers.start(at)
                    second = registers.start(at + 1) - first if blocks > 1 else ZERO
                    op = AmxWidening(blocks, columns, shared_multiplier(following.grouped), fresh=part == ZERO)
                    with s.planes(k, s.planes_of(blocks, at)) as plane:
                        exact = s.exact[plane, panel - claim.panel, at * TILE_ROWS, ZERO, ZERO]
                        rows, dims = s.row(claim.tile(panel, first, 1), plane, own.begin), (own.depth, s.stride, registers.height, second)
                        shares = (at // 2 * steps * share, share, items * (1 - plane))
                        k.tile(op, exact, rows, wide[turn % 2, ZERO], *parts, dims=(*dims, *shares))

    # --- rows whose sums fit in registers ------------------------------------------------------------------------------

    @property
    def has_channels(self) -> bool:
        """Whether sums can stay in registers over the whole of k, as far as the weights decide: columns of weights are long enough, and in
        all sums the same number of weights shares a multiplier."""
        groups = {shared_multiplier(s) for s in self.product.sums}
        return len(groups) == 1 and self.product.sums[0].group >= AHEAD * STEP

    def fits_registers(self, registers: Registers, sums: Sequence[WidenedSum]) -> Scalar:
        """Return whether a claim has more than `few` rows, all its sums fit in registers, and no row needs two planes."""
        rows = registers.claim.end - registers.claim.first
        fits = less(self.few, rows) & less(rows, MOST_REGISTERS * TILE_ROWS + 1)
        for s in sums:
            fits = fits & ~fold(ReduceFn.ANY, (dim_min(registers.count, MOST_REGISTERS),), lambda at, s=s: const(1, I32) < s.num_planes[at])
        return fits

    def write_channels(self, k: Kernel, blocks: Blocks, registers: Registers, sums: Sequence[WidenedSum]) -> None:
        """Compute a claim panel by panel, with the sums in registers over the whole of k, and store the results."""
        claim, columns, first = registers.claim, self.tile.shape.columns, sums[0]
        ring = k.local("ring", RING, STEP * columns, dtype=DType.I8)
        k.tile(AmxConfigureRows(), dims=(registers.height,))
        places = first.places(claim.point, claim.panel, ZERO)
        k.tile(self.widening(first), ring[0, ZERO], *places, *places, dims=(Dim.of(AHEAD * STEP),))
        last_panel = ceil_div(blocks.num_columns, columns) - 1
        with k.scope(), claim.panels(k) as panel:
            beside = panel - claim.panel
            goes_on = k.let("goes_on", dim_min(claim.num_panels - 1 - beside, 1), 1)
            after = k.let("after", dim_min(panel + 1, last_panel), last_panel)
            for i, s in enumerate(sums):
                is_last = i == len(sums) - 1
                then = first.places(claim.point, after, ZERO) if is_last else sums[i + 1].places(claim.point, panel, ZERO)
                following = AHEAD * goes_on if is_last else Dim.of(AHEAD)
                slot = (beside * len(sums) + i) * (blocks.extent // STEP) % RING
                operands = s.row(claim.tile(panel, claim.first, 1), ZERO, ZERO), ring[0, ZERO], *s.places(claim.point, panel, ZERO), *then
                starts = [registers.start(Dim.of(at)) - claim.first for at in range(1, MOST_REGISTERS)]
                for count in range(1, MOST_REGISTERS + 1):
                    with k.when(equal(index(registers.count), count)):
                        op = AmxChannels(count, columns, shared_multiplier(s.grouped))
                        dims = blocks.extent, s.stride, registers.height, *starts, slot, following
                        k.tile(op, s.exact[0, ZERO, ZERO, ZERO, ZERO], *operands, dims=dims)
            self.store_panel(k, sums, registers, panel)

    def store_panel(self, k: Kernel, sums: Sequence[WidenedSum], registers: Registers, panel: Dim) -> None:
        """Store all rows of a panel. Meanwhile, keep the unit awake (`AmxStayAwake`): after a pause, its next product would be late."""
        claim = registers.claim
        rows = claim.end - claim.first
        with k.serial("some", ceil_div(rows, AWAKE_ROWS)) as some:
            k.tile(AmxStayAwake())
            with k.serial("i", dim_min(rows - some * AWAKE_ROWS, AWAKE_ROWS)) as i:
                m = some * AWAKE_ROWS + i
                self.store_line(k, sums, ZERO, registers.place(m), claim.tile(panel, claim.first + m, 1))

    # --- few rows ------------------------------------------------------------------------------------------------------

    def write_few(self, k: Kernel, sums: Sequence[WidenedSum], tiles: Tiles) -> None:
        """Compute the exact sums of a tile of at most `few` rows, without widening."""
        claim, m = tiles.claim, tiles.first - tiles.claim.first
        begins = [self.begin_groups(k, s, claim.tile(claim.panel, tiles.first, tiles.rows)) for s in sums]
        with claim.panels(k) as panel:
            tile = claim.tile(panel, tiles.first, tiles.rows)
            for s, begin in zip(sums, begins, strict=True):
                with s.planes(k, s.num_planes[ZERO]) as plane:
                    for first in range(0, s.grouped.group, LONGEST):
                        part = Part(Dim.of(first), Dim.of(min(LONGEST, s.grouped.group - first)))
                        self.add_few(k, s, begin, plane, panel - claim.panel, m, tile, part)

    def begin_groups(self, k: Kernel, s: WidenedSum, tile: TileOrigin) -> Array:
        """Store the value with which the sum of each group begins, for each plane and row. Weights are stored with an offset, and the value
        is the negative of what this offset adds to the sum."""
        group = shared_multiplier(s.grouped)
        begin = k.local("begin", PLANES, tile.shape.rows, s.grouped.group // group, dtype=I32)
        with s.planes(k, s.num_planes[ZERO]) as plane, tile.lines(k) as (i, line):
            op = GroupSums(group, times=PANEL4.offset)
            k.tile(op, begin[plane, i, ZERO], s.row(line, plane, ZERO), dims=(begin.shape[-1],))
        return begin

    def add_few(self, k: Kernel, s: WidenedSum, begin: Array, plane: Dim, beside: Dim, m: Dim, tile: TileOrigin, part: Part) -> None:
        """Multiply one plane of a tile by a part of a panel. `DotWidened` adds up a * (8 * w - 4) for each element a and widened weight w.
        The sum begins at 4 times the sum of the elements, so at the end it is 8 times the product."""
        group, rows = shared_multiplier(s.grouped), tile.shape.rows
        eighths = k.local("eighths", rows, tile.shape.vectors, tile.shape.lanes, dtype=I32)
        with k.serial("i", rows) as i:
            offsets = total((part.depth // group,), lambda g: begin[plane, i, part.begin // group + g])  # -8 times the sum of elements
            with tile.vectors(k) as (v, lane):
                eighths[i, v, lane] = (offsets >> 1) * -1
        op = DotWidened(rows, tile.shape.columns, group)
        columns = begin[plane, ZERO, part.begin // group], *s.places(tile.point, tile.panel, part.begin)
        k.tile(op, eighths[ZERO, ZERO, ZERO], s.row(tile, plane, part.begin), *columns, dims=(part.depth, s.stride, begin.shape[-1]))
        with k.serial("i", rows) as i, tile.vectors(k) as (v, lane):
            found = eighths[i, v, lane] >> EIGHTHS
            s.exact[plane, beside, m + i, v, lane] = found if part.is_first else s.exact[plane, beside, m + i, v, lane] + found

    def store_line(self, k: Kernel, sums: Sequence[WidenedSum], beside: Dim, m: Dim, line: TileOrigin) -> None:
        """Store one row of a panel of the result; `beside` is the panel's number in the claim. A column of weights is one group, so its
        exact sum times its factor is the whole sum."""
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
                # Add 0.0, as sums over several groups do (groups.py): a product of -0.0 becomes 0.0.
                totals.append(fma(exact, s.at(node.factor, line.at(ZERO, v, lane)), const(0.0, F32)))
            line.store(k, (ZERO, v, lane), totals)


@dataclass(frozen=True, slots=True)
class WidenedSum:
    """One sum of the product, and where a thread stores its results for a block of rows."""

    grouped: GroupedSum
    exact: Array  # exact sums by plane, panel, row among those of all registers, vector and lane
    num_planes: Array  # number of planes that each register of rows needs

    def count_planes(self, k: Kernel, registers: Registers) -> None:
        """Store the number of planes of each register of rows: two if one of its rows needs two, else one."""
        with k.serial("register", registers.count) as at:
            tile = registers.claim.tile(registers.claim.panel, registers.start(at), 1)
            some = fold(ReduceFn.ANY, (registers.height,), lambda r: self.two_planes(tile.at(r, ZERO, ZERO)))
            self.num_planes[at] = cast(some, I32) + 1

    def planes_of(self, blocks: int, at: Dim) -> Scalar:
        """Return the number of planes that a tile of one or two registers of rows multiplies."""
        first = self.num_planes[at]
        return first if blocks == 1 else maximum(first, self.num_planes[at + 1])

    @contextmanager
    def planes(self, k: Kernel, count: Scalar) -> Generator[Dim]:
        """Loop over the planes that a tile multiplies."""
        with k.scope(), k.serial("plane", k.let("planes", count, PLANES, lower=1)) as plane:
            yield plane

    def places(self, point: Point, panel: Dim, begin: Dim) -> tuple[Load, Load]:
        """Return the places at which the weights of a panel, from element `begin` along k on, and their multipliers are stored."""
        panels, multipliers = self.grouped.element.buffers
        corner = (*(d.substitute(point) for d in self.grouped.matrix), panel)
        depth, group = self.grouped.format.depth, shared_multiplier(self.grouped)
        return Load(panels, (*corner, begin // depth, ZERO)), Load(multipliers, (*corner, begin // group, ZERO))

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
        """Return whether the row at `place` needs two planes."""
        assert self.grouped.node.two_planes is not None, self.grouped
        return self.at(self.grouped.node.two_planes, place)

    def at(self, scalar: Scalar, place: Point) -> Scalar:
        """Return the scalar for the element at `place`. The index of the group is 0, because the only group is the whole of k."""
        return rewrite_dims(scalar, {**place, self.grouped.axis: ZERO})


@dataclass(frozen=True, slots=True)
class Registers:
    """The rows of a claim in registers of the unit. All registers have the same height, so the unit is configured once. If the rows do not
    fill the last of several registers, the last one also has rows of the register before it, which are computed twice."""

    claim: Claim
    height: Dim  # number of rows of a register
    count: Dim  # number of registers
    num_tiles: Dim  # a tile has two registers of rows, but the last tile may have one

    @staticmethod
    def of(k: Kernel, claim: Claim) -> Registers:
        """Return the registers for the rows of a claim."""
        rows, most = claim.end - claim.first, max(1, claim.walk.block_rows // TILE_ROWS)
        height = k.let("height", dim_min(rows, TILE_ROWS), TILE_ROWS)
        count = k.let("registers", ceil_div(rows, TILE_ROWS), most)
        return Registers(claim, height, count, k.let("tiles", dim_max(ceil_div(count, 2), 1), ceil_div(Dim.of(most), 2), lower=1))

    def start(self, at: Dim) -> Dim:
        """Return the first row, in the product, of a register."""
        rows = self.claim.end - self.claim.first
        return self.claim.first + dim_min(at * TILE_ROWS, dim_max(rows - TILE_ROWS, 0))

    def place(self, m: Dim) -> Dim:
        """Return the index of row `m` of the claim among the rows of all registers, where some rows occur twice."""
        rows, last = dim_max(self.claim.end - self.claim.first, TILE_ROWS), (self.count - 1) * TILE_ROWS
        return m + dim_min(dim_max(m - last + 1, 0), 1) * (self.count * TILE_ROWS - rows)

    def tiles(self, k: Kernel) -> Iterator[tuple[int, Dim]]:
        """Yield each tile: its number of registers, and the first of them. The caller's `for` emits its code twice: for two registers, and
        for one."""
        with k.serial("pair", self.count // 2) as pair:
            yield 2, pair * 2
        with k.when(less(0, self.count % 2)):
            yield 1, self.count - 1


@dataclass(frozen=True, slots=True)
class PanelPart:
    """A part of k of one panel: the part that is widened, and then multiplied, as a whole."""

    panel: Dim
    begin: Dim
    depth: Dim
    is_over: Dim  # 1 if the claim's last part comes before this part in the `Order`, else 0


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which a claim multiplies parts of panels: one part of all panels, then the next part."""

    blocks: Blocks
    claim: Claim
    panels: Dim  # number of panels, at least 1

    @staticmethod
    def of(k: Kernel, blocks: Blocks, claim: Claim) -> Order:
        """Return the order for the panels of a claim."""
        panels = dim_max(claim.num_panels, 1)
        return Order(blocks, claim, panels if panels.is_const else k.let("nearby", panels, blocks.together, lower=1))

    @property
    def num_parts(self) -> int:
        """The number of parts of k."""
        return ceil_div(self.blocks.extent, self.blocks.size).const

    def part(self, k: Kernel, number: Dim) -> PanelPart:
        """Return the part with this number in the order. Every number after the last one gives the first part of the first panel after the
        claim, or of the product's last panel if none follows."""
        size, extent = self.blocks.size, self.blocks.extent
        last_panel = ceil_div(self.blocks.num_columns, self.blocks.tile.shape.columns) - 1
        is_over = k.let("over", dim_min(number // (self.panels * self.num_parts), 1), 1)
        of_k = k.let("of_k", number // self.panels * (1 - is_over), self.num_parts - 1)
        panel = self.claim.panel + self.panels * is_over + number % self.panels * (1 - is_over)
        return PanelPart(k.let("later", dim_min(panel, last_panel), last_panel), of_k * size, dim_min(size, extent - of_k * size), is_over)


def is_widened(s: GroupedSum, tile: ProductTile) -> bool:
    """Return whether the tile widens the sum's weights. They must be packed for the tile, a single group must be the whole column, the sum
    must begin at 0, and rows must have a second plane that only some of them need."""
    if not tile.reads(s.element) or not tile.widens(s.group, shared_multiplier(s)):
        return False
    return s.num_groups == Dim.of(1) and s.node.two_planes is not None and not s.node.begins and s.node.term is None


def shared_multiplier(s: GroupedSum) -> int:
    """Return the number of weights along k that share a multiplier."""
    return s.group // s.element.buffers[1].shape[-2].const
