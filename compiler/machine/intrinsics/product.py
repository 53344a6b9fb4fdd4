"""The operands, dimensions and meaning of tiles that multiply matrices on CPUs. Tiles of GPUs have other operands (block_product.py).

operands  c[rows * columns]    accumulators, row-major
          a                    rows, `stride` elements apart
          b                    a panel of `columns` columns, in a format that the tile names
dims      k, stride

c[i, j] += sum over k of a[i, k] * b[k, j]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, TileOp
from compiler.machine.intrinsics.base import Intrinsic

LINES_AT_ONCE = 2  # cache lines that a step prefetches without a branch between them


@dataclass(frozen=True, slots=True)
class ProductOp(Intrinsic):
    """A product of `rows` rows by `columns` columns. The class variables are the element types of c, a and b; some subclasses accept other
    types of b (`operands`)."""

    accumulator: ClassVar[DType]
    row_dtype: ClassVar[DType]
    panel_dtype: ClassVar[DType]
    rows: int
    columns: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("c", self.accumulator, written=True), Operand("a", self.row_dtype), Operand("b", self.panel_dtype)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k", "stride")


@dataclass(frozen=True, slots=True)
class MatrixUnitOp(ProductOp):
    """A product on a matrix unit, which must be configured first. The unit multiplies faster than caches deliver its operands.

    With `prefetching`, a fourth operand is memory that a later product reads, and dims are (k, stride, first, lines). Each step along k
    prefetches `lines` cache lines of this memory, a multiple of LINES_AT_ONCE; the first step begins at line `first`. With `counted`, the
    last of dims is the number of rows, at most `rows`, for which the unit is configured.
    """

    fresh: bool = False  # the product overwrites c; otherwise it is added to c
    cached_panel: bool = False  # b is in L1, so the product does not prefetch it
    prefetching: bool = False
    counted: bool = False  # the number of rows is known only at run time
    in_block: bool = False  # one of several products with the same panel: rows come from L2, and accumulators of the next follow c

    @property
    def operands(self) -> tuple[Operand, ...]:
        given = Operand("c", self.accumulator, written=True), Operand("a", self.row_dtype), Operand("b", self.panel_dtype)
        return (*given, Operand("later", self.panel_dtype)) if self.prefetching else given

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k", "stride", *(("first", "lines") if self.prefetching else ()), *(("height",) if self.counted else ()))

    @property
    def configuration(self) -> TileOp:
        """The tile that configures the matrix unit for this product. If the product is `counted`, the number of rows is a dimension of this
        tile."""
        raise NotImplementedError


def matrices(
    op: ProductOp, packed: int, arrays: Sequence[Array], dims: Sequence[int], rows: int | None = None
) -> tuple[Array, Array, Array]:
    """Return views of the operands c [rows, columns] and b [k / packed, columns, packed], and a copy of a [rows, k / packed, packed].
    `packed` neighbours along k of a column are adjacent in b. `rows` defaults to those of the operation."""
    (c, a, b), (k, stride), (rows, columns) = arrays, dims, (op.rows if rows is None else rows, op.columns)
    left = np.stack([a[i * stride : i * stride + k] for i in range(rows)])
    panel = b[: k * columns].reshape(k // packed, columns, packed)
    return c[: rows * columns].reshape(rows, columns), left.reshape(rows, k // packed, packed), panel


def flushed(x: Array) -> Array:
    """Return numbers with denormals of f32 replaced by zeros of the same sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x)
