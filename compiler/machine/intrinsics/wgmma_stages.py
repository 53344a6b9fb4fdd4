"""Emit the copies of a product by `wgmma`: operands pass from global memory through stages, which are buffers in shared memory.

One warp, the producer, fills the stages; the other warps, the consumers, multiply them. A stage has two mbarriers: `full` signals that all
operands have arrived, `free` that all consumers have multiplied them. So consumers do not wait for each other between stages. In a cluster
of two blocks, each producer fills half of the weights of a stage in both blocks. So a producer fills a stage again when the consumers of
both blocks have multiplied their stages of this number.

Global memory stores weights in the order in which `wgmma` reads them (`BRICKS` in compiler/machine/formats.py), so one lane copies a whole
panel by one instruction. All lanes copy rows, 16 bytes each, and store them swizzled, so that neither their stores nor the reads of the
tensor cores have bank conflicts.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, LANES, SHARED, WARPS
from compiler.machine.intrinsics.block_product import ProductCode
from compiler.machine.intrinsics.wgmma import BARRIER_BYTES, CONSUMERS, ROW_BYTES, WARPGROUPS, Wgmma

CHUNK = 16  # number of bytes that a lane copies at once
AT_ONCE = LANES * CHUNK // ROW_BYTES  # number of rows that the lanes copy together
FULL, FREE = 0, 1  # kinds of mbarriers of a stage
MULTIPLIED = 1  # number of the block's barrier at which consumers wait until all stages are multiplied


class Stages(ProductCode):
    """Emits the copies of a product, and the waits of the producer and the consumers for each other."""

    def __init__(self, op: Wgmma, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Find out from the number of this thread's warpgroup whether the thread produces or consumes. `pointers` and `dims` are those of
        the tile `op`."""
        super().__init__(op, code, pointers, dims)
        self.op: Wgmma = op
        # From here on, `warp` is the number of the warp in its warpgroup, not in its block.
        self.warpgroup, self.warp = self._of_first_lane(f"udiv i64 {self.warp}, {WARPS}"), code.op(f"urem i64 {self.warp}, {WARPS}")
        self.produces = code.op(f"icmp uge i64 {self.warpgroup}, {WARPGROUPS}")
        self.leads = code.op(f"icmp eq i64 {self.lane}, 0")  # one lane of each warp acts for the warp
        self.turns = self.divided(self.steps, op.fold)  # in turn t, the producer fills stage t % stages
        self.rank = "0"  # the number of the block in its cluster
        if op.cluster > 1:
            self.rank = code.op(f"zext i32 {code.op('call i32 @llvm.nvvm.read.ptx.sreg.cluster.ctarank()')} to i64")

    def _of_first_lane(self, value: str) -> str:
        """Return the result of the instruction `value`, read from the first lane. All lanes of a warp have the same result. The assembler
        treats a value as equal in all lanes only if it is read from one lane. The assembler then computes values that depend on it once per
        warp, in registers that the lanes share."""
        code = self.code
        short = code.op(f"trunc i64 {code.op(value)} to i32")
        return code.op(f"zext i32 {code.op(f'call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 -1, i32 {short}, i32 0, i32 31)')} to i64")

    # --- begin and end ---------------------------------------------------------------------------------------------------

    def open_stages(self) -> None:
        """Initialise the mbarriers, and wait until all threads of the cluster see them."""
        code, op = self.code, self.op
        # Numbers of arrivals. FULL: one of each lane that copies rows, and one that announces the panels; FREE: one of each warp that
        # multiplies.
        counts = {FULL: LANES + 1, FREE: op.cluster * op.multipliers // LANES}
        with code.when(code.op(f"icmp eq i64 {self.thread}, {CONSUMERS}")):
            for kind, count in counts.items():
                for stage in range(op.stages):
                    self.assembly(f"mbarrier.init.shared.b64 [$0], {count};", [("r", self.barrier_of(kind, str(stage)))])
            self.assembly("fence.mbarrier_init.release.cluster;")
        self.fence()  # copies of panels overwrite memory that threads have written
        if op.cluster > 1:
            self.assembly("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
        else:
            self.barrier()

    def close_stages(self) -> None:
        """Wait until all consumers have multiplied all stages, and end the mbarriers. Then the memory can be used for the result, because
        no copy to it follows. No arrival from the other block of a cluster follows either: this block has waited for all of them."""
        code, op = self.code, self.op
        self.assembly(f"bar.sync {MULTIPLIED}, {CONSUMERS};")
        with code.when(code.op(f"icmp eq i64 {self.thread}, 0")):
            for kind in (FULL, FREE):
                for stage in range(op.stages):
                    self.assembly("mbarrier.inval.shared.b64 [$0];", [("r", self.barrier_of(kind, str(stage)))])

    # --- the producer ----------------------------------------------------------------------------------------------------

    def fill_early(self) -> None:
        """Begin to copy the weights of as many turns as there are stages, or of all turns if these are fewer. Then wait until the kernels
        that were launched earlier have ended, because they may still write rows, or read the memory of the result. Wide tiles only wait:
        their kernels take long, and have no registers to spare."""
        code, op = self.code, self.op
        if op.is_narrow:
            with code.when(code.op(f"and i1 {self.leads}, {self.produces}")):
                panels = self._panels()
                with code.loop("0", code.op(f"call i64 @llvm.smin.i64(i64 {self.turns}, i64 {op.stages})")) as turn:
                    self._copy_panels(panels, turn, turn)
        self.assembly("griddepcontrol.wait;")

    def produce(self) -> None:
        """Fill the stages one after another, each as soon as the consumers have multiplied its previous contents. In a narrow tile, the
        first weights were copied early."""
        code = self.code
        panels, rows = self._panels(), self._rows()
        with code.loop("0", self.turns) as turn:
            slot, uses = self._slot(turn), self._uses(turn)
            is_used = code.op(f"icmp ne i32 {uses}, 0")
            with code.when(is_used):
                self._await(FREE, slot, code.op(f"and i32 {code.op(f'sub i32 {uses}, 1')}, 1"))
            with code.when(code.op(f"and i1 {self.leads}, {is_used}") if self.op.is_narrow else self.leads):
                self._copy_panels(panels, turn, slot)
            self._copy_rows(rows, turn, slot)
            self.assembly("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [("r", self.barrier_of(FULL, slot))])

    def _panels(self) -> list[tuple[str, int]]:
        """Return the panels that this block copies: their global addresses at the first step, and their numbers in the stage. In a cluster,
        each block copies half of the panels; the numbers are those of the panels that the first block copies."""
        op, code = self.op, self.code
        count = op.columns // op.panel_columns
        half, panel_bytes = count // 2, self.times(self.steps, op.panel_bytes)
        numbers = [i + op.apart - half if op.apart and i >= half else i for i in range(count)]
        offsets = [code.op(f"mul i64 {self.clamped(str(i))}, {panel_bytes}") for i in numbers]
        panels = [self.in_matrix(base, at) for base in self.panels for at in offsets]
        if op.cluster == 1:
            return list(zip(panels, range(len(panels)), strict=True))
        is_first, first = code.op(f"icmp eq i64 {self.rank}, 0"), panels[: len(panels) // 2]
        pairs = zip(first, panels[len(first) :], strict=True)
        return [(code.op(f"select i1 {is_first}, {GLOBAL} {a}, {GLOBAL} {b}"), i) for i, (a, b) in enumerate(pairs)]

    def _rows(self) -> list[tuple[str, str]]:
        """Return the chunks of rows that this lane copies: their global addresses at the first step, and their offsets in a stage. Chunk c
        of row r is stored as chunk c XOR (r % 8) of the row."""
        code, last = self.code, self.code.op(f"sub i64 {self.num_rows}, 1")
        chunk, own = code.op(f"and i64 {self.lane}, 7"), code.op(f"lshr i64 {self.lane}, 3")
        found: list[tuple[str, str]] = []
        for first in range(0, self.op.rows, AT_ONCE):
            row = self.plus(own, str(first))
            near = code.op(f"call i64 @llvm.smin.i64(i64 {row}, i64 {last})")
            at = self.plus(code.op(f"mul i64 {self.times(near, 2)}, {self.stride}"), self.times(chunk, CHUNK))
            swapped = code.op(f"xor i64 {chunk}, {self.plus(own, str(first % EIGHT))}")
            place = self.plus(
                self.plus(self.times(own, ROW_BYTES), self.times(swapped, CHUNK)), str(first * ROW_BYTES + self.op.weight_bytes)
            )
            found.append((self.in_matrix(self.rows, at), place))
        return found

    def _copy_panels(self, panels: Sequence[tuple[str, int]], turn: str, slot: str) -> None:
        """Announce to the mbarrier the bytes of all panels of a stage, and copy the panels that this block copies."""
        op, code = self.op, self.code
        full, begin = self.barrier_of(FULL, slot), self.times(turn, op.fold * op.panel_bytes)
        stage = self.gep(SHARED, self.stage(slot), self.times(self.rank, self.panel_at(len(panels), 0)))
        self.assembly(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {op.weight_bytes};", [("r", full)])
        copy, mask = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", ""
        if op.cluster > 1:
            copy, mask = f"{copy}.multicast::cluster", f", {(1 << op.cluster) - 1}"
        for panel, number in panels:
            first = self.gep(GLOBAL, panel, begin)
            together = op.fold if op.has_scales or op.num_panels == 1 else 1  # number of steps to copy at once: those adjacent in the stage
            for fold in range(0, op.fold, together):
                to = self.number_of(self.gep(SHARED, stage, str(self.panel_at(number, fold))))
                source = self.gep(GLOBAL, first, str(fold * op.panel_bytes))
                operands = [("r", to), ("l", code.op(f"ptrtoint {GLOBAL} {source} to i64")), ("r", full)]
                self.assembly(f"{copy} [$0], [$1], {op.panel_bytes * together}, [$2]{mask};", operands)

    def _copy_rows(self, rows: Sequence[tuple[str, str]], turn: str, slot: str) -> None:
        """Begin to copy this lane's chunks of rows for a turn."""
        op, stage, begin = self.op, self.stage(slot), self.times(turn, self.op.fold * ROW_BYTES)
        for row, place in rows:
            first, to = self.gep(GLOBAL, row, begin), self.gep(SHARED, stage, place)
            for fold in range(op.fold):
                self.copy(self.gep(SHARED, to, str(fold * op.row_bytes)), self.gep(GLOBAL, first, str(fold * ROW_BYTES)))

    # --- the consumers ---------------------------------------------------------------------------------------------------

    def await_stage(self, turn: str) -> str:
        """Wait until the operands of a turn have arrived. Return the number of the turn's stage."""
        slot = self._slot(turn)
        self._await(FULL, slot, self.code.op(f"and i32 {self._uses(turn)}, 1"))
        self.fence()  # the tensor cores read the rows that the producer has copied
        return slot

    def release_stage(self, turn: str) -> None:
        """Signal to all producers of the cluster that this warp has multiplied the stage of a turn. Do not signal if the stage is not
        filled again: the other block may have ended."""
        code, op = self.code, self.op
        is_filled = code.op(f"icmp slt i64 {code.op(f'add i64 {turn}, {op.stages}')}, {self.turns}")
        with code.when(code.op(f"and i1 {self.leads}, {is_filled}")):
            place = self.barrier_of(FREE, self._slot(turn))
            if op.cluster == 1:
                self.assembly("mbarrier.arrive.shared::cta.b64 _, [$0];", [("r", place)])
                return
            arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [far];"
            for rank in range(op.cluster):
                self.assembly(f"{{ .reg .b32 far; mapa.shared::cluster.u32 far, $0, {rank}; {arrive} }}", [("r", place)])

    # --- stages and their mbarriers --------------------------------------------------------------------------------------

    def stage(self, slot: str) -> str:
        """Return the address of a stage."""
        return self.gep(SHARED, self.shared, self.times(slot, self.op.stage_bytes))

    def panel_at(self, number: int, fold: int) -> int:
        """Return the offset, in bytes, of one step of a panel in a stage. If `wgmma` reads the weights from shared memory, all panels of a
        step are adjacent. If warps read and convert them, all steps of a panel are adjacent."""
        op = self.op
        return (number * op.fold + fold if op.has_scales else fold * op.num_panels + number) * op.panel_bytes

    def _slot(self, turn: str) -> str:
        """Return the number of the stage of a turn. Division of 32 bits is faster than of 64."""
        short = self.code.op(f"trunc i64 {turn} to i32")
        return self.code.op(f"zext i32 {self.code.op(f'urem i32 {short}, {self.op.stages}')} to i64")

    def _uses(self, turn: str) -> str:
        """Return how many earlier turns used the same stage."""
        return self.code.op(f"udiv i32 {self.code.op(f'trunc i64 {turn} to i32')}, {self.op.stages}")

    def _await(self, kind: int, slot: str, parity: str) -> None:
        """Wait until an mbarrier of a stage has completed the phase with this parity."""
        self.await_phase(self.barrier_of(kind, slot), parity, "acquire.cluster." if kind == FREE and self.op.cluster > 1 else "")

    def barrier_of(self, kind: int, slot: str) -> str:
        """Return the address of the mbarrier of this `kind` of the stage `slot`."""
        at = self.plus(self.times(slot, BARRIER_BYTES), str(self.op.barriers_at + kind * self.op.stages * BARRIER_BYTES))
        return self.number_of(self.gep(SHARED, self.shared, at))
