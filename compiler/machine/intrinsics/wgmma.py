"""Products by `wgmma`, the tensor core instruction of sm_90a. The four warps of a block are a warpgroup, which computes a tile.

One `wgmma` multiplies 64 columns of a weight by up to 256 rows, for 16 numbers along k, and runs asynchronously. It reads its operands from
shared memory. Global memory stores weights in the order in which `wgmma` reads them (`BRICKS` in compiler/machine/formats.py), so one
thread copies a whole panel by one instruction, and an mbarrier signals when the bytes have arrived. All threads copy rows, 16 bytes each,
and store them swizzled, so that neither their stores nor the reads of the tensor cores have bank conflicts.

Weights of 8 or 4 bits are converted in registers to bf16, which represents them exactly, and `wgmma` reads them from the registers. While
it runs, the weights of the next step are converted in other registers. The sum of each group is multiplied by the group's scale, and groups
are added in order.

A stage holds the operands of one step along k, or of several if enough stages then fit. All warps of a block wait for each other once per
stage.

An accumulator adds products in the order of k, 16 at a time, for all values of `rows` and `columns`. One statement of inline assembly
starts the instructions of a step and waits until those of the previous step are done. So no other instruction touches their registers in
between. Otherwise the assembler would wait for each `wgmma`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

from compiler.ir.tiles import tile_op
from compiler.llvm.ssa import Code
from compiler.machine.formats import BRICKS, LANES4, LANES8, LANES_E4M3
from compiler.machine.intrinsics.base import Features
from compiler.machine.intrinsics.block_code import GLOBAL, LANES, SHARED, WARPS
from compiler.machine.intrinsics.block_product import NARROW, SIXTEEN, BlockProduct, PanelFormat, ProductCode
from compiler.machine.target import Target

FOLDS = (4, 2)  # numbers of steps that a stage may hold
DEEP_STAGES = 4  # minimum number of stages that hold several steps
MOST_DEEP_ROWS = 64  # maximum number of rows of a tile whose sums leave registers for two sets of weights
ENOUGH_BYTES = 40 << 10  # number of bytes of weights that a block copies ahead; 64 blocks then have 2.6 MB in flight
ROW_BYTES = 128  # number of bytes of a row in one step
CHUNK = 16  # number of bytes that a thread copies at once
AT_ONCE = WARPS * LANES * CHUNK // ROW_BYTES  # number of rows that the threads copy together
LEADER = (WARPS - 1) * LANES  # the thread that copies panels, in the warp that copies the fewest rows
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
    rows_at_once: ClassVar[int] = 8
    shared_alignment: ClassVar[int] = 1024  # the swizzle depends on addresses
    fold: int = 1  # number of steps whose operands a stage holds

    def heights(self, *, in_groups: bool) -> tuple[int, ...]:
        kinds = self.sums * (2 if in_groups else 1)
        return tuple(height for height in (8, 32, 64, 128) if kinds * height * NARROW // self.threads <= MOST_SUMS)

    def deepened(self, length: int) -> Wgmma:
        if self.has_scales and self.rows > MOST_DEEP_ROWS:
            return self
        deeper = (replace(self, fold=fold) for fold in FOLDS if length % (fold * self.step) == 0)
        return next((op for op in deeper if op.stages >= DEEP_STAGES), self)

    @property
    def overlaps(self) -> bool:
        """Whether the instructions of a stage still run while the next stage begins. Those that read weights from registers do not: the
        assembler would keep their registers for them in the whole kernel."""
        return not self.has_scales

    @property
    def ahead(self) -> int:
        """The number of stages that are copied ahead."""
        return self.stages - (2 if self.overlaps else 1)

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
    def stages(self) -> int:
        return min(2 + -(-ENOUGH_BYTES // self.weight_bytes), MOST_BYTES // (self.stage_bytes + BARRIER_BYTES))

    @property
    def barriers_at(self) -> int:
        """The offset in shared memory of the stages' mbarriers. They follow the memory that the stages and, later, the result c use."""
        return max(self.stages * self.stage_bytes, self.result_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + self.stages * BARRIER_BYTES

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Block(self, code, pointers, dims).run()


class _Block(ProductCode):
    def __init__(self, op: Wgmma, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        super().__init__(op, code, pointers, dims)
        self.op: Wgmma = op
        self.leads = code.op(f"icmp eq i64 {self.thread}, {LEADER}")
        # The place of this thread's chunks in a stage. Chunk c of row r is stored at place c XOR r % 8 of the row.
        chunk, row = code.op(f"and i64 {self.thread}, 7"), code.op(f"lshr i64 {self.thread}, 3")
        swapped = code.op(f"xor i64 {chunk}, {code.op(f'and i64 {row}, 7')}")
        self.chunk_row, self.chunk_bytes = row, self.times(chunk, CHUNK)
        self.own_chunk = self.plus(self.times(row, ROW_BYTES), self.times(swapped, CHUNK))
        self.turns = self.divided(self.steps, op.fold)  # the number of times that a stage is multiplied

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
        for turn in range(op.ahead):
            with code.when(code.op(f"icmp slt i64 {turn}, {self.turns}")):
                self._copy(panels, rows, str(turn), str(turn))
            self.commit()
        with code.loop("0", self.turns) as turn:
            slot = self._slot(turn)
            self._await(slot, turn)
            self.await_copies(op.ahead - 1)
            self.fence()  # the tensor cores read the rows that threads have copied
            self.barrier()
            later = code.op(f"add i64 {turn}, {op.ahead}")
            with code.when(code.op(f"icmp slt i64 {later}, {self.turns}")):
                self._copy(panels, rows, later, self._slot(later))
            self.commit()
            self._multiply(slot, turn, places)
        if op.overlaps:
            self._wait_for_products()
        self.await_copies(0)
        self.end_sums()
        self.barrier()  # c overwrites the stages, so wait until all warps have read them
        with code.when(self.leads):
            for stage in range(op.stages):
                self.assembly("mbarrier.inval.shared.b64 [$0];", [("r", self.barrier_of(str(stage)))])
        self.store(self.times(self.warp, SIXTEEN), NARROW)

    def _slot(self, turn: str) -> str:
        """Return the number of the stage of a turn. Division of 32 bits is faster than of 64."""
        short = self.code.op(f"trunc i64 {turn} to i32")
        return self.code.op(f"zext i32 {self.code.op(f'urem i32 {short}, {self.op.stages}')} to i64")

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

    def _copy(self, panels: Sequence[str], rows: Sequence[str], turn: str, slot: str) -> None:
        """Begin to copy the weights and rows of a stage."""
        op, code = self.op, self.code
        stage = self.gep(SHARED, self.shared, self.times(slot, op.stage_bytes))
        begin = self.times(turn, op.fold * op.panel_bytes)
        with code.when(self.leads):
            full = self.barrier_of(slot)
            self.assembly(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {op.weight_bytes};", [("r", full)])
            copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            for number, panel in enumerate(panels):
                first = self.gep(GLOBAL, panel, begin)
                for fold in range(1 if op.has_scales else op.fold):  # a panel's weights of few bits stay adjacent
                    to = self.number_of(self.gep(SHARED, stage, str(self._panel_at(number, fold))))
                    source = self.gep(GLOBAL, first, str(fold * op.panel_bytes))
                    num_bytes = op.panel_bytes * (op.fold if op.has_scales else 1)
                    operands = [("r", to), ("l", code.op(f"ptrtoint {GLOBAL} {source} to i64")), ("r", full)]
                    self.assembly(f"{copy} [$0], [$1], {num_bytes}, [$2];", operands)
        begin = self.times(turn, op.fold * ROW_BYTES)
        place = self.gep(SHARED, stage, self.plus(self.own_chunk, str(op.weight_bytes)))
        few = op.rows < AT_ONCE
        with code.when(code.op(f"icmp ult i64 {self.chunk_row}, {op.rows}")) if few else nullcontext():
            for number, row in enumerate(rows):
                first = self.gep(GLOBAL, row, begin)
                for fold in range(op.fold):
                    to = self.gep(SHARED, place, str(fold * op.row_bytes + number * AT_ONCE * ROW_BYTES))
                    self.copy(to, self.gep(GLOBAL, first, str(fold * ROW_BYTES)))

    def _panel_at(self, number: int, fold: int) -> int:
        """Return the offset, in bytes, of one step of a panel in a stage. All panels of a step are adjacent if `wgmma` reads them from
        shared memory; all steps of a panel are adjacent if this code reads them."""
        op = self.op
        return (number * op.fold + fold if op.has_scales else fold * op.num_panels + number) * op.panel_bytes

    def _await(self, slot: str, turn: str) -> None:
        """Wait until the panels of a stage have arrived."""
        code = self.code
        uses = code.op(f"udiv i32 {code.op(f'trunc i64 {turn} to i32')}, {self.op.stages}")  # how often the stage was used before
        full, parity = self.barrier_of(slot), code.op(f"and i32 {uses}, 1")
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

    def _multiply(self, slot: str, turn: str, places: Sequence[tuple[str, str]]) -> None:
        op = self.op
        stage = self.gep(SHARED, self.shared, self.times(slot, op.stage_bytes))
        rows = self._descriptor(self.gep(SHARED, stage, str(op.weight_bytes)), ROWS)
        if not op.has_scales:
            self._start(range(self.per_warp), range(op.fold), [("l", self._descriptor(stage, COLUMNS))], rows, 1)
            return
        order = [(fold, part) for fold in range(op.fold) for part in range(self.per_warp)]
        pieces = iter([self._pieces(stage, part, fold) for fold, part in order])
        read = next(pieces)
        for number, (fold, part) in enumerate(order):  # one after another, so that few registers hold weights
            weights = [("r", register) for words in read for register in self._converted(words)]
            read = next(pieces, iter(()))
            if op.fold > 1:
                read = iter(list(read))  # read the next words before these weights are multiplied
            if part == 0:
                step = self.plus(self.times(turn, op.fold), str(fold))
                self.begin_group(step, places, self._wait_for_products if fold else lambda: None)
            is_last = number + 1 == len(order)
            self._start(range(part, part + 1), range(fold, fold + 1), weights, rows, 0 if is_last or op.fold == 1 else 1)

    def _start(self, parts: range, folds: range, weights: Sequence[tuple[str, str]], rows: str, running: int) -> None:
        """Start the instructions of some steps of a stage, `folds`, for some parts of 64 columns each, as a group. Then wait until only
        `running` groups still run. `weights` are the descriptor of all parts, or the registers of one part."""
        op = self.op
        per_part = len(self.sums) // self.per_warp
        sums, first = self.sums[parts.start * per_part : parts.stop * per_part], 2 * len(parts) * per_part
        lines = [".reg .b64 a, b; .reg .pred p; setp.eq.u32 p, 1, 1; wgmma.fence.sync.aligned;"]
        for fold in folds:
            for i in range(op.step // SIXTEEN):
                lines.append(f"add.s64 b, ${first + len(weights)}, {fold * op.row_bytes // CHUNK + i * ROW_STEP};")
                for number, part in enumerate(parts):
                    result = ", ".join(f"${number * per_part + n}" for n in range(per_part))
                    if op.has_scales:
                        left, transposed = f"{{{', '.join(f'${first + i * 4 + n}' for n in range(4))}}}", "0"
                    else:
                        place = self._panel_at(part * NARROW // op.panel_columns, fold) // CHUNK
                        lines.append(f"add.s64 a, ${first}, {place + i * COLUMN_STEP};")
                        left, transposed = "a", "0, 0"
                    kind = f"m64n{op.rows}k16.f32.bf16.bf16"
                    lines.append(f"wgmma.mma_async.sync.aligned.{kind} {{{result}}}, {left}, b, p, 1, 1, {transposed};")
        lines.append(f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {running};")
        self._with_sums(sums, f"{{ {' '.join(lines)} }}", [*weights, ("l", rows)])

    def _wait_for_products(self) -> None:
        self._with_sums(self.sums, "wgmma.wait_group.sync.aligned 0;")

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

    def _pieces(self, stage: str, part: int, fold: int) -> Iterator[list[str]]:
        """Read this lane's weights of the warp's 16 columns in the given 64 columns and step of a stage, four words at a time."""
        op, code = self.op, self.code
        high, low = code.op(f"lshr i64 {self.warp}, 1"), code.op(f"and i64 {self.warp}, 1")
        panel = self.times(high, op.fold * op.panel_bytes)
        own = self.plus(self.plus(panel, self.times(low, LANES * CHUNK)), self.times(self.lane, CHUNK))
        base = self.gep(SHARED, stage, self.plus(own, str(self._panel_at(part * NARROW // op.panel_columns, fold))))
        for piece in range(op.bits // 4):
            yield self.words(SHARED, base, str(piece * 2 * LANES * CHUNK), 4)

    def _converted(self, words: Sequence[str]) -> list[str]:
        """Return the registers with the weights of a piece, four for each instruction."""
        return self.eight_bits(words) if self.op.bits == 8 else [x for word in words for x in self.four_bits(word)]

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
