"""Walking and rewriting the loop level.

`walk_*` go outside in; `map_*` rebuild inside out and return the object they were given if nothing changed. Expressions share nodes, so
every function here visits a node once, however many others refer to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import overload

from compiler.ir.dims import Dim, DimLike, DimVar
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
    PrimFunc,
    Reduce,
    Scalar,
    ScalarParam,
    Seq,
    Stmt,
    Store,
    Tile,
    When,
)
from compiler.ir.rebuild import map_tuple, updated

# --- loop level: reading -----------------------------------------------------------------------------------------------


def statements(stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements one after another, sequences inside sequences taken apart."""
    if isinstance(stmt, Seq):
        return tuple(s for inner in stmt.stmts for s in statements(inner))
    return (stmt,)


def sequence(stmts: Sequence[Stmt]) -> Stmt:
    """The statement that runs these in order."""
    return stmts[0] if len(stmts) == 1 else Seq(tuple(stmts))


def substatements(stmt: Stmt) -> tuple[Stmt, ...]:
    match stmt:
        case For(body=body) | Let(body=body) | Allocate(body=body):
            return (body,)
        case When(then=then, orelse=orelse):
            return (then,) if orelse is None else (then, orelse)
        case Seq(stmts=stmts):
            return stmts
        case Store() | Tile():
            return ()


def walk_stmts(stmt: Stmt) -> Iterator[Stmt]:
    """The statement and all inside it, outside in, in order."""
    yield stmt
    for inner in substatements(stmt):
        yield from walk_stmts(inner)


def subscalars(scalar: Scalar) -> tuple[Scalar, ...]:
    match scalar:
        case Const() | DimScalar() | ScalarParam() | Load():
            return ()
        case Guard(value=value, otherwise=otherwise):
            return (value, otherwise)
        case Apply(args=args):
            return args
        case Cast(value=value) | Reduce(value=value):
            return (value,)


def walk_scalar(scalar: Scalar) -> Iterator[Scalar]:
    """The scalar and all inside it, outside in, in order, each node once."""
    seen: set[Scalar] = set()
    pending = [scalar]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending.extend(reversed(subscalars(node)))


def inside_out(scalar: Scalar) -> Iterator[Scalar]:
    """The same nodes, each after those it refers to."""
    done: set[Scalar] = set()
    pending = [scalar]
    while pending:
        node = pending[-1]
        missing = [inner for inner in subscalars(node) if inner not in done]
        if missing:
            pending.extend(reversed(missing))
            continue
        pending.pop()
        if node not in done:
            done.add(node)
            yield node


def scalar_depth(scalar: Scalar, of_load: Callable[[Load], int] = lambda _: 1) -> int:
    """The number of nodes on the longest way inward. A load counts as `of_load` says."""
    depths: dict[Scalar, int] = {}
    for node in inside_out(scalar):
        inner = max((depths[i] for i in subscalars(node)), default=0)
        depths[node] = of_load(node) if isinstance(node, Load) else 1 + inner
    return depths[scalar]


def scalars_of(stmt: Stmt) -> tuple[Scalar, ...]:
    """The scalars that stand in the statement itself. The operands of a tile are places, not scalars."""
    match stmt:
        case Let(value=value) | Store(value=value) | When(cond=value):
            return (value,)
        case For() | Allocate() | Seq() | Tile():
            return ()


def walk_scalars(stmt: Stmt) -> Iterator[Scalar]:
    """Every scalar in the statement and in those inside it; within one expression, each node once."""
    for s in walk_stmts(stmt):
        for scalar in scalars_of(s):
            yield from walk_scalar(scalar)


def loads(node: Stmt | Scalar) -> Iterator[Load]:
    scalars = walk_scalar(node) if isinstance(node, Scalar) else walk_scalars(node)
    return (s for s in scalars if isinstance(s, Load))


def bound_dims(stmt: Stmt) -> Iterator[DimVar]:
    """The integer variables that loops, lets and reductions in the statement define; one is repeated if it is defined repeatedly."""
    for s in walk_stmts(stmt):
        if isinstance(s, For | Let):
            yield s.var
    for scalar in walk_scalars(stmt):
        if isinstance(scalar, Reduce):
            yield from (var for var, _ in scalar.axes)


