"""The interpreter of loop nests, in NumPy.

A loop over lanes (LoopKind.VECTOR), and a nest with independent iterations (`_independent`), is evaluated all at once: each loop variable
becomes an array along its own axis. Other loops run one iteration at a time. All arrays have rank 0 or `rank_of(prim)`, so that they
broadcast. Only the arrays of a masked store have rank 1: they hold the points that the mask selects.

A point is a combination of values of the loop variables. An extent is ragged if it differs between iterations of the loops around it.
Evaluating all points at once also evaluates points that the program would skip: beyond a ragged extent, or outside a guard. `active` is the
mask of the points that the program evaluates. An active point that reads or stores outside a buffer is an error. An inactive point may read
any element, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.interpret.rank import rank_of
from compiler.interpret.scalars import MEANING, fold
from compiler.ir.dims import Atom, Dim, DimVar, FloorDiv, Max, Min, Mod
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops import scalars
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar, dtype_of, identity
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.ir.loops.visit import loads
from compiler.ops.attention.plain import plain_attention
from compiler.ops.elementwise import numpy_cast

Array = NDArray[Any]


class InterpretError(CompileError):
    """Raised if the program does something undefined, such as reading outside a buffer, or something that cannot be interpreted, such as a
    tensor that does not fit in memory."""


def run_prim(prim: PrimFunc, args: Sequence[Array | int | float], dims: Mapping[DimVar, int] | None = None) -> None:
    """Run a function on its arguments: arrays (outputs are written in place), numbers for scalar parameters, ints for integer variables.
    `dims` has values of further variables; the extents of the arrays give the values of all other variables. Raise InterpretError if the
    function does something undefined."""
    frame = _Frame(rank_of(prim))
    if dims:
        frame.dims.update(dims)
    for param, arg in zip(prim.params, args, strict=True):
        match param:
            case Buffer():
                assert isinstance(arg, np.ndarray), f"{param.name} is {arg!r}, expected an array"
                frame.buffers[param] = arg
                for dim, extent in zip(param.shape, arg.shape, strict=True):
                    if (var := dim.var) is not None:
                        frame.dims.setdefault(var, extent)
            case scalars.ScalarParam():
                frame.params[param] = np.asarray(arg, param.dtype.numpy)
            case DimVar():
                assert not isinstance(arg, np.ndarray)
                frame.dims[param] = int(arg)
    for buffer, array in frame.buffers.items():
        wanted = tuple(int(frame.dim(d)) for d in buffer.shape)
        if array.shape != wanted or array.dtype != buffer.dtype.numpy:
            raise InterpretError(f"buffer {buffer.name} is {array.dtype}{list(array.shape)}, expected {buffer.dtype}{list(wanted)}")
    for var, value in list(frame.dims.items()):
        frame.check_range(var, np.asarray(value))
    with np.errstate(all="ignore"):
        frame.run(prim.body)


def uninitialised(shape: Sequence[int], dtype: DType) -> Array:
    """Return memory with all bits set, which is NaN in floats, so that a result that depends on this memory is wrong. Raise InterpretError
    if the memory cannot be allocated."""
    try:
        return np.full(prod(shape) * dtype.num_bytes, 0xFF, np.uint8).view(dtype.numpy).reshape(shape)
    except (MemoryError, ValueError, OverflowError):
        raise InterpretError(
            f"a tensor {dtype}{list(shape)} cannot be allocated: an extent is negative, or it does not fit in memory"
        ) from None


class _Frame:
    """The state of one run of a nest."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dims: dict[DimVar, Any] = {}  # value of each variable: an int, or an int64 array of rank `rank`
        self.buffers: dict[Buffer, Array] = {}
        self.params: dict[scalars.ScalarParam, Array] = {}
        self.extents: list[int] = []  # extents of the axes in use
        self.active: Array | None = None  # mask of the points that the program evaluates; None: all
        self.known: dict[Scalar, Array] = {}  # values of the evaluated nodes of the present expression; a node may have several uses

    # --- statements ----------------------------------------------------------------------------------------------------

    def run(self, stmt: Stmt) -> None:
        """Run a statement for all active points."""
        match stmt:
            case Seq(stmts=stmts):
                for s in stmts:
                    self.run(s)
            case For():
                self._loop(stmt)
            case Let(var=var, value=value, body=body):
                self.dims[var] = self._index(var, self.eval(value))
                self.run(body)
                del self.dims[var]
            case Store(buffer=buffer, indices=indices, value=value):
                self._store(buffer, indices, self.eval(value))
            case When(cond=cond, then=then, orelse=orelse):
                self._when(self.eval(cond), then, orelse)
            case Allocate(buffer=buffer, body=body):
                shape = tuple(int(self.dim(d)) for d in buffer.shape)
                counters = buffer.scope is Scope.COUNTERS
                self.buffers[buffer] = np.zeros(shape, buffer.dtype.numpy) if counters else uninitialised(shape, buffer.dtype)
                self.run(body)
                if counters and self.buffers[buffer].any():
                    raise InterpretError(f"counters {buffer.name} are not zero when the launch ends")
            case Tile():
                self._tile(stmt)
            case Attention():
                self.run(plain_attention(stmt))

    def _loop(self, loop: For) -> None:
        """Run a loop, all iterations at once or one after another. Raise InterpretError if iterations must run one after another, but their
        number differs between points."""
        extent = self.dim(loop.extent)
        if not np.any(np.asarray(extent) > 0):
            return  # an empty loop runs nothing, not even the statements that do not depend on its variable
        if loop.kind is LoopKind.VECTOR or _independent(loop, self.buffers):
            with self._axes(((loop.var, extent),)):
                self.run(loop.body)
            return
        if isinstance(extent, np.ndarray):
            raise InterpretError(f"loop {loop.var.name} has an extent that differs between iterations around it")
        for i in range(extent):
            self.dims[loop.var] = i
            self.run(loop.body)

    @contextmanager
    def _axes(self, loops: Sequence[tuple[DimVar, Any]]) -> Generator[Array | None]:
        """Inside the `with`, give each loop variable an array axis of its own. An axis with a ragged extent gets the largest value of
        the extent. Yield a mask of the points that are inside all ragged extents, or None if no extent is ragged."""
        outer, inside = self.active, None
        for var, extent in loops:
            ragged = isinstance(extent, np.ndarray)
            longest = max(0, int(np.max(extent, initial=0) if ragged else extent))
            self.dims[var] = np.arange(longest, dtype=np.int64).reshape(self._shape([1] * len(self.extents) + [longest]))
            self.extents.append(longest)
            if ragged:
                inside = _both(inside, self.dims[var] < extent)
        self.active = _both(outer, inside)
        yield inside
        for var, _ in loops:
            del self.dims[var]
            self.extents.pop()
        self.active = outer

    @contextmanager
    def _narrowed(self, cond: Array) -> Generator[None]:
        """Inside the `with`, only points at which `cond` holds are active."""
        outer, self.active = self.active, _both(self.active, cond)
        with self._branch():
            yield
        self.active = outer

    @contextmanager
    def _branch(self) -> Generator[None]:
        """When the `with` ends, forget the scalars that were evaluated inside it: outside, other points are active, and reduced axes do not
        exist."""
        outer, self.known = self.known, dict(self.known)
        yield
        self.known = outer

    def _when(self, cond: Array, then: Stmt, orelse: Stmt | None) -> None:
        """Run one branch or, if the condition differs between points, each branch at the points for which it is chosen."""
        if cond.ndim == 0:
            if cond:
                self.run(then)
            elif orelse is not None:
                self.run(orelse)
            return
        with self._narrowed(cond):
            self.run(then)
        if orelse is not None:
            with self._narrowed(~cond):
                self.run(orelse)

    def _index(self, var: DimVar, value: Array) -> Any:
        """Return a computed value of an integer variable as an int or an i64 array. Inactive points get the variable's lower bound, which
        is in its range."""
        if value.ndim == 0:
            self.check_range(var, value)
            return int(value)
        if self.active is not None:
            value = np.where(self.active, value, var.lower)
        self.check_range(var, value)
        return value.astype(np.int64)

    def check_range(self, var: DimVar, value: Array) -> None:
        """Raise InterpretError if a variable leaves its declared range at an active point. Proofs about indices rely on this range."""
        upper = self.dim(var.upper) if isinstance(var.upper, Dim) else var.upper
        wrong = (value < var.lower) | (value % var.multiple_of != 0)
        if upper is not None:
            wrong = wrong | (value > upper)
        if self.active is not None:
            wrong = wrong & self.active
        if np.any(wrong):
            worst = np.broadcast_to(value, wrong.shape)[wrong].flat[0]
            declared = f"{var.lower}..{'' if var.upper is None else var.upper}" + (f" by {var.multiple_of}" if var.multiple_of > 1 else "")
            raise InterpretError(f"variable {var.name} is {worst}, outside its declared range {declared}")

    def _store(self, buffer: Buffer, indices: tuple[Dim, ...], value: Array) -> None:
        """Store a value at each active point. Raise InterpretError if an active point stores outside the buffer."""
        array = self.buffers[buffer]
        value = np.asarray(value).astype(array.dtype)
        places = [self.dim(d) for d in indices]
        if self.active is not None:
            *places, value, active = np.broadcast_arrays(*places, value, self.active)
            places, value = [p[active] for p in places], value[active]
        elif self.extents and np.broadcast_shapes(*map(np.shape, places)) != self._shape(self.extents):
            # Broadcast over every axis in use, including axes that the statement does not mention: an empty axis stores nothing.
            *places, value, _ = np.broadcast_arrays(*places, value, np.zeros(self._shape(self.extents)))
        self._check(buffer, places)
        if places:
            array[tuple(places)] = value
        elif value.size:  # a buffer of rank 0 keeps the value of the last iteration
            array[()] = value.reshape(-1)[-1]

    def _tile(self, tile: Tile) -> None:
        """Run the NumPy meaning of a tile. Raise InterpretError if the places of its operands differ between points, or are outside their
        buffers."""
        arrays: list[Array] = []
        for place in tile.operands:
            array, at = self.buffers[place.buffer], [self.dim(d) for d in place.indices]
            if any(isinstance(i, np.ndarray) for i in at):
                raise InterpretError(f"tile {tile.op.name!r} is inside a vector loop")
            self._check(place.buffer, at)
            arrays.append(array.reshape(-1)[np.ravel_multi_index(at, array.shape) if at else 0 :])
        tile.op.meaning(arrays, [int(self.dim(d)) for d in tile.dims])

    # --- scalars -------------------------------------------------------------------------------------------------------

    def eval(self, scalar: Scalar) -> Array:
        """Evaluate a whole expression of a statement."""
        self.known = {}
        return self._eval(scalar)

    def _eval(self, scalar: Scalar) -> Array:
        value = self.known.get(scalar)
        if value is None:
            value = self.known[scalar] = self._compute(scalar)
        return value

    def _compute(self, scalar: Scalar) -> Array:
        match scalar:
            case scalars.Const(value=value, dtype=dtype):
                return np.asarray(value).astype(dtype.numpy)
            case scalars.DimScalar(dim=dim):
                return np.asarray(self.dim(dim), np.int64)
            case scalars.ScalarParam():
                return self.params[scalar]
            case scalars.Load(buffer=buffer, indices=indices):
                return self._load(buffer, indices)
            case scalars.Guard(conditions=conditions, value=value, otherwise=otherwise):
                return self._guard(conditions, value, otherwise)
            case scalars.Apply(fn=fn, args=args):
                return np.asarray(MEANING[fn](*(self._eval(a) for a in args)))
            case scalars.Cast(value=value, dtype=dtype):
                return numpy_cast(self._eval(value), dtype)
            case scalars.Reduce():
                return self._reduce(scalar)
            case scalars.Contraction() | scalars.GroupedContraction():
                return self._eval(scalar.fold)
            case scalars.Element():
                return self._eval(scalar.decoded)

    def _load(self, buffer: Buffer, indices: tuple[Dim, ...]) -> Array:
        """Return the element that each point loads. Inactive points get any element, or zero. Raise InterpretError if an active point reads
        outside the buffer."""
        array = self.buffers[buffer]
        places = [self.dim(d) for d in indices]
        self._check(buffer, places)
        if self.active is None:
            return np.asarray(array[tuple(places)])
        if 0 in array.shape:
            return np.zeros((), array.dtype)  # in an empty buffer, no point is active: otherwise the check would have failed
        return np.asarray(array[tuple(np.clip(p, 0, n - 1) for p, n in zip(places, array.shape, strict=True))])

    def _check(self, buffer: Buffer, places: Sequence[Any]) -> None:
        """Raise InterpretError unless the place of every active point is inside the buffer."""
        for axis, (place, extent) in enumerate(zip(places, self.buffers[buffer].shape, strict=True)):
            if isinstance(place, np.ndarray):
                inside = not place.size or place.view(np.uint64).max() < extent  # as unsigned numbers, negative indices are the largest
            else:
                inside = 0 <= place < extent
            if not inside:
                self._check_active(buffer, axis, np.asarray(place), extent)

    def _check_active(self, buffer: Buffer, axis: int, place: Array, extent: int) -> None:
        """Raise InterpretError if the place of an active point is outside the buffer. Places of rank 1 are only those of active points."""
        outside = (place < 0) | (place >= extent)
        if self.active is not None and (place.ndim == self.rank or not place.ndim):
            outside = outside & self.active
        if np.any(outside):
            worst = np.broadcast_to(place, outside.shape)[outside].flat[0]
            raise InterpretError(f"index {worst} of dimension {axis} of {buffer.name} is outside its extent {extent}")

    def _guard(self, conditions: tuple[tuple[Dim, Dim, Dim], ...], value: Scalar, otherwise: Scalar) -> Array:
        """Return `value` where all conditions hold, and `otherwise` elsewhere. While `value` is evaluated, only points at which all
        conditions hold are active."""
        inside = np.asarray(True)
        for low, dim, high in conditions:
            inside = inside & (self.dim(low) <= self.dim(dim)) & (self.dim(dim) < self.dim(high))
        if inside.ndim == 0:
            return self._eval(value if inside else otherwise)
        with self._narrowed(inside):
            result = self._eval(value)
        return np.where(inside, result, self._eval(otherwise))

    def _reduce(self, reduce: scalars.Reduce) -> Array:
        """Evaluate the reduced value along new axes, and fold these axes. Points beyond a ragged extent count as the neutral element."""
        first, count = len(self.extents), len(reduce.axes)
        dtype = dtype_of(reduce.value)
        neutral = np.asarray(identity(reduce.fn, dtype).value).astype(dtype.numpy)
        with self._axes([(var, self.dim(extent)) for var, extent in reduce.axes]) as inside, self._branch():
            value = self._eval(reduce.value)
            if inside is not None:
                value = np.where(inside, value, neutral)
            extents = self.extents[first:]
        # Broadcast the value to the full extent of every reduced axis, even if it does not mention the axis. Then merge these axes into
        # one, in order.
        shape = list(value.shape or self._shape([]))
        shape[first : first + count] = extents
        value = np.broadcast_to(value.reshape(value.shape or self._shape([])), shape)
        if 0 in extents:
            shape[first : first + count] = [1] * count
            value = np.broadcast_to(neutral, shape)
        else:
            value = value.reshape([*shape[:first], prod(extents), *[1] * (count - 1), *shape[first + count :]])
        value = fold(reduce.fn, value, first)
        return value if first else value.reshape(())

    def _shape(self, extents: Sequence[int]) -> tuple[int, ...]:
        return (*extents, *[1] * (self.rank - len(extents)))

    # --- dimensions ----------------------------------------------------------------------------------------------------

    def dim(self, dim: Dim) -> Any:
        """Return the value of a dimension: an int, or an array if it differs between points. Raise InterpretError if a variable has no
        value, or if a divisor is 0 at an active point."""
        total: Any = 0
        for coefficient, atoms in dim.terms:
            product: Any = coefficient
            for atom in atoms:
                product = product * self._atom(atom)
            total = total + product
        return total

    def _atom(self, atom: Atom) -> Any:
        match atom:
            case DimVar():
                if atom not in self.dims:
                    raise InterpretError(f"variable {atom.name} has no value here")
                return self.dims[atom]
            case FloorDiv(numerator=a, divisor=b):
                return self.dim(a) // self._divisor(b)
            case Mod(numerator=a, divisor=b):
                return self.dim(a) % self._divisor(b)
            case Min(operands=operands):
                return _fold_dims(np.minimum, [self.dim(d) for d in operands])
            case Max(operands=operands):
                return _fold_dims(np.maximum, [self.dim(d) for d in operands])

    def _divisor(self, dim: Dim) -> Any:
        """Return the value of a divisor, with 1 in place of 0 at inactive points. Raise InterpretError if the divisor is 0 at an active
        point."""
        value = self.dim(dim)
        zero = value == 0
        if isinstance(value, np.ndarray) and self.active is not None and not np.any(zero & self.active):
            return np.where(zero, 1, value)
        if np.any(zero) if isinstance(value, np.ndarray) else zero:
            raise InterpretError(f"a dimension is divided by {dim}, which is 0")
        return value


def _fold_dims(fn: Any, values: list[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = fn(result, value)
    return result if isinstance(result, np.ndarray) else int(result)


def _both(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _independent(loop: For, arrays: Mapping[Buffer, Array]) -> bool:
    """Whether all iterations may run at once: the loop contains only loops, Lets and a single store, and no iteration reads what another
    one stores. An iteration may read the element that it stores itself, if no other iteration stores it. `arrays` has the memory of the
    buffers: an operand and the output of an in-place call are one array."""
    stmt: Stmt = loop
    read: list[scalars.Load] = []
    variables: set[DimVar] = set()
    while isinstance(stmt, For | Let):
        if isinstance(stmt, Let):
            read += loads(stmt.value)
        else:
            variables.add(stmt.var)
        stmt = stmt.body
    if not isinstance(stmt, Store):
        return False
    own = [load for load in (*read, *loads(stmt.value)) if arrays[load.buffer] is arrays[stmt.buffer]]
    return not own or (all(load.indices == stmt.indices for load in own) and variables <= {index.var for index in stmt.indices})
