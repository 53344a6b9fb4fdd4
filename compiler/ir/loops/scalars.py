"""The loop level: what a kernel computes, and, after scheduling, how.

A loop nest starts as mathematics:

    for i in n, j in m {
      C[i, j] = max(contract(r in k) A[i, r] by B[r, j], 0.0)
    }

A reduction is an expression, so fusing is substitution: a producer's right-hand side takes the place of a load. An expression is a graph:
a node that several others refer to is one value, computed once. Text names such values: `let t = exp(A[i, j]) in t * t`.

Indices are `Dim`s, and so are loop variables (`DimVar`); an integer read from memory becomes one through `Let`. Scheduling rewrites nests
into loops of other kinds, explicit accumulators and intrinsic tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.fields import Holds, holds, node
from compiler.ir.op import Registry
from compiler.ir.tiles import TileOp

# --- memory ------------------------------------------------------------------------------------------------------------


class Scope(StrEnum):
    GLOBAL = "global"  # a parameter, or workspace that lifting will make one
    LOCAL = "local"  # registers or stack of one thread: constant size
    SHARED = "shared"  # on-chip memory of a GPU block


@node
class Buffer:
    """A compact row-major array."""

    name: str
    shape: tuple[Dim, ...]
    dtype: DType
    scope: Scope = Scope.GLOBAL


# --- scalars -----------------------------------------------------------------------------------------------------------


class Fn(StrEnum):
    """Functions of scalars. Operands of an arithmetic function have one type, which is the result's; comparisons give bool."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"  # floats only
    FLOORDIV = "floordiv"
    MOD = "mod"
    MIN = "min"  # a NaN operand gives NaN
    MAX = "max"
    POW = "pow"
    FMA = "fma"  # a * b + c, rounded once
    NEG = "neg"
    ABS = "abs"
    EXP = "exp"
    LOG = "log"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    TANH = "tanh"
    ERF = "erf"
    SIN = "sin"
    COS = "cos"
    FLOOR = "floor"
    ROUND = "round"  # half to even
    LT = "lt"
    LE = "le"
    EQ = "eq"
    NE = "ne"
    AND = "and"  # bool, or bitwise on integers
    OR = "or"
    XOR = "xor"
    NOT = "not"
    SHL = "shl"
    SHR = "shr"  # arithmetic on signed, logical on unsigned
    BITS = "bits"  # of an f32, as an i32
    OF_BITS = "of_bits"  # the f32 whose bits an i32 holds
    SELECT = "select"  # cond, a, b; both sides are evaluated, so both must be safe


