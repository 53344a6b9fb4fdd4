"""Walk and rewrite the loop level.

`walk_*` functions visit a node before its parts. `map_*` functions rewrite the parts first, and return their argument if nothing changed.
A node of an expression may have several users. A function still visits the node once in each expression, or, if the variables in scope
matter, once outside of reductions and once in each reduction that contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

from compiler.ir.dims import Dim, DimLike, DimVar
from compiler.ir.fields import Holds, items, parts
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Fold, Load, Scalar, ScalarParam
from compiler.ir.loops.statements import Seq, Stmt, Store, Tile
from compiler.ir.rebuild import map_items, map_tuple, mapped, remade, updated

N = TypeVar("N")

# --- loop level: reading -----------------------------------------------------------------------------------------------


def statements(stmt: Stmt) -> tuple[Stmt, ...]:
    """Flatten nested sequences into one tuple of statements."""
    if isinstance(stmt, Seq):
        return tuple(s for inner in stmt.stmts for s in statements(inner))
    return (stmt,)


def sequence(stmts: Sequence[Stmt]) -> Stmt:
    """Return a statement that runs the given statements in order."""
    return stmts[0] if len(stmts) == 1 else Seq(tuple(stmts))


def substatements(stmt: Stmt) -> tuple[Stmt, ...]:
    """Return the statements directly inside the statement."""
    return items(stmt, Holds.STMT)


def walk_stmts(stmt: Stmt) -> Iterator[Stmt]:
    """Yield the statement and all statements inside it, in order, outer ones first."""
    yield stmt
    for inner in substatements(stmt):
        yield from walk_stmts(inner)


def subscalars(scalar: Scalar) -> tuple[Scalar, ...]:
    """Return the operands of the scalar that are scalars themselves."""
    return items(scalar, Holds.SCALAR)


def walk_scalar(scalar: Scalar) -> Iterator[Scalar]:
    """Yield the scalar and all scalars inside it, in order, outer ones first, each node once."""
    seen: set[Scalar] = set()
    pending = [scalar]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending.extend(reversed(subscalars(node)))


def inside_out(scalar: Scalar) -> Iterator[Scalar]:
    """Yield the scalar and all scalars inside it, each node once, after the nodes it refers to."""
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
    """Return the depth of the expression: the number of nodes on the longest path from the scalar to a node without operands. `of_load`
    returns how many nodes a load counts for."""
    depths: dict[Scalar, int] = {}
    for node in inside_out(scalar):
        inner = max((depths[i] for i in subscalars(node)), default=0)
        depths[node] = of_load(node) if isinstance(node, Load) else 1 + inner
    return depths[scalar]


def scalars_of(stmt: Stmt) -> tuple[Scalar, ...]:
    """Return the scalars of the statement itself. The operands of a tile are places, not scalars."""
    return items(stmt, Holds.SCALAR)


def walk_scalars(stmt: Stmt) -> Iterator[Scalar]:
    """Yield every scalar in the statement and in those inside it; within one expression, each node once."""
    for s in walk_stmts(stmt):
        for scalar in scalars_of(s):
            yield from walk_scalar(scalar)


def loads(node: Stmt | Scalar) -> Iterator[Load]:
    """Yield the loads in a statement or scalar. The operands of tiles are places, not loads."""
    scalars = walk_scalar(node) if isinstance(node, Scalar) else walk_scalars(node)
    return (s for s in scalars if isinstance(s, Load))


def written_buffers(stmt: Stmt) -> set[Buffer]:
    """Return the buffers to which a store, a tile or an attention in the statement writes."""
    found: set[Buffer] = set()
    for s in walk_stmts(stmt):
        match s:
            case Store(buffer=buffer):
                found.add(buffer)
            case Tile(op=op, operands=operands):
                found.update(place.buffer for place, operand in zip(operands, op.operands, strict=False) if operand.written)
            case Attention(out=out):
                found.add(out)
            case _:
                pass
    return found


def defined_vars(node: Stmt | Scalar) -> tuple[DimVar, ...]:
    """Return the integer variables that the node itself defines."""
    return (*items(node, Holds.NEW_VAR), *(var for var, _ in items(node, Holds.NEW_AXES)))


def bound_dims(stmt: Stmt) -> Iterator[DimVar]:
    """Yield each integer variable once for every place in the statement that defines it."""
    for s in walk_stmts(stmt):
        yield from defined_vars(s)
    for scalar in walk_scalars(stmt):
        yield from defined_vars(scalar)


def free_dims(node: Stmt | Scalar) -> tuple[DimVar, ...]:
    """Return the integer variables that a statement or scalar uses but does not define, in order of first use. Declared ranges of variables
    do not count as uses."""
    found: dict[DimVar, None] = {}
    _free_dims(node, frozenset(), found, set())
    return tuple(found)


def _free_dims(node: Stmt | Scalar, bound: frozenset[DimVar], found: dict[DimVar, None], seen: set[Scalar]) -> None:
    """Collect free variables into `found`. `seen` holds the scalars already visited with the same bound variables."""

    def note(*dims: Dim) -> None:
        found.update((v, None) for dim in dims for v in dim.vars() if v not in bound)

    if isinstance(node, Scalar):
        if node in seen:
            return
        seen.add(node)
    for part in parts(type(node)):
        held = getattr(node, part.name)
        match part.what:
            case Holds.DIM:
                note(*items(node, Holds.DIM))
            case Holds.PLACE:
                for place in held:
                    note(*place.indices)
            case Holds.NEW_BUFFER:
                note(*held.shape)
            case Holds.NEW_VAR:
                bound, seen = bound | {held}, set()
            case Holds.NEW_AXES:
                for var, extent in held:
                    note(extent)
                    bound |= {var}
                seen = set()
            case Holds.SCALAR | Holds.STMT | Holds.NODE:
                for inner in held if isinstance(held, tuple) else (held,):
                    if inner is not None:
                        _free_dims(inner, bound, found, seen)
            case _:
                pass


# --- loop level: rewriting ---------------------------------------------------------------------------------------------

ScalarFn = Callable[[Scalar], Scalar]
StmtFn = Callable[[Stmt], Stmt]


def map_scalar(scalar: Scalar, fn: ScalarFn) -> Scalar:
    """Replace every scalar in the expression by what `fn` returns for it, operands first. Shared nodes stay shared."""
    done: dict[Scalar, Scalar] = {}
    for node in inside_out(scalar):
        done[node] = fn(mapped(node, Holds.SCALAR, done.__getitem__))
    return done[scalar]


def map_stmt(stmt: Stmt, fn: StmtFn) -> Stmt:
    """Replace every statement by what `fn` returns for it, inner ones first."""
    return fn(mapped(stmt, Holds.STMT, lambda s: map_stmt(s, fn)))


def map_scalars(stmt: Stmt, fn: ScalarFn) -> Stmt:
    """Replace every scalar in the statement by what `fn` returns for it, operands first. The operands of tiles stay, since they name
    places, not values."""
    return map_stmt(stmt, lambda s: mapped(s, Holds.SCALAR, lambda scalar: map_scalar(scalar, fn)))


def replace_loads(stmt: Stmt, buffer: Buffer, fn: Callable[[tuple[Dim, ...]], Scalar]) -> Stmt:
    """Replace every load of the buffer by `fn` of its indices. The operands of tiles stay, since they name places, not values."""
    return map_scalars(stmt, lambda s: fn(s.indices) if isinstance(s, Load) and s.buffer is buffer else s)


@overload
def rewrite_dims(node: Stmt, mapping: Mapping[DimVar, DimLike]) -> Stmt: ...
@overload
def rewrite_dims(node: Scalar, mapping: Mapping[DimVar, DimLike]) -> Scalar: ...
def rewrite_dims(node: Stmt | Scalar, mapping: Mapping[DimVar, DimLike]) -> Stmt | Scalar:
    """Substitute integer variables in the node. A variable or buffer that the node defines is replaced by a new one if its upper bound or
    its shape mentions a substituted variable. If the node itself defines a variable of the mapping, the variable is not substituted in the
    scope of that definition."""
    return _Rewriter(mapping, {}).node(node)


@overload
def rename_buffers(node: Stmt, mapping: Mapping[Buffer, Buffer]) -> Stmt: ...
@overload
def rename_buffers(node: Scalar, mapping: Mapping[Buffer, Buffer]) -> Scalar: ...
def rename_buffers(node: Stmt | Scalar, mapping: Mapping[Buffer, Buffer]) -> Stmt | Scalar:
    """Replace buffers in the node, including buffers in the operands of tiles. The indices stay the same."""
    return _Rewriter({}, mapping).node(node) if mapping else node


def substitute(stmt: Stmt, dims: Mapping[DimVar, DimLike], buffers: Mapping[Buffer, Buffer]) -> Stmt:
    """Substitute integer variables and buffers in the statement, as `rewrite_dims` and `rename_buffers` do."""
    return _Rewriter(dims, buffers).stmt(stmt)


def fresh_prim(func: PrimFunc) -> PrimFunc:
    """Copy the function with new integer variables, buffers and scalar parameters. The attributes stay the same."""
    return _Rewriter({}, {}, fresh=True).prim(func)


def _ranges_first(variables: Sequence[DimVar]) -> list[DimVar]:
    """Return the variables in an order in which each comes after those that its range mentions."""
    found: dict[DimVar, None] = {}

    def add(var: DimVar) -> None:
        for other in var.upper.vars() if isinstance(var.upper, Dim) else ():
            if other in variables and other not in found:
                add(other)
        found[var] = None

    for var in variables:
        add(var)
    return list(found)


class _Rewriter:
    """Replaces variables and buffers in statements and scalars. With `fresh`, it copies a function: every variable, buffer and scalar
    parameter that the function defines gets a new one in its place."""

    def __init__(self, dims: Mapping[DimVar, DimLike], buffers: Mapping[Buffer, Buffer], *, fresh: bool = False) -> None:
        self._dims: dict[DimVar, DimLike] = dict(dims)
        self._buffers: dict[Buffer, Buffer] = dict(buffers)
        self._scalars: dict[ScalarParam, ScalarParam] = {}
        self._fresh = fresh  # replace every variable and buffer by a new one
        self._done: dict[Scalar, Scalar] = {}  # rewritten scalars of the present expression, valid while the same variables are in scope
        self._rules: dict[Holds, Callable[[Any], Any]] = {
            Holds.DIM: self.dim,
            Holds.BUFFER: self._buffer,
            Holds.PLACE: self._load,
            Holds.NEW_VAR: self.declare,
            Holds.NEW_AXES: self._axis,
            Holds.NEW_BUFFER: self.declare_buffer,
            Holds.SCALAR: self._scalar,
            Holds.STMT: self.stmt,
            Holds.NODE: self._parts,
        }

    def prim(self, func: PrimFunc) -> PrimFunc:
        for var in _ranges_first(func.dim_vars):
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
        """Return the variable that replaces `var` at its definition, and replace later uses of `var`. Return `var` itself if its range does
        not change."""
        upper = self.dim(var.upper) if isinstance(var.upper, Dim) else var.upper
        if self._fresh or upper is not var.upper:
            self._dims[var] = new = DimVar(var.name, var.lower, upper, var.multiple_of)
            return new
        self._dims.pop(var, None)
        return var

    def declare_buffer(self, buffer: Buffer) -> Buffer:
        """Return the buffer that replaces `buffer` at its definition, and replace later uses. Return `buffer` itself if its shape does not
        change."""
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
        return self._scalar(node) if isinstance(node, Scalar) else self.stmt(node)

    def stmt(self, stmt: Stmt) -> Stmt:
        self._done = {}
        return self._parts(stmt)

    def _scalar(self, scalar: Scalar) -> Scalar:
        done = self._done.get(scalar)
        if done is None:
            done = self._done[scalar] = self._rewritten(scalar)
        return done

    def _rewritten(self, scalar: Scalar) -> Scalar:
        if isinstance(scalar, ScalarParam):
            return self._scalars.get(scalar, scalar)
        if not isinstance(scalar, Fold):
            return self._parts(scalar)
        # start without rewritten scalars: the variable that is bound here may mean something else outside
        outer, self._done = self._done, {}
        new = self._parts(scalar)
        self._done = outer
        return new

    def _parts(self, node: N) -> N:
        """Rewrite every field of the node; scoped fields come after the definitions that they may use."""
        changes: dict[str, Any] = {}
        for part in parts(type(node)):
            held = getattr(node, part.name)
            rule = self._rules[part.what]
            new = map_tuple(held, rule) if part.what is Holds.NEW_AXES else map_items(held, rule)
            if new is not held:
                changes[part.name] = new
        return remade(node, changes)

    def _load(self, load: Load) -> Load:
        return updated(load, buffer=self._buffer(load.buffer), indices=self.dims(load.indices))

    def _buffer(self, buffer: Buffer) -> Buffer:
        return self._buffers.get(buffer, buffer)

    def _axis(self, axis: tuple[DimVar, Dim]) -> tuple[DimVar, Dim]:
        extent, var = self.dim(axis[1]), self.declare(axis[0])
        return axis if var is axis[0] and extent is axis[1] else (var, extent)


def _as_var(dim: DimLike) -> DimVar:
    assert isinstance(dim, DimVar)
    return dim
