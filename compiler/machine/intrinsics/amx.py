"""Products on AMX, the matrix unit of x86. A tile register holds 16 rows of 64 bytes.

A product adds a * b to c (product.py). Up to 2 x 2 registers (tmm0 to tmm3) hold the accumulators c during all steps along k. Registers
tmm4 and tmm5 hold rows of a, and tmm6 and tmm7 hold columns of b. `amx_configure` sets the height of the registers of c and a for the tiles
that follow: with fewer than 16 rows, loads then read nothing after the end of a. The process must have asked the operating system for
permission to use the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, TileOp, tile_op
from compiler.llvm.ssa import Code, vector_literal
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.prefetch import prefetch_lines
from compiler.machine.intrinsics.product import LINES_AT_ONCE, MatrixUnitOp, flushed, matrices
from compiler.machine.target import Target

After = Callable[[int], None]  # writes code after a product; the argument is the number of the product within its step

TILE_ROWS, TILE_BYTES = 16, 64
_FIRST, _SECOND, _COLUMNS = (0, 1, 4), (2, 3, 5), (6, 7)  # registers for the first 16 rows, for the other rows, and for columns of b
LINES_OF_SUMS = 4  # cache lines of accumulators that a step prefetches


def _nothing(number: int) -> None:
    """Write no code after a product."""


def configure(code: Code, place: str) -> None:
    """Configure the unit with the 64 bytes at `place`, and release it when the thread has finished its share of the kernel."""
    code.do(f"call void @llvm.x86.ldtilecfg(ptr {place})")
    code.endings["call void @llvm.x86.tilerelease()"] = None


@tile_op
class AmxConfigure(Intrinsic):
    """amx_configure(): set the height of the AMX registers for the tiles that follow.

    A thread releases the unit when it has finished its share of a kernel. Otherwise the operating system would save 8 KB of registers at
    every context switch.
    """

    name: ClassVar[str] = "amx_configure"
    needs: ClassVar[Features] = Features(["amx-tile"])
    rows: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        return ()

    def problems(self) -> Iterator[str]:
        yield from _wrong_rows(self.rows)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        return

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        configure(code, self.configuration(code))

    def configuration(self, code: Code) -> str:
        """Write the configuration of 64 bytes: palette 1 in byte 0, the bytes per row of each register (u16) from byte 16, and the rows of
        each register (u8) from byte 48. Return the address of the configuration."""
        first, *_, last = 2 * _heights(self.rows)
        config = bytearray(64)
        config[0] = 1
        for registers, height in ((_FIRST, first), (_SECOND, last), (_COLUMNS, TILE_ROWS)):
            for register in registers:
                config[16 + 2 * register], config[48 + register] = TILE_BYTES, height
        place = code.alloca("<64 x i8>")
        code.do(f"store <64 x i8> {vector_literal('i8', config)}, ptr {place}, align 64")
        return place


@tile_op
class AmxConfigureRows(Intrinsic):
    """amx_configure_rows() dims(rows): set the height of the AMX registers for tiles of 1 to 32 rows. With at most 16 rows, every register
    of rows or accumulators gets the height `rows`. With more, the registers for the first 16 rows get height 16, and those for the other
    rows get height `rows` - 16."""

    name: ClassVar[str] = "amx_configure_rows"
    needs: ClassVar[Features] = AmxConfigure.needs

    @property
    def operands(self) -> tuple[Operand, ...]:
        return ()

    @property
    def dims(self) -> tuple[str, ...]:
        return ("rows",)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        return

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        place = AmxConfigure(TILE_ROWS).configuration(code)
        others = code.op(f"sub nsw i64 {dims[0]}, {TILE_ROWS}")
        several = code.op(f"icmp sgt i64 {others}, 0")
        heights = [code.op(f"select i1 {several}, i64 {x}, i64 {dims[0]}") for x in (TILE_ROWS, others)]
        for registers, height in zip((_FIRST, _SECOND), heights, strict=True):
            height = code.op(f"trunc i64 {height} to i8")
            for register in registers:
                code.do(f"store i8 {height}, ptr {code.op(f'getelementptr i8, ptr {place}, i64 {48 + register}')}, align 1")
        configure(code, place)


@tile_op
class AmxStayAwake(Intrinsic):
    """amx_stay_awake(): multiply registers without using the result, so that the unit does not fall asleep.

    Measured on Emerald Rapids: after 250 ns without a product, the next one takes 290 ns longer. So code between products uses this tile
    every 100 ns or more often. The tile changes only tmm0, which the next product overwrites before it reads it.
    """

    name: ClassVar[str] = "amx_stay_awake"
    needs: ClassVar[Features] = Features(["amx-bf16"])

    @property
    def operands(self) -> tuple[Operand, ...]:
        return ()

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        return

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        code.do("call void @llvm.x86.tdpbf16ps(i8 0, i8 4, i8 6)")


@dataclass(frozen=True, slots=True)
class _AmxProduct(MatrixUnitOp):
    """amx(c, a, b, later?) dims(k, stride, first?, lines?, height?): a product as in product.py. `?` marks operands and dimensions that
    exist only with `prefetching` or `counted`. A step along k reads 64 bytes of each row of a, so k must be a multiple of the number of
    elements in 64 bytes."""

    product: ClassVar[str]  # name of the instruction
    packed: ClassVar[int]  # number of neighbours along k that share 32 bits

    @property
    def configuration(self) -> TileOp:
        return AmxConfigureRows() if self.counted else AmxConfigure(self.rows)

    def problems(self) -> Iterator[str]:
        yield from _wrong_rows(self.rows)
        if self.columns not in (TILE_ROWS, 2 * TILE_ROWS):
            yield f"columns are {self.columns}, expected {TILE_ROWS} or {2 * TILE_ROWS}"

    def matrices(self, arrays: Sequence[Array], dims: Sequence[int]) -> tuple[Array, Array, Array]:
        """Return the operands as matrices, for the number of rows that the unit is configured for. If the product is `fresh`, clear c."""
        c, a, b = matrices(self, self.packed, arrays[:3], dims[:2], dims[-1] if self.counted else self.rows)
        if self.fresh:
            c[...] = 0
        return c, a, b

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (c, a, b, *later), (k, stride, *share) = pointers, dims[: 4 if self.prefetching else 2]

        def prefetch(step: str) -> After:
            """Emit the prefetches of a step: with `in_block`, accumulators of the next product; with an operand `later`, its lines; with
            neither, lines of the panel, unless the panel is in L1."""
            if self.in_block:
                # Prefetch the accumulators of the block's next product, which follow c in memory, into L1: 256 bytes per step, a quarter of
                # a tile register.
                following = code.op(f"getelementptr [{LINES_OF_SUMS * TILE_BYTES} x i8], ptr {c}, i64 {step}")
                prefetch_lines(code, following, 4 * self.rows * self.columns, LINES_OF_SUMS * TILE_BYTES, far=False)
            if later:
                _prefetch_later(code, later[0], step, *share)
            elif not self.in_block and not self.cached_panel:  # with few rows the product waits for the panel, which is not in a cache
                right = code.op(f"getelementptr [{self.step_bytes} x i8], ptr {b}, i64 {step}")
                prefetch_lines(code, right, 2 * self.step_bytes, self.step_bytes, far=False)
            return _nothing

        with self.accumulators(code, c):
            self.steps(code, *self.rows_at(code, a, stride), b, k, prefetch)

    @contextmanager
    def accumulators(self, code: Code, c: str) -> Generator[None]:
        """Load the accumulators at `c` into registers, or zeros if the product is `fresh`. Store them at `c` when the `with` ends."""
        row_bytes = 4 * self.columns
        places = {
            (i, j): code.op(f"getelementptr i8, ptr {c}, i64 {i * TILE_ROWS * row_bytes + j * TILE_BYTES}")
            for i in range(len(_heights(self.rows)))
            for j in range(self.columns // TILE_ROWS)
        }
        for (i, j), place in places.items():
            begin = f"tilezero(i8 {2 * i + j})" if self.fresh else f"tileloadd64(i8 {2 * i + j}, ptr {place}, i64 {row_bytes})"
            code.do(f"call void @llvm.x86.{begin}")
        yield
        for (i, j), place in places.items():
            code.do(f"call void @llvm.x86.tilestored64(i8 {2 * i + j}, ptr {place}, i64 {row_bytes})")

    def steps(
        self, code: Code, lefts: Sequence[str], row_stride: str, b: str, k: int | str, each: Callable[[str], After] = lambda step: _nothing
    ) -> None:
        """Add all products to the accumulators. `lefts` are the addresses of the first row of each register of rows; rows are `row_stride`
        bytes apart. Between its products, a step loads the operands of the next step, so that products do not wait for the second-level
        cache. `each` writes code before the products of a step, and returns a function that writes code after each product."""
        size = 4 // self.packed
        last = code.op(f"sub nsw i64 {code.op(f'sdiv i64 {k}, {TILE_BYTES // size}')}, 1")
        for j in self.column_blocks:
            self.load_columns(code, j, b)
        for i, left in enumerate(lefts):
            self.load_rows(code, i, left, row_stride)
        with code.loop("0", last) as step:
            after = each(step)
            following = code.op(f"add nsw i64 {step}, 1")
            right = code.op(f"getelementptr [{self.step_bytes} x i8], ptr {b}, i64 {following}")
            for j in self.column_blocks:
                for i, left in enumerate(lefts):
                    self.multiply(code, i, j)
                    if j == self.column_blocks[-1]:
                        self.load_rows(code, i, code.op(f"getelementptr [{TILE_BYTES} x i8], ptr {left}, i64 {following}"), row_stride)
                    after(j * len(lefts) + i)
                self.load_columns(code, j, right)
        after = each(last)
        for j in self.column_blocks:
            for i in range(len(lefts)):
                self.multiply(code, i, j)
                after(j * len(lefts) + i)

    def step(self, code: Code, lefts: Sequence[str], right: str, row_stride: str, after: After = _nothing) -> None:
        """Add the products of one step. `lefts` are the addresses of the first row of each register of rows. `after` writes code after each
        product."""
        for j in self.column_blocks:
            self.load_columns(code, j, right)
        for i, left in enumerate(lefts):
            self.load_rows(code, i, left, row_stride)
            for j in self.column_blocks:
                self.multiply(code, i, j)
                after(i * len(self.column_blocks) + j)

    def rows_at(self, code: Code, a: str, stride: int | str) -> tuple[list[str], str]:
        """Return the address of the first row of each register of rows, and the number of bytes from one row to the next."""
        row_stride = code.op(f"mul nsw i64 {stride}, {4 // self.packed}")
        tops = [code.op(f"mul nsw i64 {row_stride}, {i * TILE_ROWS}") for i in range(len(_heights(self.rows)))]
        return [code.op(f"getelementptr i8, ptr {a}, i64 {top}") for top in tops], row_stride

    @property
    def column_blocks(self) -> range:
        """The numbers of the blocks of 16 columns: 0, or 0 and 1. Register tmm6 holds columns of block 0, and tmm7 columns of block 1."""
        return range(self.columns // TILE_ROWS)

    @property
    def step_bytes(self) -> int:
        """The bytes of the panel that a step reads."""
        return 4 * self.columns * TILE_ROWS

    def load_columns(self, code: Code, j: int, right: str) -> None:
        """Load block `j` of 16 columns from the bytes that a step reads at `right`."""
        place = code.op(f"getelementptr i8, ptr {right}, i64 {j * TILE_BYTES}")
        code.do(f"call void @llvm.x86.tileloadd64(i8 {6 + j}, ptr {place}, i64 {4 * self.columns})")

    def load_rows(self, code: Code, i: int, left: str, row_stride: str) -> None:
        """Load register `i` of rows. `left` is the address of its first row."""
        load = "tileloaddt164" if self.in_block else "tileloadd64"  # t1: the rows do not displace the panel from L1
        code.do(f"call void @llvm.x86.{load}(i8 {4 + i}, ptr {left}, i64 {row_stride})")

    def multiply(self, code: Code, i: int, j: int) -> None:
        """Multiply register `i` of rows by block `j` of columns, and add the product to its accumulator."""
        code.do(f"call void @llvm.x86.{self.product}(i8 {2 * i + j}, i8 {4 + i}, i8 {6 + j})")


@tile_op
class AmxBf16(_AmxProduct):
    """A product of bf16. b is a panel in the order of the format `PAIRS`. In every 32 elements along k, one sum adds up the products of the
    first elements of all pairs, and another sum those of the second elements. A product and its addition are rounded once, together. Then
    the sum of both sums is added to c. Denormals count as zero."""

    name: ClassVar[str] = "amx_bf16"
    needs: ClassVar[Features] = Features(["amx-bf16"])
    product: ClassVar[str] = "tdpbf16ps"
    packed: ClassVar[int] = 2
    accumulator: ClassVar[DType] = DType.F32
    row_dtype: ClassVar[DType] = DType.BF16
    panel_dtype: ClassVar[DType] = DType.BF16

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        c, a, b = self.matrices(arrays, dims)
        a, b = flushed(a.astype(np.float64)), flushed(b.astype(np.float64))
        for start in range(0, len(b), TILE_ROWS):
            halves = np.zeros((2, *c.shape), np.float32)
            for g in range(start, start + TILE_ROWS):
                for half in range(2):
                    halves[half] = flushed(halves[half] + a[:, g, half, None] * b[None, g, :, half])
            c[...] = flushed(flushed(c) + flushed(halves[0] + halves[1]))


@dataclass(frozen=True, slots=True)
class _AmxBytes(_AmxProduct):
    """A product of bytes. Sums are modulo 2^32."""

    needs: ClassVar[Features] = Features(["amx-int8"])
    packed: ClassVar[int] = 4
    accumulator: ClassVar[DType] = DType.I32
    row_dtype: ClassVar[DType] = DType.I8

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        c, a, b = self.matrices(arrays, dims)
        c += np.einsum("rgi,gci->rc", a.astype(np.int32), b.astype(np.int32))


@tile_op
class AmxI8ByU8(_AmxBytes):
    """A product of signed rows by an unsigned panel (compiler/machine/formats.py)."""

    name: ClassVar[str] = "amx_i8_u8"
    product: ClassVar[str] = "tdpbsud"
    panel_dtype: ClassVar[DType] = DType.U8


@tile_op
class AmxI8ByI8(_AmxBytes):
    """A product of signed rows by a signed panel, which the tile `widen_panel` writes."""

    name: ClassVar[str] = "amx_i8_i8"
    product: ClassVar[str] = "tdpbssd"
    panel_dtype: ClassVar[DType] = DType.I8


def _heights(rows: int) -> list[int]:
    """Return the number of rows in each register of rows."""
    return [min(TILE_ROWS, rows - top) for top in range(0, rows, TILE_ROWS)]


def _wrong_rows(rows: int) -> Iterator[str]:
    """Yield a message if no configuration has this number of rows."""
    if not 1 <= rows <= 2 * TILE_ROWS:
        yield f"rows are {rows}, expected 1 to {2 * TILE_ROWS}"


def _prefetch_later(code: Code, place: str, step: str, first: int | str, lines: int | str) -> None:
    """Prefetch one step's share of the operand that is read later, into all caches except L1, which holds the operands of this product."""
    done = code.op(f"add nsw i64 {first}, {code.op(f'mul nsw i64 {step}, {lines}')}")
    begin = code.op(f"getelementptr [{TILE_BYTES} x i8], ptr {place}, i64 {done}")
    with code.loop("0", code.op(f"sdiv i64 {lines}, {LINES_AT_ONCE}")) as some:
        at = code.op(f"getelementptr [{LINES_AT_ONCE * TILE_BYTES} x i8], ptr {begin}, i64 {some}")
        prefetch_lines(code, at, 0, LINES_AT_ONCE * TILE_BYTES, far=True)