def free_dims(node: Stmt | Scalar) -> tuple[DimVar, ...]:
    """The integer variables that a piece of the loop level takes from outside, in order of first use."""
    found: dict[DimVar, None] = {}
    if isinstance(node, Scalar):
        _scalar_dims(node, frozenset(), found, set())
    else:
        _stmt_dims(node, frozenset(), found)
    return tuple(found)


def _stmt_dims(stmt: Stmt, bound: frozenset[DimVar], found: dict[DimVar, None]) -> None:
    match stmt:
        case For(var=var, extent=extent, body=body):
            _note((extent,), bound, found)
            _stmt_dims(body, bound | {var}, found)
        case Let(var=var, value=value, body=body):
            _scalar_dims(value, bound, found, set())
            _stmt_dims(body, bound | {var}, found)
        case Store(indices=indices, value=value):
            _note(indices, bound, found)
            _scalar_dims(value, bound, found, set())
        case Allocate(buffer=buffer, body=body):
            _note(buffer.shape, bound, found)
            _stmt_dims(body, bound, found)
        case Tile(operands=operands, dims=dims):
            for operand in operands:
                _note(operand.indices, bound, found)
            _note(dims, bound, found)
        case Seq() | When():
            for scalar in scalars_of(stmt):
                _scalar_dims(scalar, bound, found, set())
            for inner in substatements(stmt):
                _stmt_dims(inner, bound, found)


def _scalar_dims(scalar: Scalar, bound: frozenset[DimVar], found: dict[DimVar, None], seen: set[Scalar]) -> None:
    """`seen` has the nodes that were visited where the same variables are bound."""
    if scalar in seen:
        return
    seen.add(scalar)
    match scalar:
        case DimScalar(dim=dim):
            _note((dim,), bound, found)
        case Load(indices=indices):
            _note(indices, bound, found)
        case Guard(conditions=conditions):
            _note([d for c in conditions for d in c], bound, found)
        case Reduce(axes=axes):
            for var, extent in axes:
                _note((extent,), bound, found)
                bound |= {var}
            seen = set()
        case _:
            pass
    for inner in subscalars(scalar):
        _scalar_dims(inner, bound, found, seen)


def _note(dims: Sequence[Dim], bound: frozenset[DimVar], found: dict[DimVar, None]) -> None:
    for dim in dims:
        found.update((v, None) for v in dim.vars() if v not in bound)


# --- loop level: rewriting ---------------------------------------------------------------------------------------------

ScalarFn = Callable[[Scalar], Scalar]
StmtFn = Callable[[Stmt], Stmt]


def map_scalar(scalar: Scalar, fn: ScalarFn) -> Scalar:
    """`fn` of every scalar, inside out: it sees a scalar whose parts are done. What was shared still is."""
    done: dict[Scalar, Scalar] = {}
    for node in inside_out(scalar):
        match node:
            case Apply(fn=function, args=args):
                parts = tuple([done[a] for a in args])
                new = node if all(map(is_, parts, args)) else Apply(function, parts)
            case Guard(value=value, otherwise=otherwise):
                new = updated(node, value=done[value], otherwise=done[otherwise])
            case Cast(value=value) | Reduce(value=value):
                new = updated(node, value=done[value])
            case Const() | DimScalar() | ScalarParam() | Load():
                new = node
        done[node] = fn(new)
    return done[scalar]


def map_stmt(stmt: Stmt, fn: StmtFn) -> Stmt:
    """`fn` of every statement, inside out."""
    match stmt:
        case For(body=body) | Let(body=body) | Allocate(body=body):
            stmt = updated(stmt, body=map_stmt(body, fn))
        case When(then=then, orelse=orelse):
            stmt = updated(stmt, then=map_stmt(then, fn), orelse=None if orelse is None else map_stmt(orelse, fn))
        case Seq(stmts=stmts):
            stmt = updated(stmt, stmts=map_tuple(stmts, lambda s: map_stmt(s, fn)))
        case Store() | Tile():
            pass
    return fn(stmt)


