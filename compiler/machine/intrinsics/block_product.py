"""The shared parts of the tiles with which a block of several warps multiplies matrices on the tensor cores of a GPU: operands, meaning,
and the code that converts weights of few bits, applies scales and stores results.

In all these tiles, weights are the left operand of the instruction, and rows are the right operand. A lane has the same accumulators as in
`mma.sync`: of each 16 columns by 8 rows, it has two columns, which are 8 apart, of two adjacent rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.fma import numpy_fma
from compiler.ir.numbers import Kind
from compiler.ir.tiles import Array, Operand
from compiler.llvm.ssa import Code, float_literal, multiply_add
from compiler.machine.formats import FRAGMENTS4, FRAGMENTS8, Fragments, IntegerFragments, Ordered
from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, LANES, SHARED, WARPS, BlockCode
from compiler.machine.intrinsics.product import ProductOp

SIXTEEN = 16  # number of weight columns whose products a warp computes at once
NARROW = WARPS * SIXTEEN  # number of columns of a narrow tile; only thin tiles have fewer


PanelFormat = Ordered | IntegerFragments


@dataclass(frozen=True, slots=True)
class BlockProduct(ProductOp):
    """NAME(c, a, b, ...) dims(k, stride, num_rows, num_panels): c[s, i, j] = sum over k of a[i, k] * b_s[k, j], for each of the `sums`
    matrices b_s. If weights have fewer than 16 bits, their scales [num_panels, k / group, columns of a panel] are further operands, and
    `group` is the last dimension. The sum of each group of weights is then multiplied by its scale.

    c is in shared memory, [sums, rows, pitch]. During the products this memory holds the stages: copies of the weights and the rows that
    the next steps along k multiply. So c must have at least `shared_bytes`. a has `num_rows` rows, and each b has `num_panels` panels. If c
    has more rows or columns, the last row or panel is repeated for them.
    """

    threads: ClassVar[int] = WARPS * LANES
    writers: ClassVar[int] = WARPS * LANES  # number of threads that write the elements of the result: the first threads of the block
    accumulator: ClassVar[DType] = DType.F32
    row_dtype: ClassVar[DType] = DType.BF16
    panel_dtype: ClassVar[DType] = DType.BF16
    formats: ClassVar[Mapping[tuple[int, str], PanelFormat]]  # the formats of weights, by bits per weight and kind of numbers
    one_shape: ClassVar[bool] = True  # whether the same instruction multiplies any number of rows
    most_rows: ClassVar[int]  # maximum number of rows of a tile
    least_stages: ClassVar[int]  # minimum number of stages
    thin_columns: ClassVar[tuple[int, ...]] = ()  # numbers of columns less than `NARROW` that a tile may have
    rows_at_once: ClassVar[int]  # maximum number of rows of the result that a thread computes from c before it stores any
    sums: int = 1
    bits: int = 16  # bits per weight
    kind: str = Kind.INT  # the kind of numbers of weights with fewer than 16 bits
    wide_scales: bool = False  # whether scales are f32 instead of bf16
    apart: int = 0  # distance in panels from the first half of the columns to the second; 0: the second half follows the first
    # Whether the tile hides the number of the thread from LLVM. Otherwise LLVM computes all values that depend on this number before the
    # loop over blocks, for all tiles of a kernel, and keeps these values in registers.
    hides_thread: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        holds = self.panel_dtype if self.bits == 16 else DType.E4M3 if self.kind == Kind.E4M3 else DType.U8
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
        if self.rows % EIGHT or not EIGHT <= self.rows <= self.most_rows:
            yield f"rows are {self.rows}, expected a multiple of {EIGHT} up to {self.most_rows}"
        if self.columns < 1 or (self.columns % NARROW and self.columns not in self.thin_columns):
            yield f"columns are {self.columns}, expected a multiple of {NARROW}"
        if (self.bits, self.kind) not in self.formats:
            given, *known = (
                str(bits) if kind == Kind.INT else f"{bits} ({kind})" for bits, kind in ((self.bits, self.kind), *self.formats)
            )
            yield f"bits are {given}, expected {', '.join(known)}"
        elif self.sums < 1 or self.shared_bytes > self.most_bytes or self.stages < self.least_stages:
            wanted = f"{self.sums} sums of {self.rows} rows and {self.columns} columns"
            yield f"{wanted} exceed a block's {self.most_bytes} bytes of shared memory"

    # --- sizes -----------------------------------------------------------------------------------------------------------

    @property
    def most_bytes(self) -> int:
        """The maximum number of bytes of shared memory that the tile may use."""
        raise NotImplementedError

    def heights(self, *, in_groups: bool) -> tuple[int, ...]:
        """Return the numbers of rows, in increasing order, for which a product has tiles of `NARROW` columns. `in_groups` says whether a
        column of weights has several scales, one per group. In that case, an element of the result has two accumulators: one for the
        current group, and one for all groups."""
        raise NotImplementedError

    def widest(self, *, in_groups: bool) -> tuple[int, int]:
        """Return the numbers of rows and columns of the widest tile, which products with many rows use. `in_groups`: see `heights`."""
        return self.heights(in_groups=in_groups)[-1], NARROW if in_groups else 2 * NARROW // self.sums

    def thin(self, length: int, group: int) -> BlockProduct | None:
        """Return a tile of `EIGHT` rows and fewer than `NARROW` columns, for products that other tiles would divide into too few blocks.
        Return None if there is no such tile for sums of `length` elements, in groups of `group`."""
        return None

    @property
    def lone_size(self) -> tuple[int, int] | None:
        """The numbers of rows and columns of a tile for products of few rows and so many columns that narrow tiles would make more blocks
        than can run at once. None if narrow tiles are as fast."""
        return None

    @property
    def format(self) -> PanelFormat:
        return self.formats[self.bits, self.kind]

    def deepened(self, length: int, group: int, *, fills: bool = False, lone: bool = False) -> BlockProduct:
        """Return the best variant of this tile for sums of `length` elements, in groups of `group`. `fills` says whether only one block of
        the kernel runs on a multiprocessor at once, and `lone` whether the tile has the size `lone_size`."""
        return self

    @property
    def step(self) -> int:
        """The number of elements along k in a step, the depth of a line of a panel."""
        return self.format.depth

    @property
    def panel_columns(self) -> int:
        return self.format.columns

    @property
    def pitch(self) -> int:
        """Distance in elements between rows of c. The rows are padded so that lanes that store at the same time use different banks."""
        return self.columns + 4

    @property
    def per_warp(self) -> int:
        """The number of times that each warp multiplies 16 columns, for each of the `sums` matrices."""
        return self.columns // NARROW

    @property
    def warp_rows(self) -> int:
        """The number of rows that a warp multiplies."""
        return self.rows

    @property
    def multiplied_rows(self) -> int:
        """The number of rows of the right operand of an instruction."""
        return self.warp_rows

    @property
    def panel_bytes(self) -> int:
        """The number of bytes of one panel in a step."""
        return self.panel_columns * self.step * self.bits // 8

    @property
    def num_panels(self) -> int:
        """The number of panels that a tile multiplies, for all matrices."""
        return self.sums * self.columns // self.panel_columns

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of all weights in a stage."""
        return self.num_panels * self.panel_bytes

    @property
    def stage_bytes(self) -> int:
        """The number of bytes of a stage."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """The number of stages."""
        raise NotImplementedError

    @property
    def result_bytes(self) -> int:
        """The number of bytes of c."""
        return self.sums * self.rows * self.pitch * 4

    @property
    def shared_bytes(self) -> int:
        """The number of bytes of shared memory that the tile uses."""
        raise NotImplementedError

    # --- meaning ---------------------------------------------------------------------------------------------------------

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, a, *rest), (k, stride, num_rows, num_panels, *groups) = arrays, dims
        rows = np.stack([a[min(i, num_rows - 1) * stride :][:k] for i in range(self.rows)]).astype(np.float64)
        out = c[: self.sums * self.rows * self.pitch].reshape(self.sums, self.rows, self.pitch)
        first, second = np.array_split(np.arange(self.columns // self.panel_columns), 2)
        chosen = np.minimum([*first, *(first + self.apart if self.apart else second)], num_panels - 1)
        format, line = self.format, self.panel_bytes * 8 // max(8, self.bits)
        group = groups[0] if self.has_scales else k
        for number in range(self.sums):
            found = rest[number][: num_panels * k // self.step * line].reshape(num_panels, k // self.step, line)
            weights = format.unpacked(found[chosen]).astype(np.float64)  # [columns, k]
            total = np.zeros((self.rows, self.columns), np.float32)
            scale = np.ones((k // group, self.columns), np.float32)
            if self.has_scales:
                held = rest[self.sums + number][: num_panels * (k // group) * self.panel_columns].reshape(num_panels, k // group, -1)
                scale = held[chosen].swapaxes(0, 1).reshape(k // group, self.columns).astype(np.float32)
            for g, factor in enumerate(scale):
                part = np.zeros_like(total)
                for chunk in self.chunks(group):
                    part = (part + rows[:, g * group + chunk] @ weights[:, g * group + chunk].T).astype(np.float32)
                total = numpy_fma(part, factor, total)
            out[number, :, : self.columns] = total

    def chunks(self, k: int) -> list[Array]:
        """Return, for each instruction in order, the indices along k of the products that it adds up."""
        format = self.formats[16, Kind.INT]
        assert isinstance(format, Fragments)
        return format.chunks(k)


class ProductCode(BlockCode):
    """Emits the code of a product. Every thread of the block runs this code."""

    def __init__(self, op: BlockProduct, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Allocate the accumulators, which begin with 0, and variables for scales. `pointers` and `dims` are those of the tile `op`."""
        super().__init__(code, hides_thread=op.hides_thread)
        self.op = op
        k, self.stride, self.num_rows, self.num_panels, *group = (str(d) for d in dims)
        self.steps = self.divided(k, op.step)
        self.group_steps = self.divided(group[0], op.step) if op.has_scales else self.steps
        self.shared = self.in_shared(pointers[0])
        self.rows, self.panels, self.scales = pointers[1], pointers[2 : 2 + op.sums], pointers[2 + op.sums :]
        self.per_warp = op.sums * op.per_warp
        self.sums = [code.alloca("float") for _ in range(self.per_warp * op.multiplied_rows // EIGHT * 4)]
        self.in_groups = op.has_scales and self.group_steps != self.steps
        count = self.per_warp * op.warp_rows // EIGHT * 4
        self.totals = [code.alloca("float") for _ in range(count)] if self.in_groups else self.sums
        self.read = self.new_scales() if op.has_scales else []
        for total in dict.fromkeys((*self.sums, *self.totals)):
            code.do(f"store float 0.0, ptr {total}, align 4")

    def clamped(self, panel: str) -> str:
        """Return the index of a panel, or the last index if there are fewer panels."""
        return self.code.op(f"call i64 @llvm.smin.i64(i64 {panel}, i64 {self.code.op(f'sub i64 {self.num_panels}, 1')})")

    # --- weights of few bits -------------------------------------------------------------------------------------------

    def eight_bits(self, words: Sequence[str]) -> list[str]:
        """Convert words of a lane with weights of 8 bits to registers: two words to the four registers of an instruction."""
        converted = self._floats if self.op.kind == Kind.E4M3 else self._bytes
        return [converted(word, first) for word in words for first in (0, 2)]

    def four_bits(self, word: str) -> list[str]:
        """Convert a word of a lane with weights of 4 bits to the four registers of an instruction."""
        converted = self._small_floats if self.op.kind == Kind.E2M1 else self._nibbles
        return [converted(word, pair) for pair in (0, 2, 1, 3)]

    def _bytes(self, word: str, first: int) -> str:
        """Convert two bytes to bf16. Putting a byte into the lowest bits of the f32 2^23 gives 2^23 + byte. The difference to 2^23 + offset
        has so few significant bits that the upper half of the f32, a bf16, is exact."""
        wide = [self.code.op(f"call i32 @llvm.nvvm.prmt(i32 {word}, i32 {0x4B000000}, i32 {0x7540 + first + i})") for i in range(2)]
        offset = float_literal(float(2**23 + FRAGMENTS8.offset))
        exact = [self.code.op(f"fsub float {self.code.op(f'bitcast i32 {w} to float')}, {offset}") for w in wide]
        low, high = (self.code.op(f"bitcast float {x} to i32") for x in exact)
        return self.high_halves(low, high)

    def _floats(self, word: str, first: int) -> str:
        """Convert two e4m3 to bf16. If the exponent and the significand of an e4m3 are put in their places in a bf16, the number is too
        small by a factor of 2^120; the product with 2^120 is exact. NaN would become 480, but no weight is NaN: files with NaN are
        refused."""
        code = self.code
        apart = code.op(f"call i32 @llvm.nvvm.prmt(i32 {word}, i32 0, i32 {(first + 1) << 12 | first << 4 | 0x0404})")
        sizes = code.op(f"and i32 {code.op(f'lshr i32 {apart}, 4')}, {0x07F007F0}")
        bits = code.op(f"or i32 {sizes}, {code.op(f'and i32 {apart}, {0x80008000 - 2**32}')}")
        return self._fma(bits, 2.0**120, -0.0)

    def _nibbles(self, word: str, pair: int) -> str:
        """Convert two weights of 4 bits to bf16: the one at bit 4 * pair of the word, and the one 16 bits above it. Putting four bits into
        the lowest bits of the bf16 128 gives 128 + bits. Then 128 and the offset are subtracted. One instruction selects the bits and
        combines them with those of 128; without inline assembly, the assembler would use two."""
        code = self.code
        shifted = word if pair == 0 else code.op(f"lshr i32 {word}, {4 * pair}")
        held = code.op(f'call i32 asm "lop3.b32 $0, $1, {0x000F000F}, $2, 0xEA;", "=r,r,r"(i32 {shifted}, i32 {0x43004300})')
        return self._fma(held, 1.0, -128.0 - FRAGMENTS4.offset)

    def _small_floats(self, word: str, pair: int) -> str:
        """Convert two e2m1 at the places that `_nibbles` names to bf16, doubled. If the exponent and the significand of an e2m1 are put in
        their places in a bf16, the number is the float divided by 2^126; the product with 2^127 is exact."""
        code, parts = self.code, list[str]()
        for distance, mask in ((12 - 4 * pair, 0x80008000 - 2**32), (6 - 4 * pair, 0x01C001C0)):  # for the sign, and for the other bits
            moved = word if distance == 0 else code.op(f"{'shl' if distance > 0 else 'lshr'} i32 {word}, {abs(distance)}")
            parts.append(code.op(f"and i32 {moved}, {mask}"))
        return self._fma(code.op(f"or i32 {parts[0]}, {parts[1]}"), 2.0**127, -0.0)

    def _fma(self, pair: str, factor: float, addend: float) -> str:
        """Multiply each bf16 of a pair by a factor, and add a number."""
        code = self.code
        literals = [f"0xR{np.float32(x).view(np.uint32) >> 16:04X}" for x in (factor, addend)]
        operands = [code.op(f"bitcast i32 {pair} to <2 x bfloat>"), *(f"<bfloat {x}, bfloat {x}>" for x in literals)]
        exact = code.op(f"call <2 x bfloat> @llvm.fma.v2bf16({', '.join(f'<2 x bfloat> {x}' for x in operands)})")
        return code.op(f"bitcast <2 x bfloat> {exact} to i32")

    # --- scales --------------------------------------------------------------------------------------------------------

    def read_scales(self, places: Sequence[tuple[str, str]], group: str) -> None:
        """Begin to read the scales of a group of weights. For each 16 columns that the warp multiplies, `places` has the index of the panel
        and the index in the panel of the lane's first column; the lane's second column is 8 columns further. Nothing waits for the scales
        until the group's sums are complete."""
        op, code = self.op, self.code
        num_groups = code.op(f"udiv i64 {self.steps}, {self.group_steps}")
        kind, num_bytes = self.scale_kind, 4 if op.wide_scales else 2
        scales = iter(self.read)
        line = self.times(group, op.panel_columns * num_bytes)
        for base in self.scales:
            for panel, first in places:
                begin = self.plus(self.times(code.op(f"mul i64 {panel}, {num_groups}"), op.panel_columns), first)
                # The scales of a matrix have less than 4 GB, so an offset within them fits in one register of 32 bits.
                own, near = (code.op(f"trunc i64 {x} to i32") for x in (self.times(begin, num_bytes), line))
                place = self.in_matrix(base, code.op(f"zext i32 {code.op(f'add i32 {own}, {near}')} to i64"))
                for column in (0, EIGHT):
                    place = self.gep(GLOBAL, place, str(column * num_bytes))
                    scale = code.op(f"load {kind}, {GLOBAL} {place}, align {num_bytes}")
                    code.do(f"store {kind} {scale}, ptr {next(scales)}, align {num_bytes}")

    @property
    def scale_kind(self) -> str:
        """LLVM's type of a scale in memory. A bf16 is loaded as an i16."""
        return "float" if self.op.wide_scales else "i16"

    def new_scales(self) -> list[str]:
        """Allocate variables for the scales of a group. LLVM promotes them to registers."""
        return [self.code.alloca(self.scale_kind) for _ in range(2 * self.per_warp)]

    def factors(self) -> list[str]:
        """Return the scales that were read, as f32."""
        if self.op.wide_scales:
            return self.load_floats(self.read)
        code = self.code
        words = [code.op(f"zext i16 {code.op(f'load i16, ptr {place}, align 2')} to i32") for place in self.read]
        # The permutation moves the scale to the upper half. It has a sum as an operand, so that the assembler makes it wait for the scale
        # only after the sum is complete.
        (total,) = self.load_floats(self.sums[:1])
        bits = code.op(f"bitcast float {total} to i32")
        moved = [code.op(f"call i32 @llvm.nvvm.prmt(i32 {word}, i32 {bits}, i32 {0x1022})") for word in words]
        return [code.op(f"bitcast i32 {word} to float") for word in moved]

    def _of_sums(self, factors: Sequence[str]) -> list[str]:
        """Return the factor of each sum of a group."""
        return [factors[2 * (i // (self.op.warp_rows // EIGHT * 4)) + i % 4 // 2] for i in range(len(self.totals))]

    def group_sums(self) -> list[str]:
        """Return the sums of a group."""
        return self.load_floats(self.sums)

    def add_group(self) -> None:
        """Add the sums of a group, times their scales, to the totals, and begin new sums."""
        self.add_scaled(self.group_sums(), self.factors())
        self.clear_sums()

    def add_scaled(self, values: Sequence[str], factors: Sequence[str]) -> None:
        """Add the sums of a group, times their scales, to the totals."""
        code = self.code
        for total, value, factor in zip(self.totals, values, self._of_sums(factors), strict=True):
            old = code.op(f"load float, ptr {total}, align 4")
            code.do(f"store float {multiply_add(code, value, factor, old, 'float', 1)}, ptr {total}, align 4")

    def clear_sums(self) -> None:
        """Begin new sums with 0."""
        self.store_floats(["0.0"] * len(self.sums), self.sums)

    def apply_scales(self) -> None:
        """Multiply the sums by the scales that were read last."""
        values = self.load_floats(self.sums)
        scaled = [self.code.op(f"fmul float {x}, {factor}") for x, factor in zip(values, self._of_sums(self.factors()), strict=True)]
        self.store_floats(scaled, self.sums)

    def begin_group(self, step: str, places: Sequence[tuple[str, str]], wait: Callable[[], None] = lambda: None) -> None:
        """If a group of weights other than the first begins with this step, `wait` for the sums of the group before, add them, and read the
        scales of this group."""
        if not self.in_groups:
            return
        code = self.code
        begins = code.op(f"icmp eq i64 {code.op(f'urem i64 {step}, {self.group_steps}')}, 0")
        is_later = code.op(f"icmp ne i64 {step}, 0")
        with code.when(code.op(f"and i1 {begins}, {is_later}")):
            wait()
            self.add_group()
            self.read_scales(places, code.op(f"udiv i64 {step}, {self.group_steps}"))

    def end_sums(self) -> None:
        """Scale the sums of the last group, or of all weights if there is one group. Weights of 16 bits have no scales."""
        if self.in_groups:
            self.add_group()
        elif self.op.has_scales:
            self.apply_scales()

    # --- results -------------------------------------------------------------------------------------------------------

    def store(self, first: str, distance: int, first_row: str = "0") -> None:
        """Store the accumulators in c. `first` is the first of the columns that this warp multiplies, and `first_row` the first of its
        rows; the next 16 columns begin `distance` columns after `first`. Of each 16 columns by 8 rows, a lane has columns `self.group` and
        `self.group` + 8 of rows 2 * `self.quad` and 2 * `self.quad` + 1."""
        op, code = self.op, self.code
        row = self.times(self.plus(self.times(self.quad, 2), first_row), op.pitch)
        base = self.gep(SHARED, self.shared, self.plus(row, self.plus(first, self.group)), "float")
        totals = iter(self.totals)
        for s in range(op.sums):
            for p in range(op.per_warp):
                for j in range(op.warp_rows // EIGHT):
                    for e in range(4):
                        at = (s * op.rows + EIGHT * j + e % 2) * op.pitch + p * distance + e // 2 * EIGHT
                        value = code.op(f"load float, ptr {next(totals)}, align 4")
                        code.do(f"store float {value}, {SHARED} {self.gep(SHARED, base, str(at), 'float')}, align 4")

    # --- addresses -----------------------------------------------------------------------------------------------------

    def in_stage(self, at: str, base: str) -> str:
        """Return the address `at` bytes after `base`, which is in shared memory."""
        return self.gep(SHARED, base, at)

    def in_matrix(self, base: str, at: str) -> str:
        """Return the address `at` bytes after a generic pointer to global memory."""
        return self.gep(GLOBAL, self.in_global(base), at)
