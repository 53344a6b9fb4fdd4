"""Products by `wgmma`, the tensor core instruction of sm_90a: the tile, its sizes, and how the warps of a block share it.

One `wgmma` multiplies 64 columns of weights by up to 256 rows, for 16 numbers along k, and runs asynchronously. Four warps, a warpgroup,
start it together. A block has two warpgroups, which share a tile in one of five ways (`Sharing`), and one more warp, which copies the
operands to shared memory.

Two blocks compute a wide tile as a cluster: they multiply the same columns by different rows, and each block copies half of the weights
into the shared memory of both. For products of few rows, a block computes a wide tile alone (`lone`). If a column of weights has several
groups, each with a scale, a wide tile has 64 rows instead of 128, because a thread then needs two accumulators for each element.

A thin tile has 32 columns. If a column of weights has several groups, an instruction multiplies the columns in two places along k at once
(`multiplied_rows`). If weights have 16 bits, an instruction multiplies the tile's 32 columns, and also the bytes that follow them in the
stage, as if these were 32 more columns; nothing uses the products of those bytes.

In each way of sharing, an accumulator adds products in the order of k, 16 at a time. If a column of weights has several groups, each group
is summed in accumulators of its own, and the scaled sums are added in order. So an element of the result has the same bits in every tile.

In order of reading:

    wgmma.py           the sizes of tiles and stages
    wgmma_stages.py    the code that copies operands to shared memory and synchronises warps and blocks
    wgmma_code.py      the code that multiplies
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import ClassVar

from compiler.ir.numbers import Kind
from compiler.ir.tiles import tile_op
from compiler.llvm.ssa import Code
from compiler.machine.formats import BRICKS, LANES4, LANES8, LANES_E4M3
from compiler.machine.intrinsics.base import Features
from compiler.machine.intrinsics.block_code import EIGHT, LANES, WARPS
from compiler.machine.intrinsics.block_product import NARROW, BlockProduct, PanelFormat
from compiler.machine.target import Target

WARPGROUPS = 2  # number of warpgroups of a block
CONSUMERS = WARPGROUPS * WARPS * LANES  # number of threads that multiply; one more warp copies
PAIR = 2  # number of blocks of a cluster
THIN = NARROW // 2  # number of columns of a thin tile, for products with few columns
FOLDS = (16, 8, 4, 2)  # numbers of steps whose operands a stage may hold instead of those of one step; a step is ROW_BYTES of a row along k
DEEP_STAGES = 4  # a stage holds several steps only if there is room for at least this many stages
MOST_DEEP_SUMS = 64  # maximum number of accumulators of a thread that leaves registers for the converted weights of two steps
CROWDED = 2  # number of instructions that start together if a thread has more accumulators than MOST_DEEP_SUMS and weights are converted
MOST_TURN_ROWS = 32  # maximum number of rows of a tile whose warpgroups take turns: their sums pass through shared memory
ENOUGH_BYTES = 40 << 10  # number of bytes of weights that a block copies ahead; 64 blocks then have 2.6 MB in flight
LONE_ROWS = 64  # number of rows of a wide tile that a block computes alone
ROW_BYTES = 128  # number of bytes of a row in one step
BARRIER_BYTES = 8
# Maximum number of bytes of shared memory of a block: a multiprocessor has 228 KB and reserves 1 KB for each block. With MOST_BYTES, two
# blocks fit at once; with MOST_WIDE_BYTES, one does. MOST_WIDE_BYTES is for tiles whose registers leave no room for a second block.
MOST_BYTES, MOST_WIDE_BYTES = 113 << 10, 227 << 10
MOST_SUMS = 128  # maximum number of accumulators of a thread


class Sharing(Enum):
    """How the two warpgroups of a block share a tile."""

    COLUMNS = "each multiplies half of the columns"
    ROWS = "each multiplies half of the rows"
    TURNS = "they take turns: the first multiplies the first half of the groups of each stage, the second the other half"
    HALF_TURNS = "the halves of both take turns: each multiplies a quarter of the groups of each stage"
    NOTHING = "only the first multiplies, because the smallest instruction is one of 64 columns by 8 rows"


@tile_op
class Wgmma(BlockProduct):
    """A product as in `BlockProduct`, for GPUs of sm_90a. The module's docstring says how a block computes it."""

    name: ClassVar[str] = "wgmma_product"
    threads: ClassVar[int] = CONSUMERS + LANES
    writers: ClassVar[int] = CONSUMERS
    needs: ClassVar[Features] = Features(["sm_90a"])
    formats: ClassVar[Mapping[tuple[int, str], PanelFormat]] = {
        (16, Kind.INT): BRICKS,
        (8, Kind.INT): LANES8,
        (8, Kind.E4M3): LANES_E4M3,
        (4, Kind.INT): LANES4,
    }
    one_shape: ClassVar[bool] = False
    most_rows: ClassVar[int] = 128
    least_stages: ClassVar[int] = 3
    thin_columns: ClassVar[tuple[int, ...]] = (THIN,)
    rows_at_once: ClassVar[int] = 8
    shared_alignment: ClassVar[int] = 1024  # the swizzle depends on addresses
    fold: int = 1  # number of steps whose operands a stage holds
    turns: int = 0  # number of groups of a stage that each part of the block sums in its turn; 0: no parts take turns
    at_once: int = 4  # number of instructions along k that start together, if weights are converted
    fills: bool = False  # whether a block may use all shared memory, because registers leave room for one block only
    lone: bool = False  # whether a wide tile is computed by a block alone, for products of few rows

    def problems(self) -> Iterator[str]:
        yield from BlockProduct.problems(self)
        if self.is_thin and not (self.rows == EIGHT and (self.turns or self.fills_left)):
            yield f"columns are {THIN}, expected a multiple of {NARROW}, or {EIGHT} rows whose groups are summed in turns, or deep stages"

    def heights(self, *, in_groups: bool) -> tuple[int, ...]:
        """Return the heights whose accumulators a thread has registers for."""
        kinds = self.sums * (2 if in_groups else 1)
        most = MOST_SUMS // 2 if self.has_scales and self.sums > 1 else MOST_SUMS  # converted weights of several matrices need registers

        def num_sums(height: int) -> int:
            """Return the number of accumulators of a thread in a tile of this number of rows."""
            shares = in_groups and height > MOST_TURN_ROWS  # each warpgroup has half of the rows
            return kinds * height * NARROW // (CONSUMERS if shares else WARPS * LANES)

        return tuple(height for height in (8, 32, 64, 128) if num_sums(height) <= most)

    def widest(self, *, in_groups: bool) -> tuple[int, int]:
        if self.has_scales and not in_groups:
            return self.heights(in_groups=False)[-1], WARPGROUPS * NARROW
        return self.most_rows // (2 if in_groups else 1), WARPGROUPS * 2 * NARROW // self.sums

    def deepened(self, length: int, group: int, *, fills: bool = False, lone: bool = False) -> Wgmma:
        """Return the variant with the most steps per stage with which DEEP_STAGES stages fit, or else with one step. Narrow tiles of few
        rows take turns if there are several groups, and if each part of the block gets whole groups of a stage."""
        if (self.fills, self.lone) != (fills, lone):
            return replace(self, fills=fills, lone=lone).deepened(length, group, fills=fills, lone=lone)
        num_sums = self.sums * self.per_warp * self.warp_rows // 2 * (2 if group < length else 1)  # of a thread
        is_crowded = self.has_scales and num_sums > MOST_DEEP_SUMS
        shallow = replace(self, at_once=CROWDED) if is_crowded else self
        for fold in (fold for fold in FOLDS if length % (fold * self.step) == 0):
            turns, rest = divmod(fold * self.step, self.takers * group)
            takes_turns = self.is_narrow and self.rows <= MOST_TURN_ROWS and group < length and not rest
            deeper = replace(shallow, fold=fold, turns=turns if takes_turns else 0)
            if deeper.stages >= DEEP_STAGES:
                return deeper
        return shallow

    def thin(self, length: int, group: int) -> Wgmma | None:
        tile = replace(self, rows=EIGHT, columns=THIN).deepened(length, group, fills=True)
        return tile if tile.turns or tile.fills_left else None

    @property
    def lone_size(self) -> tuple[int, int] | None:
        return (LONE_ROWS, WARPGROUPS * 2 * NARROW // self.sums) if self.has_scales else None

    # --- sharing ---------------------------------------------------------------------------------------------------------

    @property
    def is_narrow(self) -> bool:
        """Whether the tile has NARROW columns, or fewer. Other tiles are wide."""
        return self.columns <= NARROW

    @property
    def is_thin(self) -> bool:
        return self.columns == THIN

    @property
    def fills_left(self) -> bool:
        """Whether weights have 16 bits, and the rows of a stage, which follow its weights in shared memory, have at least as many bytes as
        32 columns of weights in one step. The last left operand of a thin tile then reads the rows in place of the 32 columns that it
        lacks; nothing uses these products."""
        return self.bits == 16 and self.fold * self.row_bytes >= self.panel_bytes

    @property
    def takers(self) -> int:
        """The number of parts of a block that can take turns."""
        return 2 * WARPGROUPS if self.is_thin else WARPGROUPS

    @property
    def multipliers(self) -> int:
        """The number of threads that multiply: those of one warpgroup, if the tile is too small for two."""
        return WARPS * LANES if self.sharing is Sharing.NOTHING else CONSUMERS

    @property
    def adders(self) -> int:
        """The number of threads of each of the `takers`. The threads of the first taker add the sums of all takers."""
        return CONSUMERS // self.takers

    @property
    def cluster(self) -> int:
        return 1 if self.is_narrow or self.lone else PAIR

    @property
    def early(self) -> range:
        return range(2, 2 + self.sums)  # the weights

    @property
    def sharing(self) -> Sharing:
        if not self.is_narrow:
            return Sharing.COLUMNS
        if self.turns:
            return Sharing.HALF_TURNS if self.is_thin else Sharing.TURNS
        return Sharing.ROWS if self.rows > EIGHT else Sharing.NOTHING

    @property
    def per_warp(self) -> int:
        return 1 if self.is_narrow else self.columns // (WARPGROUPS * NARROW)

    @property
    def warp_rows(self) -> int:
        return self.rows // (WARPGROUPS if self.sharing is Sharing.ROWS else 1)

    @property
    def multiplied_rows(self) -> int:
        """The number of rows of the right operand of an instruction. If halves of warpgroups take turns, the lower 32 columns of the left
        operand are the tile's columns in a step of one quarter of the stage, and the upper 32 the same columns in a step of the next
        quarter. The right operand has the rows in both steps. Half of the sums are used: those of columns and rows in the same step."""
        return self.warp_rows * (2 if self.sharing is Sharing.HALF_TURNS else 1)

    @property
    def warp_folds(self) -> int:
        """The number of steps of a stage that a warp multiplies."""
        return self.fold // (self.takers if self.turns else 1)

    @property
    def overlaps(self) -> bool:
        """Whether the instructions of a stage may still run when those of the next stage start. Instructions that read weights from
        registers must end before the next stage starts: otherwise the assembler would reserve these registers in the whole kernel."""
        return not self.has_scales

    # --- shared memory ---------------------------------------------------------------------------------------------------

    @property
    def most_bytes(self) -> int:
        # With converted weights, deeper stages would need more registers than a thread has.
        fills = self.turns or (self.fills and not self.has_scales)
        return MOST_BYTES if self.is_narrow and not fills else MOST_WIDE_BYTES

    @property
    def weight_bytes(self) -> int:
        return self.fold * self.num_panels * self.panel_bytes

    @property
    def row_bytes(self) -> int:
        """The number of bytes of all rows in a step."""
        return self.rows * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.fold * self.row_bytes

    @property
    def copied_bytes(self) -> int:
        """The number of bytes of a stage that the block itself copies."""
        return self.weight_bytes // self.cluster + self.fold * self.row_bytes

    @property
    def ahead(self) -> int:
        """The number of stages that are copied while another one is multiplied."""
        return self.stages - (2 if self.overlaps else 1)

    @property
    def stages(self) -> int:
        room = self.most_bytes - self.passed_bytes
        return min(2 + -(-ENOUGH_BYTES // self.weight_bytes), room // (self.stage_bytes + 2 * BARRIER_BYTES))

    @property
    def passed_bytes(self) -> int:
        """The number of bytes of the memory through which the other takers pass the sums and scales of two turns to the first taker."""
        values = self.sums * self.per_warp * (self.warp_rows // EIGHT * 4 + 2)  # number of values of a thread, for a group
        return 2 * self.turns * values * self.line_bytes

    @property
    def line_bytes(self) -> int:
        """The number of bytes of one f32 for each thread that passes sums."""
        return (CONSUMERS - self.adders) * 4

    @property
    def passed_at(self) -> int:
        """The offset in shared memory of the sums that are passed. They follow the memory that the stages and, later, the result c use."""
        return max(self.stages * self.stage_bytes, self.result_bytes)

    @property
    def barriers_at(self) -> int:
        """The offset in shared memory of the mbarriers, two for each stage."""
        return self.passed_at + self.passed_bytes

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 2 * self.stages * BARRIER_BYTES

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        from compiler.machine.intrinsics.wgmma_code import WgmmaCode  # wgmma_code imports this module

        WgmmaCode(self, code, pointers, dims).run()