def map_scalars(stmt: Stmt, fn: ScalarFn) -> Stmt:
    """`fn` of every scalar in the statement, inside out."""

    def rewrite(s: Stmt) -> Stmt:
        match s:
            case Let(value=value) | Store(value=value):
                return updated(s, value=map_scalar(value, fn))
            case When(cond=cond):
                return updated(s, cond=map_scalar(cond, fn))
            case For() | Allocate() | Seq() | Tile():
                return s

    return map_stmt(stmt, rewrite)


def substitute_scalar(scalar: Scalar, mapping: Mapping[ScalarParam, Scalar]) -> Scalar:
    return map_scalar(scalar, lambda s: mapping.get(s, s) if isinstance(s, ScalarParam) else s)


def replace_loads(stmt: Stmt, buffer: Buffer, fn: Callable[[tuple[Dim, ...]], Scalar]) -> Stmt:
    """Every load of the buffer becomes `fn` of its indices. Tiles keep theirs: they name places, not values."""
    return map_scalars(stmt, lambda s: fn(s.indices) if isinstance(s, Load) and s.buffer is buffer else s)


@overload
def rewrite_dims(node: Stmt, mapping: Mapping[DimVar, DimLike]) -> Stmt: ...
@overload
def rewrite_dims(node: Scalar, mapping: Mapping[DimVar, DimLike]) -> Scalar: ...
def rewrite_dims(node: Stmt | Scalar, mapping: Mapping[DimVar, DimLike]) -> Stmt | Scalar:
    """The node in other variables. What is bound inside and declared in terms of a replaced one (a loop up to it, a buffer of its
    length) is declared anew."""
    return _Rewriter(mapping, {}).node(node)


@overload
def rename_buffers(node: Stmt, mapping: Mapping[Buffer, Buffer]) -> Stmt: ...
@overload
def rename_buffers(node: Scalar, mapping: Mapping[Buffer, Buffer]) -> Scalar: ...
def rename_buffers(node: Stmt | Scalar, mapping: Mapping[Buffer, Buffer]) -> Stmt | Scalar:
    """The node with other buffers, at the same indices; the operands of tiles too."""
    return _Rewriter({}, mapping).node(node) if mapping else node


def substitute(stmt: Stmt, dims: Mapping[DimVar, DimLike], buffers: Mapping[Buffer, Buffer]) -> Stmt:
    """The statement in other variables and with other buffers."""
    return _Rewriter(dims, buffers).stmt(stmt)


def fresh_prim(func: PrimFunc) -> PrimFunc:
    """A copy that shares no variable and no buffer with the original."""
    return _Rewriter({}, {}, fresh=True).prim(func)