class ReduceFn(StrEnum):
    """Associative folds with their identities. ARGMAX and ARGMIN give the first index (i64) that attains the extreme."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    ANY = "any"
    ALL = "all"
    ARGMAX = "argmax"
    ARGMIN = "argmin"


class Arithmetic:
    """Scalars compute as they are written: an operator builds an `Apply`. A Python number takes the other operand's type; a
    dimension is an i64. `==` stays identity; write.py has `equal` for values."""

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
    """An index expression as a number (i64)."""

    dim: Dim = holds(Holds.DIM)


@node
class ScalarParam(Arithmetic):
    """A scalar argument of the function."""

    name: str
    dtype: DType


@node
class Load(Arithmetic):
    """Reading outside the buffer is undefined; `Guard` makes it safe."""

    buffer: Buffer = holds(Holds.BUFFER)
    indices: tuple[Dim, ...] = holds(Holds.DIM)

    def __iadd__(self, other: Operand) -> Apply:
        """`place += a * b` is one multiply-add, rounded once, where the place holds floats."""
        if isinstance(other, Apply) and other.fn is Fn.MUL and self.buffer.dtype.is_float:
            return Apply(Fn.FMA, (*other.args, self))
        return self + other


@dataclass(frozen=True, slots=True, eq=False)
class Format(ABC):
    """How a matrix is stored: where an element lies, and how it is decoded. Formats are the rows of compiler/machine/formats.py."""

    name: str
    bits: int  # of an element
    depth: int  # neighbours along k that stand together
    rows: DType  # what the other factor of a product holds
    dtype: DType  # of a decoded element

    @abstractmethod
    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim) -> tuple[Load, ...]:
        """What the element of column `n` at `k` is stored in."""

    @abstractmethod
    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        """The element at `k`, by what it is stored in."""

    def element(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim) -> Element:
        return Element(self, k, self.places(buffers, n, k))


FORMATS: Registry[Format] = Registry("format")


@node
class Element(Arithmetic):
    """The element at `k` of a column of a matrix, by what it is `stored` in."""

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
    """`value` where all conditions `low <= dim < high` hold, else `otherwise`; `value` is not evaluated outside."""

    conditions: tuple[tuple[Dim, Dim, Dim], ...] = holds(Holds.DIM)  # (low, dim, high)
    value: Scalar = holds(Holds.SCALAR)
    otherwise: Scalar = holds(Holds.SCALAR)


@node
class Apply(Arithmetic):
    fn: Fn
    args: tuple[Scalar, ...] = holds(Holds.SCALAR)


@node
class Cast(Arithmetic):
    """To integers: toward zero, saturating. To bool: != 0. To smaller floats: nearest even."""

    value: Scalar = holds(Holds.SCALAR)
    dtype: DType


@node
class Fold(Arithmetic):
    """Scalars that run over all points of `axes` (variable, extent), in row-major order."""

    axes: tuple[tuple[DimVar, Dim], ...] = holds(Holds.NEW_AXES)


@node
class Reduce(Fold):
    """The fold of `value` over all points of the axes; the identity when there are none."""

    fn: ReduceFn
    value: Scalar = holds(Holds.SCALAR, scoped=True)


@node
class Contraction(Fold):
    """An element of a product of matrices: the sum of `rows * columns` over one axis, in its order. `rows` reads the left matrix and
    `columns` the right one, until a schedule takes the product."""

    rows: Scalar = holds(Holds.SCALAR, scoped=True)
    columns: Scalar = holds(Holds.SCALAR, scoped=True)

    @property
    def extent(self) -> Dim:
        return self.axes[0][1]

    @property
    def fold(self) -> Reduce:
        """The same sum as the fold that it means."""
        return Reduce(self.axes, ReduceFn.SUM, Apply(Fn.MUL, (self.rows, self.columns)))


@node
class GroupedContraction(Fold):
    """An element of a product of integers with a scale per group: the sum over groups, in their order, of `exact(sums) * factor` in f32.

    There is a sum per plane of the rows, one or two: `begins[i] + dots[i]`, exact in i32. Of two planes the first counts 256 times; the
    second counts where `two_planes` holds, or everywhere without it."""

    dots: tuple[Contraction, ...] = holds(Holds.SCALAR, scoped=True)
    begins: tuple[Scalar, ...] = holds(Holds.SCALAR, scoped=True)  # one per dot, or none
    factor: Scalar = holds(Holds.SCALAR, scoped=True)
    two_planes: Scalar | None = holds(Holds.SCALAR, scoped=True, default=None)

    @property
    def fold(self) -> Reduce:
        """The same sum as the fold that it means."""
        sums = [dot + begin for dot, begin in zip(self.dots, self.begins, strict=True)] if self.begins else self.dots
        return Reduce(self.axes, ReduceFn.SUM, self.exact(sums) * self.factor)

    def exact(self, sums: Sequence[Scalar]) -> Scalar:
        """Of the sums of all planes."""
        first, *second = (Cast(s, DType.F32) for s in sums)
        if not second:
            return first
        return self.joined(
            first, second[0] if self.two_planes is None else Apply(Fn.SELECT, (self.two_planes, second[0], Const(0.0, DType.F32)))
        )

    def joined(self, first: Scalar, second: Scalar) -> Scalar:
        return Apply(Fn.FMA, (first, Const(256.0, DType.F32), second))


def identity(fn: ReduceFn, dtype: DType) -> Const:
    """What changes nothing when it is folded in."""
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
    """The operand as a scalar; a Python number is of type `dtype`."""
    if isinstance(value, Scalar):
        return value
    if isinstance(value, Dim | DimVar):
        return DimScalar(Dim.of(value))
    assert isinstance(value, float | int | bool), value
    return Const(float(value) if dtype.is_float else value, dtype)


def _binary(fn: Fn, own: Arithmetic, other: Operand, *, swapped: bool = False) -> Apply:
    left = as_scalar(own)
    right = as_scalar(other, dtype_of(left))
    return Apply(fn, (right, left) if swapped else (left, right))


# --- statements --------------------------------------------------------------------------------------------------------


class LoopKind(StrEnum):
    SERIAL = "serial"
    PARALLEL = "parallel"  # iterations are independent: threads claim them
    VECTOR = "vector"  # constant extent: the lanes of one register group
    UNROLL = "unroll"  # constant extent
    BLOCK = "block"  # a GPU's block index
    THREAD = "thread"  # a GPU's thread index


@node
class For:
    """`var` runs over 0 .. extent - 1. A serial loop may carry values through buffers; the other kinds may not."""

    var: DimVar = holds(Holds.NEW_VAR)
    extent: Dim = holds(Holds.DIM)
    body: Stmt = holds(Holds.STMT, scoped=True)
    kind: LoopKind = LoopKind.SERIAL


@node
class Let:
    """An integer becomes a variable that indices can use."""

    var: DimVar = holds(Holds.NEW_VAR)
    value: Scalar = holds(Holds.SCALAR)
    body: Stmt = holds(Holds.STMT, scoped=True)


@node
class Store:
    buffer: Buffer = holds(Holds.BUFFER)
    indices: tuple[Dim, ...] = holds(Holds.DIM)
    value: Scalar = holds(Holds.SCALAR)


@node
class Seq:
    stmts: tuple[Stmt, ...] = holds(Holds.STMT)


@node
class When:
    cond: Scalar = holds(Holds.SCALAR)
    then: Stmt = holds(Holds.STMT)
    orelse: Stmt | None = holds(Holds.STMT, default=None)


@node
class Allocate:
    """A buffer that lives while `body` runs. Global scope: workspace, lifted to a parameter before planning."""

    buffer: Buffer = holds(Holds.NEW_BUFFER)
    body: Stmt = holds(Holds.STMT, scoped=True)


@node
class Tile:
    """One use of an intrinsic. `operands` are places in buffers: the element at which the tile starts."""

    op: TileOp
    operands: tuple[Load, ...] = holds(Holds.PLACE, default=())
    dims: tuple[Dim, ...] = holds(Holds.DIM, default=())


@node
class Paged:
    """Keys and values in the pages of a cache; the layout is that of ops/attention/kv_cache.py."""

    cache: Buffer = holds(Holds.BUFFER)  # [layers, 2, pages, kv_heads, PAGE * size]
    tables: Buffer = holds(Holds.BUFFER)  # [sequences, pages]: the pages of a sequence, in order
    layer: Scalar = holds(Holds.SCALAR)
    scales: Buffer | None = holds(Holds.BUFFER, default=None)  # [layers, 2, pages, kv_heads, PAGE], of an 8-bit cache


@node
class Ragged:
    """Keys and values of sequences that stand one behind the other without padding."""

    keys: Buffer = holds(Holds.BUFFER)  # [tokens, kv_heads, size]
    values: Buffer = holds(Holds.BUFFER)
    starts: Buffer = holds(Holds.BUFFER)  # [sequences + 1]: the first token of each, and the number of tokens


@node
class Attention:
    """`out[t, h]` is the mean of the values that token `t` sees, weighted by exp(score), where

        score = capped(scale * queries[t, h] . key) + bias        capped(x) = softcap * tanh(x / softcap), or x where softcap is 0

    Token `t` belongs to sequence `sequences[t]`, and query head `h` reads kv head `h // (heads / kv_heads)`. With `positions` the mask is
    causal: the token sees the positions up to its own, and with a window only the last `window` of these. Without, it sees its whole
    sequence. A sink is the score of a key that has no value. `bias[h, m + d]` belongs to a key `d` positions behind the query; a distance
    above `m`, in either direction, counts as `m`.

    It is the whole body of its function until a schedule takes its place. Its meaning is ops/attention/plain.py.
    """

    queries: Buffer = holds(Holds.BUFFER)  # [tokens, heads, size]
    keys: Paged | Ragged = holds(Holds.NODE)
    sequences: Buffer = holds(Holds.BUFFER)  # [tokens]
    out: Buffer = holds(Holds.BUFFER)  # [tokens, heads, size]
    scale: float
    positions: Buffer | None = holds(Holds.BUFFER, default=None)  # [tokens]
    window: int = 0
    softcap: float = 0.0
    sinks: Buffer | None = holds(Holds.BUFFER, default=None)  # [heads]
    bias: Buffer | None = holds(Holds.BUFFER, default=None)  # [heads, 2 * m + 1]


Stmt = For | Let | Store | Seq | When | Allocate | Tile | Attention


@node
class PrimFunc:
    """Parameters in order: buffers, scalars and integer variables; the last `num_outputs` buffers are written. Variables that stand
    alone in a buffer's shape are defined by it, the others must be parameters."""

    params: tuple[Buffer | ScalarParam | DimVar, ...]
    num_outputs: int
    body: Stmt
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(p for p in self.params if isinstance(p, Buffer))

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return self.buffers[len(self.buffers) - self.num_outputs :]

    @property
    def dim_vars(self) -> tuple[DimVar, ...]:
        """The variables of the signature: passed ones first, then those that shapes define, in order."""
        passed = [p for p in self.params if isinstance(p, DimVar)]
        shaped = [v for b in self.buffers for d in b.shape if (v := d.var) is not None]
        return tuple(dict.fromkeys(passed + shaped))


# --- types of scalars --------------------------------------------------------------------------------------------------

COMPARISONS = frozenset({Fn.LT, Fn.LE, Fn.EQ, Fn.NE})


def dtype_of(scalar: Scalar) -> DType:
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
