"""Products on the tensor cores of a GPU: what a block of four warps computes together.

`mma.sync` multiplies 16 columns of a weight by 8 rows, 16 numbers along k at a time. Weights lie in memory as its registers hold them
(`Fragments` in compiler/machine/formats.py), so a lane reads its own 16 bytes and nothing is shuffled. Each warp has columns of its own
and all rows of the block. An accumulator adds its products in the order of k, 16 at a time, whatever `rows` and `columns` are.

Copies from global memory run `stages` - 1 steps ahead. With 8 rows each warp copies them for itself, and no warp waits for another.
More rows are copied once for all warps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.formats import FRAGMENT_COLUMNS, FRAGMENTS
from compiler.machine.intrinsics.product import ProductOp
from compiler.machine.target import GPU, Target

WARPS, LANES = 4, 32
EIGHT = 8  # rows that an instruction multiplies
STEP = FRAGMENTS.depth  # of k, that a stage holds
SHARED_BYTES = 48 << 10  # that a block may have without asking the driver for more
MOST_STAGES = 8
WEIGHT_BYTES, ROW_BYTES = 1024, 512  # of a step of 16 columns, and of 8 rows
_GLOBAL, _SHARED = "ptr addrspace(1)", "ptr addrspace(3)"
_FOUR_FLOATS = "{float, float, float, float}"


@tile_op
class Mma(ProductOp):
    """mma_product(c, a, b, ...) dims(k, stride, num_rows, num_panels): c[s, i, j] = sum over k of a[i, k] * b_s[k, j], for each of `sums`
    matrices b_s.

    c is in shared memory, [sums, rows, pitch], and at least `shared_bytes` long: while the products run, it holds what is copied. Of the
    rows of a there are `num_rows`, and `num_panels` panels of 16 columns of each b; where there are fewer than c has, the last one stands
    for those that are missing."""

    name: ClassVar[str] = "mma_product"
    threads: ClassVar[int] = WARPS * LANES
    accumulator: ClassVar[DType] = DType.F32
    row_dtype: ClassVar[DType] = DType.BF16
    panel_dtype: ClassVar[DType] = DType.BF16
    sums: int = 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        panels = (Operand(f"b{i}", self.panel_dtype) for i in range(self.sums))
        return Operand("c", self.accumulator, written=True), Operand("a", self.row_dtype), *panels

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k", "stride", "num_rows", "num_panels")

    def problems(self) -> Iterator[str]:
        if self.rows % EIGHT or self.rows < EIGHT:
            yield f"rows are {self.rows}, expected a multiple of {EIGHT}"
        if self.columns % (WARPS * FRAGMENT_COLUMNS) or self.columns < 1:
            yield f"columns are {self.columns}, expected a multiple of {WARPS * FRAGMENT_COLUMNS}"
        if self.sums < 1 or self.shared_bytes > SHARED_BYTES or self.stages < 2:
            yield f"{self.sums} sums of {self.rows} rows and {self.columns} columns do not fit the shared memory of a block"

    @property
    def pitch(self) -> int:
        """From one row of c to the next: lanes that write together write to different banks."""
        return self.columns + 4

    @property
    def panels(self) -> int:
        """Of 16 columns, of a warp, of each sum."""
        return self.columns // (WARPS * FRAGMENT_COLUMNS)

    @property
    def own_rows(self) -> bool:
        """Each warp copies the rows for itself."""
        return self.rows == EIGHT

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return WARPS * self.sums * self.panels * WEIGHT_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + (WARPS if self.own_rows else self.rows // EIGHT) * ROW_BYTES

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, SHARED_BYTES // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return max(self.stages * self.stage_bytes, self.sums * self.rows * self.pitch * 4)

    def runs_on(self, target: Target) -> bool:
        return target.system == GPU

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, a, *panels), (k, stride, num_rows, num_panels) = arrays, dims
        rows = np.stack([a[min(i, num_rows - 1) * stride :][:k] for i in range(self.rows)]).astype(np.float64)
        out = c[: self.sums * self.rows * self.pitch].reshape(self.sums, self.rows, self.pitch)
        for number, b in enumerate(panels):
            found = b[: num_panels * k * FRAGMENT_COLUMNS].reshape(num_panels, k // STEP, -1)
            chosen = np.minimum(np.arange(self.columns // FRAGMENT_COLUMNS), num_panels - 1)
            weights = FRAGMENTS.unpacked(found[chosen]).astype(np.float64)  # [columns, k]
            total = np.zeros((self.rows, self.columns), np.float32)
            for chunk in FRAGMENTS.chunks(k):
                total = (total + rows[:, chunk] @ weights[:, chunk].T).astype(np.float32)
            out[number, :, : self.columns] = total

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Block(self, code, pointers, dims).run()


class _Block:
    """The code of a thread."""

    def __init__(self, op: Mma, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        self.op, self.code = op, code
        k, self.stride, self.num_rows, self.num_panels = (str(d) for d in dims)
        self.steps = code.op(f"sdiv i64 {k}, {STEP}")
        thread = code.op("call i32 @llvm.nvvm.read.ptx.sreg.tid.x()")
        self.thread = code.op(f"zext i32 {thread} to i64")
        self.lane, self.warp = code.op(f"and i64 {self.thread}, {LANES - 1}"), code.op(f"lshr i64 {self.thread}, 5")
        self.group, self.quad = code.op(f"lshr i64 {self.lane}, 2"), code.op(f"and i64 {self.lane}, 3")
        self.lane_bytes = code.op(f"shl i64 {self.lane}, 4")
        self.shared = code.op(f"addrspacecast ptr {pointers[0]} to {_SHARED}")
        self.rows, self.panels = pointers[1], pointers[2:]
        per_warp = op.sums * op.panels
        self.own_weights = self._shared(self._plus(self._times(self.warp, per_warp * WEIGHT_BYTES), self.lane_bytes), self.shared)
        rows_at = self._plus(self._times(self.warp, ROW_BYTES), self.lane_bytes) if op.own_rows else self.lane_bytes
        self.own_rows = self._shared(self._plus(rows_at, str(op.weight_bytes)), self.shared)
        self.totals = [code.alloca("float") for _ in range(per_warp * op.rows // EIGHT * 4)]

    def run(self) -> None:
        code, op = self.code, self.op
        for total in self.totals:
            code.do(f"store float 0.0, ptr {total}, align 4")
        sources = self._sources()
        ahead = op.stages - 1
        for step in range(ahead):
            with self._where(code.op(f"icmp slt i64 {step}, {self.steps}")):
                self._copy(sources, str(step), str(step))
            self._commit()
        with code.loop("0", self.steps) as step:
            code.do(f"call void @llvm.nvvm.cp.async.wait.group(i32 {ahead - 1})")
            if not op.own_rows:
                self._barrier()
            later = code.op(f"add i64 {step}, {ahead}")
            with self._where(code.op(f"icmp slt i64 {later}, {self.steps}")):
                self._copy(sources, later, code.op(f"urem i64 {later}, {op.stages}"))
            self._commit()
            self._multiply(code.op(f"urem i64 {step}, {op.stages}"))
        code.do("call void @llvm.nvvm.cp.async.wait.group(i32 0)")
        self._barrier()  # c lies where the stages were
        self._store()

    # --- copies --------------------------------------------------------------------------------------------------------

    def _sources(self) -> list[str]:
        """Where this lane copies from in the first step: the weights of its warp, then rows."""
        op, code = self.op, self.code
        panel_bytes = self._times(self.steps, WEIGHT_BYTES)
        found: list[str] = []
        last = code.op(f"sub i64 {self.num_panels}, 1")
        for base in self.panels:
            for p in range(op.panels):
                wanted = self._plus(self._times(self.warp, op.panels), str(p))
                panel = code.op(f"call i64 @llvm.smin.i64(i64 {wanted}, i64 {last})")
                at = self._plus(code.op(f"mul i64 {panel}, {panel_bytes}"), self.lane_bytes)
                found.append(self._global(base, at))
        last = code.op(f"sub i64 {self.num_rows}, 1")
        for number in range(1 if op.own_rows else -(-op.rows // (EIGHT * WARPS))):
            first = "0" if op.own_rows else self._times(self._plus(self.warp, str(number * WARPS)), EIGHT)
            row = code.op(f"call i64 @llvm.smin.i64(i64 {self._plus(first, self.group)}, i64 {last})")
            at = self._plus(code.op(f"mul i64 {self._times(row, 2)}, {self.stride}"), self._times(self.quad, 16))
            found.append(self._global(self.rows, at))
        return found

    def _copy(self, sources: Sequence[str], step: str, slot: str) -> None:
        op, per_warp = self.op, self.op.sums * self.op.panels
        stage = self._times(slot, op.stage_bytes)
        weights, rows = self._shared(stage, self.own_weights), self._shared(stage, self.own_rows)
        begin = self._times(step, WEIGHT_BYTES)
        for p in range(per_warp):
            source = self._gep(_GLOBAL, sources[p], begin)
            for at in (0, WEIGHT_BYTES // 2):
                self._copy_16(self._shared(str(p * WEIGHT_BYTES + at), weights), self._gep(_GLOBAL, source, str(at)))
        begin = self._times(step, STEP * 2)
        for number, source in enumerate(sources[per_warp:]):
            at = "0" if op.own_rows else self._times(self._plus(self.warp, str(number * WARPS)), ROW_BYTES)
            some = not op.own_rows and op.rows // EIGHT < WARPS
            with self._where(self.code.op(f"icmp ult i64 {self.warp}, {op.rows // EIGHT}")) if some else nullcontext():
                self._copy_16(self._shared(at, rows), self._gep(_GLOBAL, source, begin))

    def _copy_16(self, target: str, source: str) -> None:
        self.code.do(f"call void @llvm.nvvm.cp.async.cg.shared.global.16({_SHARED} {target}, {_GLOBAL} {source})")

    def _commit(self) -> None:
        self.code.do("call void @llvm.nvvm.cp.async.commit.group()")

    def _barrier(self) -> None:
        self.code.do("call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)")

    # --- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, slot: str) -> None:
        op, code, per_warp = self.op, self.code, self.op.sums * self.op.panels
        stage = self._times(slot, op.stage_bytes)
        weights, rows = self._shared(stage, self.own_weights), self._shared(stage, self.own_rows)
        left = [[self._words(weights, p * WEIGHT_BYTES + half * WEIGHT_BYTES // 2) for half in range(2)] for p in range(per_warp)]
        for j in range(op.rows // EIGHT):
            right = self._words(rows, j * ROW_BYTES)
            for p in range(per_warp):
                totals = self.totals[(p * (op.rows // EIGHT) + j) * 4 :][:4]
                sums = [code.op(f"load float, ptr {total}, align 4") for total in totals]
                for half in range(2):
                    sums = self._mma(left[p][half], right[2 * half : 2 * half + 2], sums)
                for total, value in zip(totals, sums, strict=True):
                    code.do(f"store float {value}, ptr {total}, align 4")

    def _words(self, base: str, at: int) -> list[str]:
        """Four words of 32 bits of shared memory."""
        read = self.code.op(f"load <4 x i32>, {_SHARED} {self._shared(str(at), base)}, align 16")
        return [self.code.op(f"extractelement <4 x i32> {read}, i32 {i}") for i in range(4)]

    def _mma(self, left: Sequence[str], right: Sequence[str], sums: Sequence[str]) -> list[str]:
        given = ", ".join([*(f"i32 {x}" for x in (*left, *right)), *(f"float {x}" for x in sums)])
        made = self.code.op(f"call {_FOUR_FLOATS} @llvm.nvvm.mma.m16n8k16.row.col.bf16({given})")
        return [self.code.op(f"extractvalue {_FOUR_FLOATS} {made}, {i}") for i in range(4)]

    def _store(self) -> None:
        """Of each accumulator tile a lane has columns `group` and `group` + 8, of the rows 2 `quad` and 2 `quad` + 1."""
        op, code = self.op, self.code
        row = self._times(self._times(self.quad, 2), op.pitch)
        base = self._gep(_SHARED, self.shared, self._plus(row, self._plus(self._times(self.warp, op.panels * 16), self.group)), "float")
        totals = iter(self.totals)
        for s in range(op.sums):
            for p in range(op.panels):
                for j in range(op.rows // EIGHT):
                    for e in range(4):
                        at = (s * op.rows + EIGHT * j + e % 2) * op.pitch + p * FRAGMENT_COLUMNS + e // 2 * EIGHT
                        value = code.op(f"load float, ptr {next(totals)}, align 4")
                        code.do(f"store float {value}, {_SHARED} {self._gep(_SHARED, base, str(at), 'float')}, align 4")

    # --- arithmetic of addresses ---------------------------------------------------------------------------------------

    def _where(self, cond: str) -> AbstractContextManager[None]:
        return self.code.when(cond)

    def _plus(self, a: str, b: str) -> str:
        return a if b == "0" else b if a == "0" else self.code.op(f"add i64 {a}, {b}")

    def _times(self, a: str, b: int) -> str:
        return str(int(a) * b) if a.isdigit() else self.code.op(f"mul i64 {a}, {b}")

    def _gep(self, kind: str, base: str, at: str, element: str = "i8") -> str:
        return base if at == "0" else self.code.op(f"getelementptr {element}, {kind} {base}, i64 {at}")

    def _shared(self, at: str, base: str) -> str:
        return self._gep(_SHARED, base, at)

    def _global(self, base: str, at: str) -> str:
        return self._gep(_GLOBAL, self.code.op(f"addrspacecast ptr {base} to {_GLOBAL}"), at)
