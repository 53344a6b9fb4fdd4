"""Products on the tensor cores of a GPU. A block of four warps computes a tile.

One `mma.sync` multiplies 16 columns of a weight by 8 rows, for 16 numbers along k. Weights are stored in the order of its registers
(`Fragments` in compiler/machine/formats.py), so a lane loads its 16 bytes without shuffles. Each warp computes its own columns for all rows
of the block. An accumulator adds products in the order of k, 16 at a time, for all values of `rows` and `columns`.

Weights of 8 or 4 bits are converted in registers to bf16, which represents them exactly. The sum of each group is multiplied by the group's
scale, and groups are added in order.

Asynchronous copies from global memory run `stages` - 1 steps ahead of the products. With 8 rows, each warp copies the rows for itself, so
no warp waits for another. More rows are copied once for all warps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, float_literal, multiply_add
from compiler.machine.formats import FRAGMENT_COLUMNS, FRAGMENTS, FRAGMENTS4, FRAGMENTS8
from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, LANES, SHARED, SHARED_BYTES, WARPS, BlockCode
from compiler.machine.intrinsics.product import ProductOp
from compiler.machine.target import GPU, Target

STEP = FRAGMENTS.depth  # elements along k in a stage
MOST_STAGES = 8
ROW_BYTES = 512  # bytes of 8 rows in one step
FORMATS = {16: FRAGMENTS, 8: FRAGMENTS8, 4: FRAGMENTS4}  # the formats of weights, by bits per weight


@tile_op
class Mma(ProductOp):
    """mma_product(c, a, b, ...) dims(k, stride, num_rows, num_panels): c[s, i, j] = sum over k of a[i, k] * b_s[k, j], for each of the
    `sums` matrices b_s. If weights have fewer than 16 bits, their scales [num_panels, k / group, 16] are further operands, and `group` is
    the last dimension.

    c is in shared memory, [sums, rows, pitch]. During the products this memory holds the stages, so c must have at least `shared_bytes`. a
    has `num_rows` rows, and each b has `num_panels` panels of 16 columns. If c has more rows or columns, the last row or panel is repeated
    for them.
    """

    name: ClassVar[str] = "mma_product"
    threads: ClassVar[int] = WARPS * LANES
    accumulator: ClassVar[DType] = DType.F32
    row_dtype: ClassVar[DType] = DType.BF16
    panel_dtype: ClassVar[DType] = DType.BF16
    sums: int = 1
    bits: int = 16  # bits per weight
    wide_scales: bool = False  # whether scales are f32 instead of bf16
    apart: int = 0  # distance in panels from the first half of the columns to the second; 0: the second half follows the first

    @property
    def operands(self) -> tuple[Operand, ...]:
        holds = self.panel_dtype if self.bits == 16 else DType.U8
        panels = [Operand(f"b{i}", holds) for i in range(self.sums)]
        scale = DType.F32 if self.wide_scales else DType.BF16
        scales = [Operand(f"scale{i}", scale) for i in range(self.sums)] if self.has_scales else []
        return Operand("c", self.accumulator, written=True), Operand("a", self.row_dtype), *panels, *scales

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k", "stride", "num_rows", "num_panels", *(("group",) if self.has_scales else ()))

    @property
    def has_scales(self) -> bool:
        return self.bits < 16

    def problems(self) -> Iterator[str]:
        if self.rows % EIGHT or self.rows < EIGHT:
            yield f"rows are {self.rows}, expected a multiple of {EIGHT}"
        if self.columns % (WARPS * FRAGMENT_COLUMNS) or self.columns < 1:
            yield f"columns are {self.columns}, expected a multiple of {WARPS * FRAGMENT_COLUMNS}"
        if self.bits not in FORMATS:
            yield f"bits are {self.bits}, expected {', '.join(map(str, FORMATS))}"
        elif self.sums < 1 or self.shared_bytes > SHARED_BYTES or self.stages < 2:
            yield f"{self.sums} sums of {self.rows} rows and {self.columns} columns exceed a block's {SHARED_BYTES} bytes of shared memory"

    @property
    def pitch(self) -> int:
        """Distance in elements between rows of c. The rows are padded so that lanes that store at the same time use different banks."""
        return self.columns + 4

    @property
    def panels(self) -> int:
        """Number of 16-column panels that each warp multiplies, for each of the `sums` matrices."""
        return self.columns // (WARPS * FRAGMENT_COLUMNS)

    @property
    def own_rows(self) -> bool:
        """Whether each warp copies the rows of a for itself, instead of once per block."""
        return self.rows == EIGHT

    @property
    def panel_bytes(self) -> int:
        """Bytes of one panel in a stage."""
        return FRAGMENT_COLUMNS * STEP * self.bits // 8

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in a stage."""
        return WARPS * self.sums * self.panels * self.panel_bytes

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
        (c, a, *rest), (k, stride, num_rows, num_panels, *groups) = arrays, dims
        rows = np.stack([a[min(i, num_rows - 1) * stride :][:k] for i in range(self.rows)]).astype(np.float64)
        out = c[: self.sums * self.rows * self.pitch].reshape(self.sums, self.rows, self.pitch)
        first, second = np.split(np.arange(self.columns // FRAGMENT_COLUMNS), 2)
        chosen = np.minimum([*first, *(first + self.apart if self.apart else second)], num_panels - 1)
        format, line = FORMATS[self.bits], self.panel_bytes * 8 // max(8, self.bits)
        group = groups[0] if self.has_scales else k
        for number in range(self.sums):
            found = rest[number][: num_panels * k // STEP * line].reshape(num_panels, k // STEP, line)
            weights = format.unpacked(found[chosen]).astype(np.float64)  # [columns, k]
            total = np.zeros((self.rows, self.columns), np.float32)
            scale = np.ones((k // group, self.columns), np.float32)
            if self.has_scales:
                held = rest[self.sums + number][: num_panels * (k // group) * FRAGMENT_COLUMNS].reshape(num_panels, k // group, -1)
                scale = held[chosen].swapaxes(0, 1).reshape(k // group, self.columns).astype(np.float32)
            for g, factor in enumerate(scale):
                part = np.zeros_like(total)
                for chunk in FRAGMENTS.chunks(group):
                    part = (part + rows[:, g * group + chunk] @ weights[:, g * group + chunk].T).astype(np.float32)
                total = (part.astype(np.float64) * factor + total).astype(np.float32)
            out[number, :, : self.columns] = total

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Block(self, code, pointers, dims).run()


class _Block(BlockCode):
    """Emits the code of a product. Every thread of the block runs it."""

    def __init__(self, op: Mma, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        super().__init__(code)
        self.op = op
        k, self.stride, self.num_rows, self.num_panels, *group = (str(d) for d in dims)
        self.steps = self.divided(k, STEP)
        self.group_steps = self.divided(group[0], STEP) if op.has_scales else self.steps
        self.lane_bytes, row_bytes = self.times(self.lane, op.panel_bytes // LANES if op.bits < 16 else 16), self.times(self.lane, 16)
        self.shared = self.in_shared(pointers[0])
        self.rows, self.panels, self.scales = pointers[1], pointers[2 : 2 + op.sums], pointers[2 + op.sums :]
        per_warp = op.sums * op.panels
        self.own_weights = self._shared(self.plus(self.times(self.warp, per_warp * op.panel_bytes), self.lane_bytes), self.shared)
        rows_at = self.plus(self.times(self.warp, ROW_BYTES), row_bytes) if op.own_rows else row_bytes
        self.own_rows = self._shared(self.plus(rows_at, str(op.weight_bytes)), self.shared)
        count = per_warp * op.rows // EIGHT * 4
        self.sums = [code.alloca("float") for _ in range(count)]
        self.in_groups = op.has_scales and self.group_steps != self.steps
        self.totals = [code.alloca("float") for _ in range(count)] if self.in_groups else self.sums
        self.factors = [code.alloca("float") for _ in range(2 * per_warp)] if op.has_scales else []

    def run(self) -> None:
        code, op = self.code, self.op
        for total in dict.fromkeys((*self.sums, *self.totals)):
            code.do(f"store float 0.0, ptr {total}, align 4")
        chosen = self._chosen()
        sources = self._sources(chosen)
        if op.has_scales:
            self._read_scales(chosen, "0")
        ahead = op.stages - 1
        for step in range(ahead):
            with code.when(code.op(f"icmp slt i64 {step}, {self.steps}")):
                self._copy(sources, str(step), str(step))
            self._commit()
        with code.loop("0", self.steps) as step:
            code.do(f"call void @llvm.nvvm.cp.async.wait.group(i32 {ahead - 1})")
            if not op.own_rows:
                self.barrier()
            later = code.op(f"add i64 {step}, {ahead}")
            with code.when(code.op(f"icmp slt i64 {later}, {self.steps}")):
                self._copy(sources, later, code.op(f"urem i64 {later}, {op.stages}"))
            self._commit()
            self._multiply(code.op(f"urem i64 {step}, {op.stages}"))
            if self.in_groups:
                following = code.op(f"add i64 {step}, 1")
                rest = code.op(f"urem i64 {following}, {self.group_steps}")
                with code.when(code.op(f"icmp eq i64 {rest}, 0")):
                    self._add_group()
                    last = code.op(f"sub i64 {self.steps}, 1")
                    near = code.op(f"call i64 @llvm.smin.i64(i64 {following}, i64 {last})")
                    self._read_scales(chosen, code.op(f"udiv i64 {near}, {self.group_steps}"))
        code.do("call void @llvm.nvvm.cp.async.wait.group(i32 0)")
        if op.has_scales and not self.in_groups:
            self._scale()
        self.barrier()  # c overwrites the stages, so wait until all warps have read them
        self._store()

    # --- copies --------------------------------------------------------------------------------------------------------

    def _chosen(self) -> list[str]:
        """Return the indices of the panels that this warp multiplies, which are the same in each matrix."""
        code, op = self.code, self.op
        last = code.op(f"sub i64 {self.num_panels}, 1")
        first = self.times(self.warp, op.panels)
        if op.apart:
            second = code.op(f"icmp uge i64 {self.warp}, {WARPS // 2}")
            skipped = op.apart - op.panels * WARPS // 2
            first = code.op(f"add i64 {first}, {code.op(f'select i1 {second}, i64 {skipped}, i64 0')}")
        wanted = [self.plus(first, str(p)) for p in range(op.panels)]
        return [code.op(f"call i64 @llvm.smin.i64(i64 {panel}, i64 {last})") for panel in wanted]

    def _sources(self, chosen: Sequence[str]) -> list[str]:
        """Return the global addresses that this lane copies in the first step: parts of its warp's panels first, then parts of rows of
        a."""
        op, code = self.op, self.code
        panel_bytes = self.times(self.steps, op.panel_bytes)
        offsets = [self.plus(code.op(f"mul i64 {panel}, {panel_bytes}"), self.lane_bytes) for panel in chosen]
        found = [self._global(base, at) for base in self.panels for at in offsets]
        last = code.op(f"sub i64 {self.num_rows}, 1")
        for number in range(1 if op.own_rows else -(-op.rows // (EIGHT * WARPS))):
            first = "0" if op.own_rows else self.times(self.plus(self.warp, str(number * WARPS)), EIGHT)
            row = code.op(f"call i64 @llvm.smin.i64(i64 {self.plus(first, self.group)}, i64 {last})")
            at = self.plus(code.op(f"mul i64 {self.times(row, 2)}, {self.stride}"), self.times(self.quad, 16))
            found.append(self._global(self.rows, at))
        return found

    def _copy(self, sources: Sequence[str], step: str, slot: str) -> None:
        op, per_warp = self.op, self.op.sums * self.op.panels
        stage = self.times(slot, op.stage_bytes)
        weights, rows = self._shared(stage, self.own_weights), self._shared(stage, self.own_rows)
        begin = self.times(step, op.panel_bytes)
        for p in range(per_warp):
            source = self.gep(GLOBAL, sources[p], begin)
            for at in range(0, op.panel_bytes, LANES * 16):
                target = self._shared(str(p * op.panel_bytes + at), weights)
                self._copy_to(target, self.gep(GLOBAL, source, str(at)), min(16, op.panel_bytes // LANES))
        begin = self.times(step, STEP * 2)
        for number, source in enumerate(sources[per_warp:]):
            at = "0" if op.own_rows else self.times(self.plus(self.warp, str(number * WARPS)), ROW_BYTES)
            some = not op.own_rows and op.rows // EIGHT < WARPS
            with self.code.when(self.code.op(f"icmp ult i64 {self.warp}, {op.rows // EIGHT}")) if some else nullcontext():
                self._copy_to(self._shared(at, rows), self.gep(GLOBAL, source, begin), 16)

    def _copy_to(self, target: str, source: str, num_bytes: int) -> None:
        """Emit an asynchronous copy to shared memory. A copy of 16 bytes bypasses L1; smaller copies cannot bypass it."""
        kind = "cg" if num_bytes == 16 else "ca"
        self.code.do(f"call void @llvm.nvvm.cp.async.{kind}.shared.global.{num_bytes}({SHARED} {target}, {GLOBAL} {source})")

    def _commit(self) -> None:
        self.code.do("call void @llvm.nvvm.cp.async.commit.group()")

    # --- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, slot: str) -> None:
        op, per_warp = self.op, self.op.sums * self.op.panels
        stage = self.times(slot, op.stage_bytes)
        weights, rows = self._shared(stage, self.own_weights), self._shared(stage, self.own_rows)
        left = [self._weights(self._shared(str(p * op.panel_bytes), weights)) for p in range(per_warp)]
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
                words = self.words(SHARED, base, "0", 4)
                return [[self._bytes(word, first) for word in words[2 * half : 2 * half + 2] for first in (0, 2)] for half in range(2)]
            case _:
                return [[self._nibbles(word, pair) for pair in (0, 2, 1, 3)] for word in self.words(SHARED, base, "0", 2)]

    def _bytes(self, word: str, first: int) -> str:
        """Convert two bytes to bf16. A byte in the lowest bits of the f32 2^23 makes it 2^23 + byte. The difference to 2^23 + offset has so
        few significant bits that the upper half of the f32, a bf16, is exact."""
        wide = [self.code.op(f"call i32 @llvm.nvvm.prmt(i32 {word}, i32 {0x4B000000}, i32 {0x7540 + first + i})") for i in range(2)]
        offset = float_literal(float(2**23 + FRAGMENTS8.offset))
        exact = [self.code.op(f"fsub float {self.code.op(f'bitcast i32 {w} to float')}, {offset}") for w in wide]
        low, high = (self.code.op(f"bitcast float {x} to i32") for x in exact)
        return self.high_halves(low, high)

    def _nibbles(self, word: str, pair: int) -> str:
        """Convert two weights of 4 bits to bf16: the one at bit 4 * pair of the word, and the one 16 bits above it. Four bits in the lowest
        bits of the bf16 128 make it 128 + bits. Then 128 and the offset are subtracted."""
        code = self.code
        shifted = word if pair == 0 else code.op(f"lshr i32 {word}, {4 * pair}")
        held = code.op(f"or i32 {code.op(f'and i32 {shifted}, {0x000F000F}')}, {0x43004300}")
        pairs = code.op(f"bitcast i32 {held} to <2 x bfloat>")
        one, offset = "<bfloat 1.0, bfloat 1.0>", f"<bfloat {-128.0 - FRAGMENTS4.offset}, bfloat {-128.0 - FRAGMENTS4.offset}>"
        exact = code.op(f"call <2 x bfloat> @llvm.fma.v2bf16(<2 x bfloat> {pairs}, <2 x bfloat> {one}, <2 x bfloat> {offset})")
        return code.op(f"bitcast <2 x bfloat> {exact} to i32")

    # --- scales --------------------------------------------------------------------------------------------------------

    def _read_scales(self, chosen: Sequence[str], group: str) -> None:
        """Read the scales of this lane's two columns in each panel: `self.group` and `self.group` + 8."""
        op, code = self.op, self.code
        num_groups = code.op(f"udiv i64 {self.steps}, {self.group_steps}")
        factors = iter(self.factors)
        for base in self.scales:
            for panel in chosen:
                line = self.plus(code.op(f"mul i64 {panel}, {num_groups}"), group)
                at = self.plus(self.times(line, FRAGMENT_COLUMNS), self.group)
                for column in (0, EIGHT):
                    place = self.times(self.plus(at, str(column)), 4 if op.wide_scales else 2)
                    code.do(f"store float {self._scale_at(self._global(base, place))}, ptr {next(factors)}, align 4")

    def _scale_at(self, place: str) -> str:
        code = self.code
        if self.op.wide_scales:
            return code.op(f"load float, {GLOBAL} {place}, align 4")
        bits = code.op(f"zext i16 {code.op(f'load i16, {GLOBAL} {place}, align 2')} to i32")
        return code.op(f"bitcast i32 {code.op(f'shl i32 {bits}, 16')} to float")

    def _scaled(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield for each accumulator: its address, the address of its total, its value, and its scale."""
        code, op = self.code, self.op
        factors = self.load_floats(self.factors)
        for number, (part, total) in enumerate(zip(self.sums, self.totals, strict=True)):
            panel, e = number // (op.rows // EIGHT * 4), number % 4
            yield part, total, code.op(f"load float, ptr {part}, align 4"), factors[2 * panel + e // 2]

    def _add_group(self) -> None:
        code = self.code
        for part, total, value, factor in self._scaled():
            old = code.op(f"load float, ptr {total}, align 4")
            code.do(f"store float {multiply_add(code, value, factor, old, 'float', 1)}, ptr {total}, align 4")
            code.do(f"store float 0.0, ptr {part}, align 4")

    def _scale(self) -> None:
        for part, _, value, factor in self._scaled():
            self.code.do(f"store float {self.code.op(f'fmul float {value}, {factor}')}, ptr {part}, align 4")

    def _store(self) -> None:
        """Store the accumulators in c. In each 16 x 8 tile, a lane has columns `self.group` and `self.group` + 8 of rows 2 * `self.quad`
        and 2 * `self.quad` + 1."""
        op, code = self.op, self.code
        row = self.times(self.times(self.quad, 2), op.pitch)
        base = self.gep(SHARED, self.shared, self.plus(row, self.plus(self.times(self.warp, op.panels * 16), self.group)), "float")
        totals = iter(self.totals)
        for s in range(op.sums):
            for p in range(op.panels):
                for j in range(op.rows // EIGHT):
                    for e in range(4):
                        at = (s * op.rows + EIGHT * j + e % 2) * op.pitch + p * FRAGMENT_COLUMNS + e // 2 * EIGHT
                        value = code.op(f"load float, ptr {next(totals)}, align 4")
                        code.do(f"store float {value}, {SHARED} {self.gep(SHARED, base, str(at), 'float')}, align 4")

    def _shared(self, at: str, base: str) -> str:
        return self.gep(SHARED, base, at)

    def _global(self, base: str, at: str) -> str:
        return self.gep(GLOBAL, self.in_global(base), at)
