"""Products on the tensor cores of a GPU by `mma.sync`. A block of four warps computes a tile.

One `mma.sync` multiplies 16 columns of a weight by 8 rows, for 16 numbers along k. Weights are stored in the order of its registers
(`FRAGMENTS` and others in compiler/machine/formats.py), so a lane loads its weights without shuffles. Each warp computes its own columns
for all rows of the block. Steps of 32 numbers along k are added in order. Each step has two instructions; each of them adds up the products
of 16 of the 32 numbers (`Fragments.chunks`). This order is the same for all values of `rows` and `columns`.

Weights of 8 or 4 bits are converted in registers to bf16, which represents them exactly. The sum of each group is multiplied by the group's
scale, and groups are added in order.

Asynchronous copies from global memory run `stages` - 1 steps ahead of the products. With 8 rows, each warp copies the rows for itself, so
no warp waits for another until the products are complete. If there are more rows, they are copied once for all warps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

from compiler.ir.numbers import Kind
from compiler.ir.tiles import tile_op
from compiler.llvm.ssa import Code
from compiler.machine.formats import FRAGMENTS, FRAGMENTS4, FRAGMENTS8, FRAGMENTS_E2M1, FRAGMENTS_E4M3
from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, LANES, SHARED, SHARED_BYTES, WARPS
from compiler.machine.intrinsics.block_product import SIXTEEN, BlockProduct, PanelFormat, ProductCode
from compiler.machine.target import GPU, Target

STEP = FRAGMENTS.depth  # number of elements along k in a stage
MOST_STAGES = 8
ROW_BYTES = 512  # number of bytes of 8 rows in one step
HEIGHTS = (8, 16, 32, 64)  # numbers of rows of a tile, among which schedules choose


@tile_op
class Mma(BlockProduct):
    """A product as in `BlockProduct`, for every GPU. The module's docstring says how a block computes it."""

    name: ClassVar[str] = "mma_product"
    formats: ClassVar[Mapping[tuple[int, str], PanelFormat]] = {
        (16, Kind.INT): FRAGMENTS,
        (8, Kind.INT): FRAGMENTS8,
        (8, Kind.E4M3): FRAGMENTS_E4M3,
        (4, Kind.INT): FRAGMENTS4,
        (4, Kind.E2M1): FRAGMENTS_E2M1,
    }
    most_rows: ClassVar[int] = HEIGHTS[-1]
    least_stages: ClassVar[int] = 2
    rows_at_once: ClassVar[int] = 1  # for more, threads need so many registers that only two blocks fit a multiprocessor

    @property
    def enough_blocks(self) -> int:
        """Declare two blocks for weights of 4 bits, and in tiles that hide the number of the thread. Without a declaration, the assembler
        limits registers so that three blocks fit, and spills to keep the limit."""
        return 2 if self.bits == 4 or self.hides_thread else 0

    def heights(self, *, in_groups: bool) -> tuple[int, ...]:
        return HEIGHTS

    @property
    def most_bytes(self) -> int:
        return SHARED_BYTES

    @property
    def own_rows(self) -> bool:
        """Whether each warp copies the rows of a for itself, instead of once per block."""
        return self.rows == EIGHT

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + (WARPS if self.own_rows else self.rows // EIGHT) * ROW_BYTES

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, SHARED_BYTES // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return max(self.stages * self.stage_bytes, self.result_bytes)

    def runs_on(self, target: Target) -> bool:
        return target.system == GPU

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Block(self, code, pointers, dims).run()


class _Block(ProductCode):
    """Emits the code of `Mma`."""

    def __init__(self, op: Mma, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Compute the places in a stage to which this lane copies weights and rows, and from which it reads them. `pointers` and `dims` are
        those of the tile `op`."""
        super().__init__(op, code, pointers, dims)
        self.op: Mma = op
        self.lane_bytes, row_bytes = self.times(self.lane, op.panel_bytes // LANES if op.bits < 16 else 16), self.times(self.lane, 16)
        self.own_weights = self.in_stage(self.plus(self.times(self.warp, self.per_warp * op.panel_bytes), self.lane_bytes), self.shared)
        rows_at = self.plus(self.times(self.warp, ROW_BYTES), row_bytes) if op.own_rows else row_bytes
        self.own_rows = self.in_stage(self.plus(rows_at, str(op.weight_bytes)), self.shared)

    def run(self) -> None:
        """Emit the code: begin to copy the first steps; then, in each step, wait for its copies, begin to copy a later step, and multiply.
        At the end, apply the scales and store c."""
        code, op = self.code, self.op
        chosen = self._chosen()
        sources, places = self._sources(chosen), [(panel, self.group) for panel in chosen]
        if op.has_scales:
            self.read_scales(places, "0")
        ahead = op.stages - 1
        for step in range(ahead):
            with code.when(code.op(f"icmp slt i64 {step}, {self.steps}")):
                self._copy(sources, str(step), str(step))
            self.commit()
        with code.loop("0", self.steps) as step:
            self.await_copies(ahead - 1)
            if not op.own_rows:
                self.barrier()
            later = code.op(f"add i64 {step}, {ahead}")
            with code.when(code.op(f"icmp slt i64 {later}, {self.steps}")):
                self._copy(sources, later, code.op(f"urem i64 {later}, {op.stages}"))
            self.commit()
            self.begin_group(step, places)
            self._multiply(code.op(f"urem i64 {step}, {op.stages}"))
        self.await_copies(0)
        self.end_sums()
        self.barrier()  # c overwrites the stages, so wait until all warps have read them
        self.store(self.times(self.warp, op.per_warp * SIXTEEN), SIXTEEN)

    # --- asynchronous copies of weights and rows to shared memory ------------------------------------------------------

    def _chosen(self) -> list[str]:
        """Return the indices of the panels that this warp multiplies, which are the same in each matrix."""
        code, op = self.code, self.op
        first = self.times(self.warp, op.per_warp)
        if op.apart:
            second = code.op(f"icmp uge i64 {self.warp}, {WARPS // 2}")
            skipped = op.apart - op.per_warp * WARPS // 2
            first = code.op(f"add i64 {first}, {code.op(f'select i1 {second}, i64 {skipped}, i64 0')}")
        return [self.clamped(self.plus(first, str(p))) for p in range(op.per_warp)]

    def _sources(self, chosen: Sequence[str]) -> list[str]:
        """Return the global addresses from which this lane copies in the first step: parts of its warp's panels first, then parts of rows
        of a."""
        op, code = self.op, self.code
        panel_bytes = self.times(self.steps, op.panel_bytes)
        offsets = [self.plus(code.op(f"mul i64 {panel}, {panel_bytes}"), self.lane_bytes) for panel in chosen]
        found = [self.in_matrix(base, at) for base in self.panels for at in offsets]
        last = code.op(f"sub i64 {self.num_rows}, 1")
        for number in range(1 if op.own_rows else -(-op.rows // (EIGHT * WARPS))):
            first = "0" if op.own_rows else self.times(self.plus(self.warp, str(number * WARPS)), EIGHT)
            row = code.op(f"call i64 @llvm.smin.i64(i64 {self.plus(first, self.group)}, i64 {last})")
            at = self.plus(code.op(f"mul i64 {self.times(row, 2)}, {self.stride}"), self.times(self.quad, 16))
            found.append(self.in_matrix(self.rows, at))
        return found

    def _copy(self, sources: Sequence[str], step: str, slot: str) -> None:
        """Begin to copy the weights and rows of a step to the stage `slot`."""
        op, per_warp = self.op, self.per_warp
        stage = self.times(slot, op.stage_bytes)
        weights, rows = self.in_stage(stage, self.own_weights), self.in_stage(stage, self.own_rows)
        begin = self.times(step, op.panel_bytes)
        for p in range(per_warp):
            source = self.gep(GLOBAL, sources[p], begin)
            for at in range(0, op.panel_bytes, LANES * 16):
                target = self.in_stage(str(p * op.panel_bytes + at), weights)
                self.copy(target, self.gep(GLOBAL, source, str(at)), min(16, op.panel_bytes // LANES))
        begin = self.times(step, STEP * 2)
        for number, source in enumerate(sources[per_warp:]):
            at = "0" if op.own_rows else self.times(self.plus(self.warp, str(number * WARPS)), ROW_BYTES)
            some = not op.own_rows and op.rows // EIGHT < WARPS
            with self.code.when(self.code.op(f"icmp ult i64 {self.warp}, {op.rows // EIGHT}")) if some else nullcontext():
                self.copy(self.in_stage(at, rows), self.gep(GLOBAL, source, begin), 16)

    # --- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, slot: str) -> None:
        """Multiply the operands in the stage `slot`, and add the products to the sums."""
        op, per_warp = self.op, self.per_warp
        stage = self.times(slot, op.stage_bytes)
        weights, rows = self.in_stage(stage, self.own_weights), self.in_stage(stage, self.own_rows)
        left = [self._weights(self.in_stage(str(p * op.panel_bytes), weights)) for p in range(per_warp)]
        for j in range(op.rows // EIGHT):
            right = self.words(SHARED, rows, str(j * ROW_BYTES), 4)
            for p in range(per_warp):
                totals = self.sums[(p * (op.rows // EIGHT) + j) * 4 :][:4]
                sums = self.load_floats(totals)
                for half in range(2):
                    sums = self.mma(left[p][half], right[2 * half : 2 * half + 2], sums)
                self.store_floats(sums, totals)

    def _weights(self, base: str) -> list[list[str]]:
        """Return the registers with the weights of a panel, for each of the two instructions of a step."""
        match self.op.bits:
            case 16:
                return [self.words(SHARED, base, str(half * LANES * 16), 4) for half in range(2)]
            case 8:
                registers = self.eight_bits(self.words(SHARED, base, "0", 4))
                return [registers[:4], registers[4:]]
            case _:
                return [self.four_bits(word) for word in self.words(SHARED, base, "0", 2)]
