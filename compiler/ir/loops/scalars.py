"""Scalars: the expressions of a kernel, with Python operators that build them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.fields import Holds, holds, node
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import COMPARISONS, Fn, ReduceFn
from compiler.ir.op import Registry


class Arithmetic:
    """Python operators on scalars, each of which builds an `Apply`. A Python number gets the type of the other operand; a dimension becomes
    an i64. `==` builds no `Apply`: it returns whether two scalars are the same node. `equal` of write.py builds a comparison of values."""

    __slots__ = ()

    def __add__(self, other: Operand) -> Apply:
        return _binary(Fn.ADD, self, other)

    def __radd__(self, other: Operand) -> Apply:
        return _binary(Fn.ADD, self, other, swapped=True)

    def __sub__(self, other: Operand) -> Apply:
        return _binary(Fn.SUB, self, other)

    def __rsub__(self, other: Operand) -> Apply:
        return _binary(Fn.SUB, self, other, swapped=True)

    def __mul__(self, other: Operand) -> Apply:
        return _binary(Fn.MUL, self, other)

    def __rmul__(self, other: Operand) -> Apply:
        return _binary(Fn.MUL, self, other, swapped=True)

    def __truediv__(self, other: Operand) -> Apply:
        return _binary(Fn.DIV, self, other)

    def __rtruediv__(self, other: Operand) -> Apply:
        return _binary(Fn.DIV, self, other, swapped=True)

    def __floordiv__(self, other: Operand) -> Apply:
        return _binary(Fn.FLOORDIV, self, other)

    def __mod__(self, other: Operand) -> Apply:
        return _binary(Fn.MOD, self, other)

    def __lshift__(self, other: Operand) -> Apply:
        return _binary(Fn.SHL, self, other)

    def __rshift__(self, other: Operand) -> Apply:
        return _binary(Fn.SHR, self, other)

    def __and__(self, other: Operand) -> Apply:
        return _binary(Fn.AND, self, other)

    def __or__(self, other: Operand) -> Apply:
        return _binary(Fn.OR, self, other)

    def __xor__(self, other: Operand) -> Apply:
        return _binary(Fn.XOR, self, other)

    def __lt__(self, other: Operand) -> Apply:
        return _binary(Fn.LT, self, other)

    def __le__(self, other: Operand) -> Apply:
        return _binary(Fn.LE, self, other)

    def __gt__(self, other: Operand) -> Apply:
        return _binary(Fn.LT, self, other, swapped=True)

    def __ge__(self, other: Operand) -> Apply:
        return _binary(Fn.LE, self, other, swapped=True)

    def __neg__(self) -> Apply:
        return Apply(Fn.NEG, (as_scalar(self),))

    def __invert__(self) -> Apply:
        return Apply(Fn.NOT, (as_scalar(self),))

    def __abs__(self) -> Apply:
        return Apply(Fn.ABS, (as_scalar(self),))


@node
class Const(Arithmetic):
    value: float | int | bool
    dtype: DType


@node
class DimScalar(Arithmetic):
    """An index expression as an i64."""

    dim: Dim = holds(Holds.DIM)


@node
class ScalarParam(Arithmetic):
    """A scalar parameter of the function."""

    name: str
    dtype: DType


@node
class Load(Arithmetic):
    """An element of a buffer. Reading outside the buffer is undefined; a `Guard` around the load can prevent it."""

    buffer: Buffer = holds(Holds.BUFFER)
    indices: tuple[Dim, ...] = holds(Holds.DIM)

    def __iadd__(self, other: Operand) -> Apply:
        """Return the sum for `place += other`. If `other` is a product and the place holds floats, the sum is one fused multiply-add."""
        if isinstance(other, Apply) and other.fn is Fn.MUL and self.buffer.dtype.is_float:
            return Apply(Fn.FMA, (*other.args, self))
        return self + other


@dataclass(frozen=True, slots=True, eq=False)
class Format(ABC):
    """A format in which matrices are stored: where the element at index `k` of column `n` is, and how it is decoded.
    compiler/machine/formats.py lists the formats."""

    name: str
    bits: int  # per element
    depth: int  # number of consecutive elements along k that are stored together
    rows: DType  # element type of the rows by which the matrix is multiplied
    dtype: DType  # element type after decoding

    @property
    def num_indices(self) -> int:
        """The number of indices of a place (the load of a stored element), without those that select the matrix."""
        return 3

    def lines(self, k: Dim) -> Dim:
        """Return the number of lines that store the first `k` elements of each column of a panel. If a format does not override this, a
        line has `depth` elements of each column."""
        return k // self.depth

    @abstractmethod
    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        """Return the loads from which the element of column `n` at `k` is decoded. `matrix` has the indices that select one matrix if the
        buffers hold several."""

    @abstractmethod
    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        """Return the element at `k`, decoded from the values stored at its places."""

    def element(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> Element:
        """Return the element of column `n` at `k` as a scalar that is decoded when it is evaluated."""
        return Element(self, k, self.places(buffers, n, k, matrix))


FORMATS: Registry[Format] = Registry("format")


@node
class Element(Arithmetic):
    """The element at `k` of a column of a matrix, decoded from `stored`."""

    format: Format
    k: Dim = holds(Holds.DIM)
    stored: tuple[Scalar, ...] = holds(Holds.SCALAR)

    @property
    def decoded(self) -> Scalar:
        return self.format.decode(self.stored, self.k)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(s.buffer for s in self.stored if isinstance(s, Load))


@node
class Guard(Arithmetic):
    """`value` if all conditions `low <= dim < high` hold, else `otherwise`. `value` is evaluated only if they hold. `otherwise` may be
    evaluated in any case, so it must not fault."""

    conditions: tuple[tuple[Dim, Dim, Dim], ...] = holds(Holds.DIM)  # (low, dim, high)
    value: Scalar = holds(Holds.SCALAR)
    otherwise: Scalar = holds(Holds.SCALAR)


@node
class Apply(Arithmetic):
    """The result of a function of scalars."""

    fn: Fn
    args: tuple[Scalar, ...] = holds(Holds.SCALAR)


@node
class Cast(Arithmetic):
    """A conversion. A float becomes an integer by rounding toward zero; a number beyond the range becomes the end of the range, and NaN
    becomes 0. An integer that does not fit another integer type wraps around. A number that is not 0 becomes True, and 0 becomes False. A
    number becomes a float by rounding to the nearest float, with ties to even."""

    value: Scalar = holds(Holds.SCALAR)
    dtype: DType


@node
class Fold(Arithmetic):
    """Base class of reductions: they visit all combinations of indices of `axes` (variable, extent) in row-major order."""

    axes: tuple[tuple[DimVar, Dim], ...] = holds(Holds.NEW_AXES)


@node
class Reduce(Fold):
    """The reduction of `value` over all combinations of indices of the axes. If there are no combinations, because an extent is 0, the
    result is the identity of `fn`, or 0 for ARGMAX and ARGMIN."""

    fn: ReduceFn
    value: Scalar = holds(Holds.SCALAR, scoped=True)


@node
class Contraction(Fold):
    """An element of a product of matrices: the sum of `rows * columns` over its only axis, in order. Until a schedule replaces the product,
    `rows` reads the left matrix and `columns` the right one."""

    rows: Scalar = holds(Holds.SCALAR, scoped=True)
    columns: Scalar = holds(Holds.SCALAR, scoped=True)

    @property
    def extent(self) -> Dim:
        return self.axes[0][1]

    @property
    def fold(self) -> Reduce:
        """This contraction as a `Reduce`, with the same sum."""
        return Reduce(self.axes, ReduceFn.SUM, Apply(Fn.MUL, (self.rows, self.columns)))


@node
class GroupedContraction(Fold):
    """An element of a matrix product of integers, in which each group of consecutive elements along the contracted axis has a scale: the
    sum over the groups, in order, of `exact(sums) * factor` in f32. The only axis is the index of the group. If there is a `term`, the sum
    begins with the terms of all groups, in order.

    A row consists of one plane of integers, or of two planes of 8-bit integers, which represent 256 * first + second. The sum of plane `i`
    is `begins[i] + dots[i]`, exact in i32. If there are two planes, the first sum is multiplied by 256, and the second sum is added to the
    product where `two_planes` is true. If `two_planes` is None, the second sum is always added.
    """

    dots: tuple[Contraction, ...] = holds(Holds.SCALAR, scoped=True)
    begins: tuple[Scalar, ...] = holds(Holds.SCALAR, scoped=True)  # initial value of each dot's sum, or empty if all sums begin at 0
    factor: Scalar = holds(Holds.SCALAR, scoped=True)
    two_planes: Scalar | None = holds(Holds.SCALAR, scoped=True, default=None)
    term: Scalar | None = holds(Holds.SCALAR, scoped=True, default=None)

    @property
    def fold(self) -> Reduce:
        """This contraction as a `Reduce`, with the same sum: first all terms are added, then all products."""
        sums = [dot + begin for dot, begin in zip(self.dots, self.begins, strict=True)] if self.begins else self.dots
        product = self.exact(sums) * self.factor
        if self.term is None:
            return Reduce(self.axes, ReduceFn.SUM, product)
        part = DimVar("part", 0, Dim.of(1))
        axes = ((part, Dim.of(2)), *self.axes)
        return Reduce(axes, ReduceFn.SUM, Guard(((Dim.of(0), part.dim, Dim.of(1)),), self.term, product))

    def exact(self, sums: Sequence[Scalar]) -> Scalar:
        """Combine the sums of all planes into one f32."""
        first, *second = (Cast(s, DType.F32) for s in sums)
        if not second:
            return first
        return self.joined(
            first, second[0] if self.two_planes is None else Apply(Fn.SELECT, (self.two_planes, second[0], Const(0.0, DType.F32)))
        )

    def joined(self, first: Scalar, second: Scalar) -> Scalar:
        """Return 256 * first + second, the sum of both planes."""
        return Apply(Fn.FMA, (first, Const(256.0, DType.F32), second))


def identity(fn: ReduceFn, dtype: DType) -> Const:
    """Return the value with which a reduction of values of this type begins: the identity of `fn`. For ARGMAX and ARGMIN, return the
    smallest or the largest value of the type, not an index."""
    match fn:
        case ReduceFn.SUM | ReduceFn.ANY:
            value = 0
        case ReduceFn.PROD | ReduceFn.ALL:
            value = 1
        case ReduceFn.MAX | ReduceFn.ARGMAX:
            value = dtype.ends[0]
        case ReduceFn.MIN | ReduceFn.ARGMIN:
            value = dtype.ends[1]
    return Const(float(value) if dtype.is_float else value, dtype)


Scalar = Const | DimScalar | ScalarParam | Load | Element | Guard | Apply | Cast | Reduce | Contraction | GroupedContraction
Operand = Arithmetic | Dim | DimVar | float | int | bool


def as_scalar(value: Operand, dtype: DType = DType.I64) -> Scalar:
    """Convert an operand to a scalar. A Python number becomes a constant of type `dtype`, a dimension becomes an i64, and a scalar stays as
    it is."""
    if isinstance(value, Scalar):
        return value
    if isinstance(value, Dim | DimVar):
        return DimScalar(Dim.of(value))
    assert isinstance(value, float | int | bool), value
    return Const(float(value) if dtype.is_float else value, dtype)


def _binary(fn: Fn, own: Arithmetic, other: Operand, *, swapped: bool = False) -> Apply:
    """Apply `fn` to two operands. If `swapped`, `other` is the first operand."""
    left = as_scalar(own)
    right = as_scalar(other, dtype_of(left))
    return Apply(fn, (right, left) if swapped else (left, right))


def without_cast(scalar: Scalar) -> Scalar:
    """Return the value that a cast converts, or the scalar itself if it is no cast."""
    return scalar.value if isinstance(scalar, Cast) else scalar


def dtype_of(scalar: Scalar) -> DType:
    """Return the element type of a scalar, derived from its operands. The verifier, not this function, checks the types of operands."""
    match scalar:
        case Const(dtype=dtype) | ScalarParam(dtype=dtype) | Cast(dtype=dtype):
            return dtype
        case DimScalar():
            return DType.I64
        case Load(buffer=buffer):
            return buffer.dtype
        case Guard(value=value):
            return dtype_of(value)
        case Apply(fn=fn, args=args):
            if fn in COMPARISONS:
                return DType.BOOL
            if fn is Fn.BITS:
                return DType.I32
            if fn is Fn.OF_BITS:
                return DType.F32
            return dtype_of(args[1] if fn is Fn.SELECT else args[0])
        case Reduce(fn=fn, value=value):
            if fn in (ReduceFn.ARGMAX, ReduceFn.ARGMIN):
                return DType.I64
            return dtype_of(value)
        case Contraction(rows=rows):
            return dtype_of(rows)
        case GroupedContraction():
            return DType.F32
        case Element(format=format):
            return format.dtype
