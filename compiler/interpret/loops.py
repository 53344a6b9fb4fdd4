"""The meaning of loop nests, in NumPy.

A nest whose iterations do not depend on one another (`_independent`) is evaluated all at once: every loop variable becomes an array
along an axis of its own. Other loops run one iteration at a time. All arrays have rank 0 or `_RANK`, so that they broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.interpret.scalars import MEANING, convert, fold, identity
from compiler.ir.dims import Atom, Dim, DimVar, FloorDiv, Max, Min, Mod
from compiler.ir.dtypes import DType
from compiler.ir.loops import (
    Allocate,
    Apply,
    Buffer,
    Cast,
    Const,
    DimScalar,
    For,
    Guard,
    Let,
    Load,
    LoopKind,
    PrimFunc,
    Reduce,
    ReduceFn,
    Scalar,
    ScalarParam,
    Seq,
    Stmt,
    Store,
    Tile,
    When,
    dtype_of,
)

Array = NDArray[Any]
_RANK = 24  # deeper than any nest


class InterpretError(Exception):
    """The program does something undefined, such as reading outside a buffer."""


def run_prim(prim: PrimFunc, args: Sequence[Array | int | float], dims: Mapping[DimVar, int] | None = None) -> None:
    """Run on arrays (outputs included, written in place), numbers for scalar parameters, ints for integer variables."""
    frame = _Frame()
    if dims:
        frame.dims.update(dims)
    for param, arg in zip(prim.params, args, strict=True):
        match param:
            case Buffer():
                assert isinstance(arg, np.ndarray), f"{param.name} wants an array, has {arg!r}"
                frame.buffers[param] = arg
                for dim, extent in zip(param.shape, arg.shape, strict=True):
                    if (var := dim.var) is not None:
                        frame.dims.setdefault(var, extent)
            case ScalarParam():
                frame.params[param] = np.asarray(arg, param.dtype.numpy)
            case DimVar():
                assert not isinstance(arg, np.ndarray)
                frame.dims[param] = int(arg)
    for buffer, array in frame.buffers.items():
        wanted = tuple(int(frame.dim(d)) for d in buffer.shape)
        if array.shape != wanted or array.dtype != buffer.dtype.numpy:
            raise InterpretError(f"buffer {buffer.name} is {array.dtype}{list(array.shape)}, wants {buffer.dtype}{list(wanted)}")
    with np.errstate(all="ignore"):
        frame.run(prim.body)


class _Frame:
    def __init__(self) -> None:
        self.dims: dict[DimVar, Any] = {}  # ints, or int64 arrays of rank _RANK
        self.buffers: dict[Buffer, Array] = {}
        self.params: dict[ScalarParam, Array] = {}
        self.depth = 0  # axes in use
        self.mask: Array | None = None  # where a vectorised statement is active
        self.guarded = 0

    # --- statements ----------------------------------------------------------------------------------------------------

    def run(self, stmt: Stmt) -> None:
        match stmt:
            case Seq(stmts=stmts):
                for s in stmts:
                    self.run(s)
            case For():
                self._loop(stmt)
            case Let(var=var, value=value, body=body):
                self.dims[var] = _as_index(self.eval(value))
                self.run(body)
            case Store(buffer=buffer, indices=indices, value=value):
                self._store(buffer, indices, self.eval(value))
            case When(cond=cond, then=then, orelse=orelse):
                self._when(self.eval(cond), then, orelse)
            case Allocate(buffer=buffer, body=body):
                shape = tuple(int(self.dim(d)) for d in buffer.shape)
                self.buffers[buffer] = np.zeros(shape, buffer.dtype.numpy)
                self.run(body)
            case Tile(intrinsic=name):
                raise InterpretError(f"tile {name!r} has a meaning only after its intrinsic is registered")

    def _loop(self, loop: For) -> None:
        extent = self.dim(loop.extent)
        if loop.kind is LoopKind.VECTOR or _independent(loop):
            previous = self.mask
            self._axis(loop.var, extent)
            self.run(loop.body)
            self.depth -= 1
            self.mask = previous
            del self.dims[loop.var]
            return
        if isinstance(extent, np.ndarray):
            raise InterpretError(f"loop {loop.var.name} has an extent that differs between iterations around it")
        for i in range(extent):
            self.dims[loop.var] = i
            self.run(loop.body)

    def _axis(self, var: DimVar, extent: Any) -> int:
        """Give the variable an axis of its own. A ragged extent runs to its maximum, masked."""
        axis, self.depth = self.depth, self.depth + 1
        longest = int(np.max(extent, initial=0)) if isinstance(extent, np.ndarray) else int(extent)
        shape = [1] * _RANK
        shape[axis] = longest
        self.dims[var] = np.arange(longest, dtype=np.int64).reshape(shape)
        if isinstance(extent, np.ndarray):
            self._narrow(self.dims[var] < extent)
        return axis

    def _narrow(self, cond: Array) -> None:
        self.mask = cond if self.mask is None else self.mask & cond

    def _when(self, cond: Array, then: Stmt, orelse: Stmt | None) -> None:
        if cond.ndim == 0:
            if cond:
                self.run(then)
            elif orelse is not None:
                self.run(orelse)
            return
        previous = self.mask
        self.guarded += 1
        self._narrow(cond)
        self.run(then)
        if orelse is not None:
            self.mask = previous
            self._narrow(~cond)
            self.run(orelse)
        self.guarded -= 1
        self.mask = previous

    def _store(self, buffer: Buffer, indices: tuple[Dim, ...], value: Array) -> None:
        array = self.buffers[buffer]
        value = np.asarray(value).astype(array.dtype)
        places = [np.asarray(self.dim(d)) for d in indices]
        if self.mask is not None:
            *places, value, mask = np.broadcast_arrays(*places, value, self.mask)
            places, value = [p[mask] for p in places], value[mask]
        elif any(p.ndim for p in places):
            *places, value = np.broadcast_arrays(*places, value)
        self._check(buffer, places)
        array[tuple(places)] = value

    def _check(self, buffer: Buffer, places: Sequence[Array]) -> None:
        for axis, (place, extent) in enumerate(zip(places, self.buffers[buffer].shape, strict=True)):
            if place.size and (place.min() < 0 or place.max() >= extent):
                worst = place.min() if place.min() < 0 else place.max()
                raise InterpretError(f"index {worst} of dimension {axis} of {buffer.name} is outside 0..{extent - 1}")

    # --- scalars -------------------------------------------------------------------------------------------------------

    def eval(self, scalar: Scalar) -> Array:
        match scalar:
            case Const(value=value, dtype=dtype):
                return np.asarray(value).astype(dtype.numpy)
            case DimScalar(dim=dim):
                return np.asarray(self.dim(dim), np.int64)
            case ScalarParam():
                return self.params[scalar]
            case Load(buffer=buffer, indices=indices):
                return self._load(buffer, indices)
            case Guard(conditions=conditions, value=value, otherwise=otherwise):
                return self._guard(conditions, value, otherwise)
            case Apply(fn=fn, args=args):
                return np.asarray(MEANING[fn](*(self.eval(a) for a in args)))
            case Cast(value=value, dtype=dtype):
                return convert(self.eval(value), dtype)
            case Reduce():
                return self._reduce(scalar)

    def _load(self, buffer: Buffer, indices: tuple[Dim, ...]) -> Array:
        array = self.buffers[buffer]
        places = [np.asarray(self.dim(d)) for d in indices]
        if self.guarded or self.mask is not None:
            if 0 in array.shape:
                return np.zeros((), array.dtype)
            places = [np.clip(p, 0, n - 1) for p, n in zip(places, array.shape, strict=True)]
        else:
            self._check(buffer, places)
        return np.asarray(array[tuple(places)])

    def _guard(self, conditions: tuple[tuple[Dim, Dim, Dim], ...], value: Scalar, otherwise: Scalar) -> Array:
        inside = np.asarray(True)
        for low, dim, high in conditions:
            inside = inside & (self.dim(low) <= self.dim(dim)) & (self.dim(dim) < self.dim(high))
        if inside.ndim == 0:
            return self.eval(value if inside else otherwise)
        self.guarded += 1
        result = self.eval(value)
        self.guarded -= 1
        return np.where(inside, result, self.eval(otherwise))

    def _reduce(self, reduce: Reduce) -> Array:
        previous, first = self.mask, self.depth
        self.mask = None
        axes = [self._axis(var, self.dim(extent)) for var, extent in reduce.axes]
        if self.mask is not None:
            self.guarded += 1
        value = self.eval(reduce.value)
        dtype = dtype_of(reduce.value)
        if self.mask is not None:
            self.guarded -= 1
            value = np.where(self.mask, value, np.asarray(identity(reduce.fn, dtype)).astype(dtype.numpy))
        value = self._spread(value, reduce, first)
        if 0 in value.shape and reduce.fn not in (ReduceFn.ARGMAX, ReduceFn.ARGMIN):
            value = _pad_empty(value, reduce.fn, dtype)
        for axis in reversed(axes):
            value = fold(reduce.fn, value, axis)
        for var, _ in reduce.axes:
            del self.dims[var]
        self.depth, self.mask = first, previous
        return value if first else value.reshape(())

    def _spread(self, value: Array, reduce: Reduce, first: int) -> Array:
        """Every axis of the reduction at its full extent, also when the value does not mention its variable."""
        shape = list(value.shape) if value.ndim else [1] * _RANK
        for i, (var, _) in enumerate(reduce.axes):
            shape[first + i] = self.dims[var].shape[first + i]
        return np.broadcast_to(value if value.ndim else value.reshape([1] * _RANK), shape)

    # --- dimensions ----------------------------------------------------------------------------------------------------

    def dim(self, dim: Dim) -> Any:
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
                return self.dim(a) // self.dim(b)
            case Mod(numerator=a, divisor=b):
                return self.dim(a) % self.dim(b)
            case Min(operands=operands):
                return _fold_dims(np.minimum, [self.dim(d) for d in operands])
            case Max(operands=operands):
                return _fold_dims(np.maximum, [self.dim(d) for d in operands])


def _fold_dims(fn: Any, values: list[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = fn(result, value)
    return result if isinstance(result, np.ndarray) else int(result)


def _as_index(value: Array) -> Any:
    return int(value) if value.ndim == 0 else value.astype(np.int64)


def _pad_empty(value: Array, fn: ReduceFn, dtype: DType) -> Array:
    shape = [max(1, n) for n in value.shape]
    return np.full(shape, identity(fn, dtype)).astype(dtype.numpy)


def _independent(loop: For) -> bool:
    """Whether the iterations may run all at once: loops down to one store whose buffer the nest does not read."""
    stmt: Stmt = loop
    read: set[Buffer] = set()
    while isinstance(stmt, For | Let):
        if isinstance(stmt, Let):
            _reads(stmt.value, read)
        stmt = stmt.body
    if not isinstance(stmt, Store):
        return False
    _reads(stmt.value, read)
    return stmt.buffer not in read


def _reads(scalar: Scalar, found: set[Buffer]) -> None:
    match scalar:
        case Load(buffer=buffer):
            found.add(buffer)
        case Apply(args=args):
            for arg in args:
                _reads(arg, found)
        case Guard(value=value, otherwise=otherwise):
            _reads(value, found)
            _reads(otherwise, found)
        case Cast(value=value) | Reduce(value=value):
            _reads(value, found)
        case _:
            return
