"""The language in which kernels are written. The Python code has the structure of the loop nest that it builds:

    k = Kernel()
    x, w, out = k.array(x), k.array(w), k.array(out)
    with k.parallel("i", rows) as i:
        acc = k.local("acc", 16)
        with k.vector(16) as lane:
            acc[lane] = 0.0
        with k.serial("r", depth) as r, k.vector(16) as lane:
            acc[lane] += x[i, r] * w[r, lane]      # one fused multiply-add
        with k.vector(16) as lane, k.when(less(lane, columns)):
            out[i, lane] = maximum(acc[lane], 0.0)
    body = k.body()

A `with` opens a block. The variables of `let` and the arrays of the methods that allocate are visible until the end of the enclosing block.
Expressions are scalars of the loop level (scalars.py), which have Python operators; indices are dimensions, which the functions `less` and
`less_equal` compare. The functions at the end of this file build the other expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from compiler.ir.dims import Dim, DimLike, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.scalars import (
    Apply,
    Cast,
    Const,
    Contraction,
    DimScalar,
    GroupedContraction,
    Guard,
    Load,
    Operand,
    Reduce,
    Scalar,
    as_scalar,
    dtype_of,
)
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.ir.loops.visit import sequence
from compiler.ir.prove import prove_le
from compiler.ir.tiles import TileOp

# --- statements --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    """The statements of a block so far. An item that is a function gets the statements after it as one statement, and returns the statement
    that contains them."""

    stmts: list[Stmt | Callable[[Stmt], Stmt]] = field(default_factory=list[Stmt | Callable[[Stmt], Stmt]])

    def close(self) -> Stmt:
        following: list[Stmt] = []
        for item in reversed(self.stmts):
            if callable(item):
                following = [item(_flattened(following))]
            else:
                following.insert(0, item)
        return _flattened(following)


def _flattened(stmts: Sequence[Stmt]) -> Stmt:
    return sequence([inner for stmt in stmts for inner in (stmt.stmts if isinstance(stmt, Seq) else (stmt,))])


class Kernel:
    """Collects the statements of the body of a loop-level function, or of a part of one."""

    def __init__(self) -> None:
        self._blocks = [_Block()]

    def body(self) -> Stmt:
        """Return the body that was written. All blocks must be closed."""
        (block,) = self._blocks
        return block.close()

    def add(self, stmt: Stmt) -> None:
        """Append a statement. An `Array` calls this method when one of its elements is assigned."""
        self._blocks[-1].stmts.append(stmt)

    # --- loops -------------------------------------------------------------------------------------------------------

    def serial(self, name: str, extent: DimLike) -> AbstractContextManager[Dim]:
        return self._loop(name, extent, LoopKind.SERIAL)

    def parallel(self, name: str, extent: DimLike) -> AbstractContextManager[Dim]:
        """Open a loop whose iterations threads claim, in any order."""
        return self._loop(name, extent, LoopKind.PARALLEL)

    def unroll(self, name: str, extent: int) -> AbstractContextManager[Dim]:
        return self._loop(name, extent, LoopKind.UNROLL)

    def vector(self, extent: int, name: str = "l") -> AbstractContextManager[Dim]:
        """Open a loop over the lanes of a vector."""
        return self._loop(name, extent, LoopKind.VECTOR)

    def grid(self, name: str, extent: DimLike) -> AbstractContextManager[Dim]:
        """Open a loop over the blocks of a GPU launch."""
        return self._loop(name, extent, LoopKind.BLOCK)

    def threads(self, name: str, extent: int) -> AbstractContextManager[Dim]:
        """Open a loop over the threads of a GPU block."""
        return self._loop(name, extent, LoopKind.THREAD)

    @contextmanager
    def nest(self, extents: Sequence[DimLike], names: str = "ijklmnpquvwxyz") -> Generator[tuple[Dim, ...]]:
        """Open one serial loop per extent, each inside the one before, and yield their variables. The names are the letters of `names`."""
        with ExitStack() as stack:
            yield tuple(stack.enter_context(self.serial(names[i], extent)) for i, extent in enumerate(extents))

    @contextmanager
    def scope(self) -> Generator[None]:
        """Open a block. Buffers and variables that are defined in the block are not visible after its end."""
        self._open()
        yield
        self.add(self._close())

    @contextmanager
    def _loop(self, name: str, extent: DimLike, kind: LoopKind) -> Generator[Dim]:
        extent = Dim.of(extent)
        var = DimVar(name, 0, extent - 1)
        self._open()
        yield Dim.of(var)
        self.add(For(var, extent, self._close(), kind))

    def _open(self) -> None:
        self._blocks.append(_Block())

    def _close(self) -> Stmt:
        return self._blocks.pop().close()

    # --- conditions --------------------------------------------------------------------------------------------------

    @contextmanager
    def when(self, cond: Operand) -> Generator[None]:
        """Open the block that runs where the condition holds."""
        self._open()
        yield
        self.add(When(as_scalar(cond), self._close()))

    @contextmanager
    def orelse(self) -> Generator[None]:
        """Open the block that runs where the condition of the `when` just before does not hold."""
        before = self._blocks[-1].stmts
        assert before and isinstance(before[-1], When) and before[-1].orelse is None, "orelse must follow a when"
        taken = before[-1]
        self._open()
        yield
        before[-1] = When(taken.cond, taken.then, self._close())

    # --- definitions that are visible until the end of the block -------------------------------------------------------

    def let(self, name: str, value: Operand, upper: DimLike | None = None, *, lower: int = 0, multiple_of: int = 1) -> Dim:
        """Compute an integer once, and return the variable that holds it, for use as an index. lower <= value <= upper must hold (without
        `upper`, there is no upper limit), and `multiple_of` must divide the value. A value that is a variable, a constant dimension or a
        Python integer is returned as a dimension, without a new variable."""
        if isinstance(value, Dim | DimVar | int):
            value = Dim.of(value)
            if value.is_const or value.var is not None:
                return value
        var = DimVar(name, lower, None if upper is None else Dim.of(upper), multiple_of)
        scalar = as_scalar(value)
        self._blocks[-1].stmts.append(lambda rest: Let(var, scalar, rest))
        return Dim.of(var)

    def unravel(self, number: Dim, axes: Sequence[tuple[str, Dim]]) -> tuple[Dim, ...]:
        """Return the indices, one per axis, of the element with this row-major index: the last axis varies fastest. `axes` lists the name
        and extent of each axis. Axes may share a name."""
        point: list[Dim] = []
        for name, extent in reversed(axes):
            extent = Dim.of(1) if prove_le(extent, 0) else extent  # index arithmetic divides by the extent, which must not be 0
            if len(point) == len(axes) - 1:  # the index on the first axis is the remaining quotient
                point.insert(0, self.let(name, number, extent - 1))
            else:
                point.insert(0, self.let(name, number % extent, extent - 1))
                number = number // extent
        return tuple(point)

    def local(self, name: str, *shape: DimLike, dtype: DType = DType.F32) -> Array:
        """Allocate an array in the registers or on the stack of one thread."""
        return self._allocate(name, shape, dtype, Scope.LOCAL)

    def shared(self, name: str, *shape: DimLike, dtype: DType = DType.F32) -> Array:
        """Allocate an array in the on-chip memory of a GPU block."""
        return self._allocate(name, shape, dtype, Scope.SHARED)

    def counters(self, name: str, *shape: DimLike) -> Array:
        """Allocate integers that all blocks of a GPU launch share. The integers are zero when the launch begins, and the kernel must leave
        them zero."""
        return self._allocate(name, shape, DType.I32, Scope.COUNTERS)

    def workspace(self, name: str, *shape: DimLike, dtype: DType = DType.F32) -> Array:
        """Allocate an array in workspace, to which memory planning assigns memory."""
        return self._allocate(name, shape, dtype, Scope.GLOBAL)

    def _allocate(self, name: str, shape: Sequence[DimLike], dtype: DType, scope: Scope) -> Array:
        return self.allocate(Buffer(name, tuple(map(Dim.of, shape)), dtype, scope))

    def allocate(self, buffer: Buffer) -> Array:
        """Allocate this buffer until the end of the block."""
        self._blocks[-1].stmts.append(lambda rest: Allocate(buffer, rest))
        return self.array(buffer)

    # --- memory ------------------------------------------------------------------------------------------------------

    def array(self, buffer: Buffer) -> Array:
        """Wrap a buffer, so that this kernel reads and writes it by indexing."""
        return Array(self, buffer)

    def arrays(self, *buffers: Buffer) -> tuple[Array, ...]:
        return tuple(map(self.array, buffers))

    def tile(self, op: TileOp, *operands: Load, dims: Sequence[DimLike] = ()) -> None:
        """Use an intrinsic. Each operand names the element of a buffer at which the tile starts."""
        self.add(Tile(op, operands, tuple(map(Dim.of, dims))))


@dataclass(frozen=True, slots=True)
class Array:
    """A buffer that a kernel reads and writes by indexing: `a[i, j]` is the load of an element, `a[i, j] = value` adds a store to the
    kernel, and `a[i, j] += b * c` adds a store of a fused multiply-add if the array holds floats."""

    kernel: Kernel
    buffer: Buffer

    def __getitem__(self, indices: DimLike | Sequence[DimLike]) -> Load:
        return Load(self.buffer, _indices(indices))

    def __setitem__(self, indices: DimLike | Sequence[DimLike], value: Operand) -> None:
        self.kernel.add(Store(self.buffer, _indices(indices), as_scalar(value, self.buffer.dtype)))

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.buffer.shape

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype


def _indices(indices: DimLike | Sequence[DimLike]) -> tuple[Dim, ...]:
    return (Dim.of(indices),) if isinstance(indices, Dim | DimVar | int) else tuple(map(Dim.of, indices))


# --- expressions -------------------------------------------------------------------------------------------------------


def const(value: float | int | bool, dtype: DType) -> Const:
    return Const(value, dtype)


def cast(value: Scalar, dtype: DType) -> Scalar:
    """Convert the value, unless it has the type already."""
    return value if dtype_of(value) is dtype else Cast(value, dtype)


def index(dim: DimLike) -> DimScalar:
    """Return an index expression as an i64."""
    return DimScalar(Dim.of(dim))


def less(a: DimLike, b: DimLike) -> Scalar:
    """Return the condition `a < b` on two index expressions."""
    return index(a) < index(b)


def less_equal(a: DimLike, b: DimLike) -> Scalar:
    """Return the condition `a <= b` on two index expressions."""
    return index(a) <= index(b)


def equal(a: Scalar, b: Operand) -> Scalar:
    return Apply(Fn.EQ, (a, as_scalar(b, dtype_of(a))))


def not_equal(a: Scalar, b: Operand) -> Scalar:
    return Apply(Fn.NE, (a, as_scalar(b, dtype_of(a))))


def select(cond: Scalar, a: Scalar, b: Operand) -> Scalar:
    """Return `a` where `cond` holds, else `b`. Both `a` and `b` are evaluated, so neither may fault."""
    return Apply(Fn.SELECT, (cond, a, as_scalar(b, dtype_of(a))))


def fma(a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    """Return a * b + c, rounded once."""
    return Apply(Fn.FMA, (a, b, c))


def maximum(a: Scalar, b: Operand) -> Scalar:
    return Apply(Fn.MAX, (a, as_scalar(b, dtype_of(a))))


def minimum(a: Scalar, b: Operand) -> Scalar:
    return Apply(Fn.MIN, (a, as_scalar(b, dtype_of(a))))


def power(a: Scalar, b: Operand) -> Scalar:
    return Apply(Fn.POW, (a, as_scalar(b, dtype_of(a))))


def exp(x: Scalar) -> Scalar:
    return Apply(Fn.EXP, (x,))


def exp2(x: Scalar) -> Scalar:
    return Apply(Fn.EXP2, (x,))


def log(x: Scalar) -> Scalar:
    return Apply(Fn.LOG, (x,))


def sqrt(x: Scalar) -> Scalar:
    return Apply(Fn.SQRT, (x,))


def rsqrt(x: Scalar) -> Scalar:
    return Apply(Fn.RSQRT, (x,))


def tanh(x: Scalar) -> Scalar:
    return Apply(Fn.TANH, (x,))


def erf(x: Scalar) -> Scalar:
    return Apply(Fn.ERF, (x,))


def sin(x: Scalar) -> Scalar:
    return Apply(Fn.SIN, (x,))


def cos(x: Scalar) -> Scalar:
    return Apply(Fn.COS, (x,))


def floor(x: Scalar) -> Scalar:
    return Apply(Fn.FLOOR, (x,))


def round_half_even(x: Scalar) -> Scalar:
    return Apply(Fn.ROUND, (x,))


def bits_of(x: Scalar) -> Scalar:
    """Return the bits of an f32 as an i32."""
    return Apply(Fn.BITS, (x,))


def of_bits(x: Scalar) -> Scalar:
    """Return the f32 with the bits of an i32."""
    return Apply(Fn.OF_BITS, (x,))


def guard(low: DimLike, dim: DimLike, high: DimLike, value: Scalar, otherwise: Operand) -> Guard:
    """Return the scalar that is `value` if low <= dim < high, else `otherwise`. `value` is evaluated only in range; `otherwise` may be
    evaluated in any case, so it must not fault."""
    return Guard(((Dim.of(low), Dim.of(dim), Dim.of(high)),), value, as_scalar(otherwise, dtype_of(value)))


def fold(fn: ReduceFn, extents: Sequence[DimLike], value: Callable[..., Scalar]) -> Reduce:
    """Reduce `value(r, ...)` over the extents."""
    axes = [DimVar("r" if i == 0 else f"r{i}", 0, Dim.of(e) - 1) for i, e in enumerate(extents)]
    return Reduce(tuple((a, Dim.of(e)) for a, e in zip(axes, extents, strict=True)), fn, value(*map(Dim.of, axes)))


def total(extents: Sequence[DimLike], value: Callable[..., Scalar]) -> Reduce:
    """Return the sum of `value(r, ...)` over the extents."""
    return fold(ReduceFn.SUM, extents, value)


def contract(extent: DimLike, rows: Callable[[Dim], Scalar], columns: Callable[[Dim], Scalar]) -> Contraction:
    """Return an element of a product of matrices: the sum of `rows(r) * columns(r)` over the extent."""
    axis = DimVar("r", 0, Dim.of(extent) - 1)
    return Contraction(((axis, Dim.of(extent)),), rows(axis.dim), columns(axis.dim))


def contract_groups(
    num_groups: DimLike,
    dots: Sequence[Callable[[Dim], Contraction]],
    factor: Callable[[Dim], Scalar],
    *,
    begins: Sequence[Callable[[Dim], Scalar]] = (),
    two_planes: Callable[[Dim], Scalar] | None = None,
    term: Callable[[Dim], Scalar] | None = None,
) -> GroupedContraction:
    """Return an element of a matrix product of integers with a scale per group: the sum over the groups of exact integer sums times a
    factor. Each function takes the index of a group, and returns what the field of the same name in `GroupedContraction` holds for this
    group."""
    var = DimVar("r", 0, Dim.of(num_groups) - 1)
    g, axes = var.dim, ((var, Dim.of(num_groups)),)
    optional = (None if part is None else part(g) for part in (two_planes, term))
    return GroupedContraction(axes, tuple(dot(g) for dot in dots), tuple(begin(g) for begin in begins), factor(g), *optional)


def largest(extents: Sequence[DimLike], value: Callable[..., Scalar]) -> Reduce:
    """Return the largest `value(r, ...)` over the extents."""
    return fold(ReduceFn.MAX, extents, value)


def largest_magnitude(count: DimLike, value: Callable[[Dim], Scalar]) -> Scalar:
    """Return the largest `abs(value(r))`, which is 0 if `count` is 0."""
    found = largest((count,), lambda r: abs(value(r)))
    return found if prove_le(1, count) else maximum(found, 0.0)


def halvings(count: int) -> Iterator[int]:
    """Yield count / 2, count / 4, ... 1, rounded down. If `count` is a power of two, these are the strides of a tree reduction of `count`
    values. Yield nothing if `count` is 1."""
    while count := count // 2:
        yield count