class _Rewriter:
    def __init__(self, dims: Mapping[DimVar, DimLike], buffers: Mapping[Buffer, Buffer], *, fresh: bool = False) -> None:
        self._dims: dict[DimVar, DimLike] = dict(dims)
        self._buffers: dict[Buffer, Buffer] = dict(buffers)
        self._scalars: dict[ScalarParam, ScalarParam] = {}
        self._fresh = fresh  # declare everything anew
        self._done: dict[Scalar, Scalar] = {}  # of the expression at hand, in the variables that are bound there

    def prim(self, func: PrimFunc) -> PrimFunc:
        for var in func.dim_vars:
            self.declare(var)
        params = tuple(self._param(p) for p in func.params)
        return PrimFunc(params, func.num_outputs, self.stmt(func.body), func.attrs)

    def _param(self, param: Buffer | ScalarParam | DimVar) -> Buffer | ScalarParam | DimVar:
        match param:
            case Buffer():
                return self.declare_buffer(param)
            case ScalarParam(name=name, dtype=dtype):
                return self._scalars.setdefault(param, ScalarParam(name, dtype))
            case DimVar():
                return _as_var(self._dims[param])

    def declare(self, var: DimVar) -> DimVar:
        upper = self.dim(var.upper) if isinstance(var.upper, Dim) else var.upper
        if self._fresh or upper is not var.upper:
            self._dims[var] = new = DimVar(var.name, var.lower, upper, var.multiple_of)
            return new
        self._dims.pop(var, None)
        return var

    def declare_buffer(self, buffer: Buffer) -> Buffer:
        shape = self.dims(buffer.shape)
        if self._fresh or shape is not buffer.shape:
            self._buffers[buffer] = new = replace(buffer, shape=shape)
            return new
        return buffer

    def dim(self, dim: Dim) -> Dim:
        return dim.substitute(self._dims)

    def dims(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return map_tuple(dims, self.dim)

    def node(self, node: Stmt | Scalar) -> Stmt | Scalar:
        return self.scalar(node) if isinstance(node, Scalar) else self.stmt(node)

    def stmt(self, stmt: Stmt) -> Stmt:
        match stmt:
            case For(var=var, extent=extent, body=body):
                return updated(stmt, extent=self.dim(extent), var=self.declare(var), body=self.stmt(body))
            case Let(var=var, value=value, body=body):
                return updated(stmt, value=self.scalar(value), var=self.declare(var), body=self.stmt(body))
            case Store(buffer=buffer, indices=indices, value=value):
                return updated(stmt, buffer=self._buffer(buffer), indices=self.dims(indices), value=self.scalar(value))
            case Seq(stmts=stmts):
                return updated(stmt, stmts=map_tuple(stmts, self.stmt))
            case When(cond=cond, then=then, orelse=orelse):
                other = None if orelse is None else self.stmt(orelse)
                return updated(stmt, cond=self.scalar(cond), then=self.stmt(then), orelse=other)
            case Allocate(buffer=buffer, body=body):
                return updated(stmt, buffer=self.declare_buffer(buffer), body=self.stmt(body))
            case Tile(operands=operands, dims=dims):
                return updated(stmt, operands=map_tuple(operands, self._load), dims=self.dims(dims))

    def scalar(self, scalar: Scalar) -> Scalar:
        """A statement's expression."""
        self._done = {}
        return self._scalar(scalar)

    def _scalar(self, scalar: Scalar) -> Scalar:
        done = self._done.get(scalar)
        if done is None:
            done = self._done[scalar] = self._rewritten(scalar)
        return done

    def _rewritten(self, scalar: Scalar) -> Scalar:
        match scalar:
            case Load():
                return self._load(scalar)
            case Apply(fn=fn, args=args):
                parts = tuple([self._scalar(a) for a in args])
                return scalar if all(map(is_, parts, args)) else Apply(fn, parts)
            case Const():
                return scalar
            case Cast(value=value, dtype=dtype):
                new = self._scalar(value)
                return scalar if new is value else Cast(new, dtype)
            case ScalarParam():
                return self._scalars.get(scalar, scalar)
            case DimScalar(dim=dim):
                return updated(scalar, dim=self.dim(dim))
            case Guard(conditions=conditions, value=value, otherwise=otherwise):
                tests = map_tuple(conditions, self._condition)
                return updated(scalar, conditions=tests, value=self._scalar(value), otherwise=self._scalar(otherwise))
            case Reduce(axes=axes, value=value):
                outer, self._done = self._done, {}  # a variable bound here may have another meaning around it
                new = updated(scalar, axes=map_tuple(axes, self._axis), value=self._scalar(value))
                self._done = outer
                return new

    def _load(self, load: Load) -> Load:
        return updated(load, buffer=self._buffer(load.buffer), indices=self.dims(load.indices))

    def _buffer(self, buffer: Buffer) -> Buffer:
        return self._buffers.get(buffer, buffer)

    def _condition(self, condition: tuple[Dim, Dim, Dim]) -> tuple[Dim, Dim, Dim]:
        low, index, high = mapped = tuple(map(self.dim, condition))
        return condition if all(m is c for m, c in zip(mapped, condition, strict=True)) else (low, index, high)

    def _axis(self, axis: tuple[DimVar, Dim]) -> tuple[DimVar, Dim]:
        extent, var = self.dim(axis[1]), self.declare(axis[0])
        return axis if var is axis[0] and extent is axis[1] else (var, extent)


def _as_var(dim: DimLike) -> DimVar:
    assert isinstance(dim, DimVar)
    return dim
