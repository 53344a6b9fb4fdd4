"""Products by `wgmma`, the tensor core instruction of sm_90a. The four warps of a block are a warpgroup, which computes a tile.

One `wgmma` multiplies 64 columns of a weight by up to 256 rows, for 16 numbers along k, and runs asynchronously. It reads its operands from
shared memory. Global memory stores weights in the order in which `wgmma` reads them (`BRICKS` in compiler/machine/formats.py), so one
thread copies a whole panel by one instruction, and an mbarrier signals when the bytes have arrived. All threads copy rows, 16 bytes each,
and store them swizzled, so that neither their stores nor the reads of the tensor cores have bank conflicts.

Weights of 8 or 4 bits are converted in registers to bf16, which represents them exactly, and `wgmma` reads them from the registers. The sum
of each group is multiplied by the group's scale, and groups are added in order.

An accumulator adds products in the order of k, 16 at a time, for all values of `rows` and `columns`. One statement of inline assembly
starts the instructions of a step and waits until those of the previous step are done. So no other instruction touches their registers in
between. Otherwise the assembler would wait for each `wgmma`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

from compiler.ir.tiles import tile_op
from compiler.llvm.ssa import Code
from compiler.machine.formats import BRICKS, LANES4, LANES8, LANES_E4M3
from compiler.machine.intrinsics.base import Features
from compiler.machine.intrinsics.block_code import GLOBAL, LANES, SHARED, WARPS
from compiler.machine.intrinsics.block_product import NARROW, SIXTEEN, BlockProduct, PanelFormat, ProductCode
from compiler.machine.target import Target

MOST_STAGES = 8
ROW_BYTES = 128  # number of bytes of a row in one step
CHUNK = 16  # number of bytes that a thread copies at once
AT_ONCE = WARPS * LANES * CHUNK // ROW_BYTES  # number of rows that the threads copy together
BARRIER_BYTES = 8
# Maximum number of bytes of shared memory of a block: two blocks then fit the 228 KB of a multiprocessor, which reserves 1 KB for each.
MOST_BYTES = 113 << 10
MOST_SUMS = 128  # maximum number of accumulators of a thread; a tile of 128 by 128 reads fewer bytes per product than one of 64 by 256
# Descriptors of operands in shared memory, without addresses. They state two distances in units of 16 bytes: from a brick of weights to the
# next brick along k, and from 8 columns or rows to the next 8. Rows are swizzled within 128 bytes.
COLUMNS = 8 << 16 | 64 << 32
ROWS = 1 << 62 | 1 << 16 | 64 << 32
COLUMN_STEP, ROW_STEP = 2 * 8, 2  # distances, in these units, from one instruction to the next, which is 16 elements further along k


@tile_op
class Wgmma(BlockProduct):
    name: ClassVar[str] = "wgmma_product"
    needs: ClassVar[Features] = Features(["sm_90a"])
    formats: ClassVar[Mapping[tuple[int, bool], PanelFormat]] = {
        (16, False): BRICKS,
        (8, False): LANES8,
        (8, True): LANES_E4M3,
        (4, False): LANES4,
    }
    one_shape: ClassVar[bool] = False
    most_rows: ClassVar[int] = 128
    most_bytes: ClassVar[int] = MOST_BYTES
    least_stages: ClassVar[int] = 3
    shared_alignment: ClassVar[int] = 1024  # the swizzle depends on addresses

    def heights(self, *, in_groups: bool) -> tuple[int, ...]:
        kinds = self.sums * (2 if in_groups else 1)
        return tuple(height for height in (8, 32, 64, 128) if kinds * height * NARROW // self.threads <= MOST_SUMS)

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.rows * ROW_BYTES

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (MOST_BYTES - MOST_STAGES * BARRIER_BYTES) // self.stage_bytes)

    @property
    def barriers_at(self) -> int:
        """The offset in shared memory of the stages' mbarriers. They follow the memory that the stages and, later, the result c use."""
        return max(self.stages * self.stage_bytes, self.result_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + MOST_STAGES * BARRIER_BYTES

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Block(self, code, pointers, dims).run()


class _Block(ProductCode):
    def __init__(self, op: Wgmma, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        super().__init__(op, code, pointers, dims)
        self.op: Wgmma = op
        self.leads = code.op(f"icmp eq i64 {self.thread}, 0")
        # The place of this thread's chunks in a stage. Chunk c of row r is stored at place c XOR r % 8 of the row.
        chunk, row = code.op(f"and i64 {self.thread}, 7"), code.op(f"lshr i64 {self.thread}, 3")
        swapped = code.op(f"xor i64 {chunk}, {code.op(f'and i64 {row}, 7')}")
        self.chunk_row, self.chunk_bytes = row, self.times(chunk, CHUNK)
        self.own_chunk = self.plus(self.times(row, ROW_BYTES), self.times(swapped, CHUNK))
        self.ahead = op.stages - (2 if self.overlaps else 1)

    @property
    def overlaps(self) -> bool:
        """Whether the instructions of a step still run while the next step begins."""
        return not self.op.has_scales

    def run(self) -> None:
        code, op = self.code, self.op
        with code.when(self.leads):
            for stage in range(op.stages):
                self.assembly("mbarrier.init.shared.b64 [$0], 1;", [("r", self.barrier_of(str(stage)))])
            self.assembly("fence.mbarrier_init.release.cluster;")
        self.fence()  # copies of panels overwrite what threads have stored
        self.barrier()
        places = self._places() if op.has_scales else []
        if op.has_scales:
            self.read_scales(places, "0")
        panels, rows = self._panels(), self._rows()
        for step in range(self.ahead):
            with code.when(code.op(f"icmp slt i64 {step}, {self.steps}")):
                self._copy(panels, rows, str(step), str(step))
            self.commit()
        with code.loop("0", self.steps) as step:
            slot = code.op(f"urem i64 {step}, {op.stages}")
            self._await(slot, code.op(f"udiv i64 {step}, {op.stages}"))
            self.await_copies(self.ahead - 1)
            self.fence()  # the tensor cores read the rows that threads have copied
            self.barrier()
            later = code.op(f"add i64 {step}, {self.ahead}")
            with code.when(code.op(f"icmp slt i64 {later}, {self.steps}")):
                self._copy(panels, rows, later, code.op(f"urem i64 {later}, {op.stages}"))
            self.commit()
            self._multiply(slot)
            self.end_step(step, places)
        if self.overlaps:
            self._with_sums(self.sums, "wgmma.wait_group.sync.aligned 0;")
        self.await_copies(0)
        if op.has_scales and not self.in_groups:
            self.apply_scales()
        self.barrier()  # c overwrites the stages, so wait until all warps have read them
        with code.when(self.leads):
            for stage in range(op.stages):
                self.assembly("mbarrier.inval.shared.b64 [$0];", [("r", self.barrier_of(str(stage)))])
        self.store(self.times(self.warp, SIXTEEN), NARROW)

    # --- asynchronous copies to shared memory --------------------------------------------------------------------------

    def _panels(self) -> list[str]:
        """Return the global addresses of the panels of all matrices, at the first step."""
        op, code = self.op, self.code
        count = op.columns // op.panel_columns
        half, panel_bytes = count // 2, self.times(self.steps, op.panel_bytes)
        numbers = [i + op.apart - half if op.apart and i >= half else i for i in range(count)]
        offsets = [code.op(f"mul i64 {self.clamped(str(i))}, {panel_bytes}") for i in numbers]
        return [self.in_matrix(base, at) for base in self.panels for at in offsets]

    def _rows(self) -> list[str]:
        """Return the global addresses of this thread's chunks of rows, at the first step."""
        code, last = self.code, self.code.op(f"sub i64 {self.num_rows}, 1")
        found: list[str] = []
        for first in range(0, self.op.rows, AT_ONCE):
            row = code.op(f"call i64 @llvm.smin.i64(i64 {self.plus(self.chunk_row, str(first))}, i64 {last})")
            at = self.plus(code.op(f"mul i64 {self.times(row, 2)}, {self.stride}"), self.chunk_bytes)
            found.append(self.in_matrix(self.rows, at))
        return found

    def _copy(self, panels: Sequence[str], rows: Sequence[str], step: str, slot: str) -> None:
        """Begin to copy the weights and rows that a step multiplies."""
        op, code = self.op, self.code
        stage = self.gep(SHARED, self.shared, self.times(slot, op.stage_bytes))
        begin = self.times(step, op.panel_bytes)
        with code.when(self.leads):
            full = self.barrier_of(slot)
            self.assembly(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {op.weight_bytes};", [("r", full)])
            for number, panel in enumerate(panels):
                to, source = self.number_of(self.gep(SHARED, stage, str(number * op.panel_bytes))), self.gep(GLOBAL, panel, begin)
                copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                operands = [("r", to), ("l", code.op(f"ptrtoint {GLOBAL} {source} to i64")), ("r", full)]
                self.assembly(f"{copy} [$0], [$1], {op.panel_bytes}, [$2];", operands)
        begin = self.times(step, ROW_BYTES)
        place = self.gep(SHARED, stage, self.plus(self.own_chunk, str(op.weight_bytes)))
        few = op.rows < AT_ONCE
        with code.when(code.op(f"icmp ult i64 {self.chunk_row}, {op.rows}")) if few else nullcontext():
            for number, row in enumerate(rows):
                to, source = self.gep(SHARED, place, str(number * AT_ONCE * ROW_BYTES)), self.gep(GLOBAL, row, begin)
                self.copy(to, source)

    def _await(self, slot: str, turn: str) -> None:
        """Wait until the panels of a stage have arrived. `turn` counts how often the stage was used before."""
        code = self.code
        full, parity = self.barrier_of(slot), code.op(f"trunc i64 {code.op(f'and i64 {turn}, 1')} to i32")
        again, done = code.fresh("again"), code.fresh("done")
        code.jump(again)
        code.block(again)
        test = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }"
        arrived = code.op(f'call i32 asm sideeffect "{test}", "=r,r,r,~{{memory}}"(i32 {full}, i32 {parity}) convergent')
        code.branch(code.op(f"icmp eq i32 {arrived}, 0"), again, done)
        code.block(done)

    def barrier_of(self, slot: str) -> str:
        """Return the address of a stage's mbarrier."""
        place = self.gep(SHARED, self.shared, self.plus(self.times(slot, BARRIER_BYTES), str(self.op.barriers_at)))
        return self.number_of(place)

    # --- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, slot: str) -> None:
        op = self.op
        stage = self.gep(SHARED, self.shared, self.times(slot, op.stage_bytes))
        rows = self._descriptor(self.gep(SHARED, stage, str(op.weight_bytes)), ROWS)
        if not op.has_scales:
            self._start(range(self.per_warp), [("l", self._descriptor(stage, COLUMNS))], rows)
            return
        for part in range(self.per_warp):  # one after another, so that few registers hold weights
            self._start(range(part, part + 1), [("r", register) for register in self._registers(stage, part)], rows)

    def _start(self, parts: range, weights: Sequence[tuple[str, str]], rows: str) -> None:
        """Start the instructions of a step for some parts, each of which is 64 columns. Then wait for the instructions of the previous step
        or, if weights are in registers, for all instructions. `weights` are the descriptor of all parts, or the registers of one part."""
        op = self.op
        per_part = len(self.sums) // self.per_warp
        sums, first = self.sums[parts.start * per_part : parts.stop * per_part], 2 * len(parts) * per_part
        lines = [".reg .b64 a, b; .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.fence.sync.aligned;"]
        for i in range(op.step // SIXTEEN):
            lines.append(f"add.s64 b, ${first + len(weights)}, {i * ROW_STEP};")
            for number, part in enumerate(parts):
                result = ", ".join(f"${number * per_part + n}" for n in range(per_part))
                if op.has_scales:
                    left, transposed = f"{{{', '.join(f'${first + i * 4 + n}' for n in range(4))}}}", "0"
                else:
                    lines.append(f"add.s64 a, ${first}, {i * COLUMN_STEP + part * NARROW * op.step * 2 // CHUNK};")
                    left, transposed = "a", "0, 0"
                kind = f"m64n{op.rows}k16.f32.bf16.bf16"
                lines.append(f"wgmma.mma_async.sync.aligned.{kind} {{{result}}}, {left}, b, p, 1, 1, {transposed};")
        lines.append(f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {1 if self.overlaps else 0};")
        self._with_sums(sums, f"{{ {' '.join(lines)} }}", [*weights, ("l", rows)])

    def _with_sums(self, sums: Sequence[str], text: str, operands: Sequence[tuple[str, str]] = ()) -> None:
        """Emit assembly that changes accumulators. Its first operands are the accumulators, listed once as results and once as inputs."""
        code, count = self.code, len(sums)
        kinds = {"r": "i32", "l": "i64"}
        results = f"{{{', '.join(['float'] * count)}}}"
        constraints = ",".join([*["=f"] * count, *map(str, range(count)), *(kind for kind, _ in operands), "~{memory}"])
        given = [*(f"float {x}" for x in self.load_floats(sums)), *(f"{kinds[kind]} {x}" for kind, x in operands)]
        made = code.op(f'call {results} asm sideeffect "{text}", "{constraints}"({", ".join(given)}) convergent')
        self.store_floats([code.op(f"extractvalue {results} {made}, {i}") for i in range(count)], sums)

    def _descriptor(self, place: str, layout: int) -> str:
        """Return the descriptor of an operand in shared memory."""
        code = self.code
        address = code.op(f"zext i32 {code.op(f'lshr i32 {self.number_of(place)}, 4')} to i64")
        return code.op(f"or i64 {address}, {layout}")

    # --- weights of few bits -------------------------------------------------------------------------------------------

    def _registers(self, stage: str, part: int) -> list[str]:
        """Return the registers with the weights of this warp's 16 columns in the given 64 columns: four for each instruction of a step."""
        op, code = self.op, self.code
        high, low = code.op(f"lshr i64 {self.warp}, 1"), code.op(f"and i64 {self.warp}, 1")
        own = self.plus(self.plus(self.times(high, op.panel_bytes), self.times(low, LANES * CHUNK)), self.times(self.lane, CHUNK))
        base = self.gep(SHARED, stage, self.plus(own, str(part * NARROW // op.panel_columns * op.panel_bytes)))
        if op.bits == 8:
            return [x for piece in range(2) for x in self.eight_bits(self.words(SHARED, base, str(piece * 2 * LANES * CHUNK), 4))]
        return [x for word in self.words(SHARED, base, "0", 4) for x in self.four_bits(word)]

    def _places(self) -> list[tuple[str, str]]:
        """Return for each 16 columns that this warp multiplies the index of their panel, and the index in the panel of this lane's first
        column."""
        op, code = self.op, self.code
        half = op.columns // op.panel_columns // 2
        own = self.plus(self.times(code.op(f"and i64 {self.warp}, 1"), SIXTEEN), self.group)
        found: list[tuple[str, str]] = []
        for p in range(op.per_warp):
            panel = self.plus(code.op(f"lshr i64 {self.warp}, 1"), str(p * NARROW // op.panel_columns))
            if op.apart:
                second = code.op(f"icmp uge i64 {panel}, {half}")
                panel = code.op(f"add i64 {panel}, {code.op(f'select i1 {second}, i64 {op.apart - half}, i64 0')}")
            found.append((self.clamped(panel), own))
        return found
