"""The rules of loop-level functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.fields import Holds, items
from compiler.ir.loops import scalars
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import COMPARISONS, Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar, dtype_of
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.ir.loops.visit import scalars_of, subscalars, substatements, walk_stmts, written_buffers
from compiler.ir.prove import prove_lt
from compiler.ir.text.printer import print_scalar
from compiler.ir.text.syntax import ARITY
from compiler.ir.verify.attention import attention_operands_agree, attention_stands_alone
from compiler.ir.verify.graph import Problem

LoopRule = Callable[[PrimFunc], Iterator[Problem]]

_FLOAT_FNS = frozenset(
    (Fn.DIV, Fn.POW, Fn.FMA, Fn.EXP, Fn.EXP2, Fn.LOG, Fn.SQRT, Fn.RSQRT, Fn.TANH, Fn.ERF, Fn.SIN, Fn.COS, Fn.FLOOR, Fn.ROUND)
)
_INT_FNS = frozenset((Fn.FLOORDIV, Fn.MOD, Fn.SHL, Fn.SHR))
_BIT_FNS = frozenset((Fn.AND, Fn.OR, Fn.XOR, Fn.NOT))
_BOOL_FNS = COMPARISONS | {Fn.SELECT} | _BIT_FNS  # functions that accept a bool
_BOOL_FOLDS = frozenset((ReduceFn.ANY, ReduceFn.ALL))


class Site(NamedTuple):
    """A node of a function: a statement, a scalar or an operand of a tile. `stmt` is the statement that contains the node, or the node
    itself if it is a statement. `dims` and `buffers` are the variables and buffers that are visible at the node."""

    node: Stmt | Scalar
    stmt: Stmt
    dims: frozenset[DimVar]
    buffers: frozenset[Buffer]


@lru_cache(maxsize=1)
def sites(func: PrimFunc) -> tuple[Site, ...]:
    """Return all statements, scalars and operands of tiles of a function, each with its scope. The result for the latest function is
    cached, since many rules use it."""
    found: list[Site] = []
    _add_stmt(found, func.body, frozenset(func.dim_vars), frozenset(func.buffers))
    return tuple(found)


def _add_stmt(found: list[Site], stmt: Stmt, dims: frozenset[DimVar], buffers: frozenset[Buffer]) -> None:
    found.append(Site(stmt, stmt, dims, buffers))
    for scalar in scalars_of(stmt):
        _add_scalar(found, scalar, stmt, dims, buffers, set())
    if isinstance(stmt, Tile):
        found += (Site(operand, stmt, dims, buffers) for operand in stmt.operands)
    if isinstance(stmt, For | Let):
        dims |= {stmt.var}
    if isinstance(stmt, Allocate):
        buffers |= {stmt.buffer}
    for inner in substatements(stmt):
        _add_stmt(found, inner, dims, buffers)


def _add_scalar(
    found: list[Site], scalar: Scalar, stmt: Stmt, dims: frozenset[DimVar], buffers: frozenset[Buffer], seen: set[Scalar]
) -> None:
    """Add a scalar of `stmt` and its operands to `found`. `dims` and `buffers` are visible at the scalar. A node with several users in
    this scalar is added once outside of reductions, and once for each reduction that contains it."""
    if scalar in seen:
        return
    seen.add(scalar)
    found.append(Site(scalar, stmt, dims, buffers))
    if isinstance(scalar, scalars.Fold):
        dims |= {var for var, _ in scalar.axes}
        seen = set()
    for inner in subscalars(scalar):
        _add_scalar(found, inner, stmt, dims, buffers, seen)


def _scalars(func: PrimFunc) -> Iterator[tuple[Scalar, Stmt]]:
    """Yield the scalars and the operands of tiles of a function, each with its statement."""
    return ((site.node, site.stmt) for site in sites(func) if isinstance(site.node, Scalar))


# --- signature ---------------------------------------------------------------------------------------------------------


def signature_is_sound(func: PrimFunc) -> Iterator[Problem]:
    if not 0 <= func.num_outputs <= len(func.buffers):
        yield Problem(None, f"num_outputs is {func.num_outputs}, expected 0 to {len(func.buffers)}, the number of buffers")
    for i, param in enumerate(func.params):
        if param in func.params[:i]:
            yield Problem(None, f"parameter {param.name} appears twice in the signature")
        if isinstance(param, Buffer) and param.scope is not Scope.GLOBAL:
            yield Problem(None, f"parameter {param.name} is {param.scope.value} memory, expected global")


def signature_determines_its_dims(func: PrimFunc) -> Iterator[Problem]:
    """A launch passes buffers and integers, so each variable must be a parameter or an extent of a buffer by itself."""
    known = set(func.dim_vars)
    for buffer in func.buffers:
        for var in (v for d in buffer.shape for v in d.vars()):
            if var not in known:
                text = f"dimension {var.name} in the shape of {buffer.name} is neither a parameter nor an extent of a buffer by itself"
                yield Problem(None, f"{text}; add it as a parameter")
    for var in func.dim_vars:
        if isinstance(var.upper, Dim):
            for other in var.upper.vars():
                if other not in known:
                    yield Problem(None, f"the range of {var.name} mentions {other.name}, which the signature does not determine")


def outputs_are_written(func: PrimFunc) -> Iterator[Problem]:
    written = written_buffers(func.body)
    for buffer in func.outputs if func.num_outputs else ():
        if buffer not in written:
            yield Problem(None, f"output {buffer.name} is never written")


# --- scopes ------------------------------------------------------------------------------------------------------------


def dims_are_in_scope(func: PrimFunc) -> Iterator[Problem]:
    for site in sites(func):
        known = set(site.dims)
        for dims, bound in _mentioned(site.node):
            for var in (v for d in dims for v in d.vars()):
                if var not in known:
                    yield Problem(site.stmt, f"dimension {var.name} is not in scope")
            if bound is not None:
                known.add(bound)


def _mentioned(node: Stmt | Scalar) -> Iterator[tuple[tuple[Dim, ...], DimVar | None]]:
    """Yield the dimensions that the node itself mentions, in order, as pairs: dimensions in one scope, and the variable that comes into
    scope after these dimensions, or None."""
    match node:
        case For(extent=extent, var=var):
            yield (extent,), var
            yield _range(var), None
        case Let(var=var):
            yield _range(var), None
        case Store(indices=indices) | scalars.Load(indices=indices):
            yield indices, None
        case Allocate(buffer=buffer):
            yield buffer.shape, None
        case Tile(dims=dims):
            yield dims, None
        case scalars.DimScalar(dim=dim):
            yield (dim,), None
        case scalars.Guard(conditions=conditions):
            yield tuple(d for c in conditions for d in c), None
        case scalars.Fold():
            for var, extent in node.axes:
                yield (extent,), var
                yield _range(var), None
        case scalars.Element(k=k):
            yield (k,), None
        case Seq() | When() | Attention() | scalars.Const() | scalars.ScalarParam() | scalars.Apply() | scalars.Cast():
            return


def _range(var: DimVar) -> tuple[Dim, ...]:
    return (var.upper,) if isinstance(var.upper, Dim) else ()


def variables_are_bound_once(func: PrimFunc) -> Iterator[Problem]:
    """Loops that follow one another may bind the same variable, but nothing inside the scope of a variable may bind it again."""
    for site in sites(func):
        match site.node:
            case For(var=var) | Let(var=var):
                bound = [var]
            case scalars.Fold(axes=axes):
                bound = [var for var, _ in axes]
            case _:
                continue
        for i, var in enumerate(bound):
            if var in site.dims or var in bound[:i]:
                yield Problem(site.stmt, f"variable {var.name} is bound inside its own scope; give the inner one a variable of its own")


def buffers_are_in_scope(func: PrimFunc) -> Iterator[Problem]:
    for site in sites(func):
        for buffer in items(site.node, Holds.BUFFER):
            if buffer not in site.buffers:
                yield Problem(site.stmt, f"buffer {buffer.name} is neither a parameter nor allocated around this place")
        for buffer in items(site.node, Holds.NEW_BUFFER):
            if buffer in site.buffers:
                yield Problem(site.stmt, f"buffer {buffer.name} is allocated inside its own scope")


def scalars_are_parameters(func: PrimFunc) -> Iterator[Problem]:
    for scalar, stmt in _scalars(func):
        if isinstance(scalar, scalars.ScalarParam) and scalar not in func.params:
            yield Problem(stmt, f"scalar {scalar.name} is not a parameter")


def ranks_agree(func: PrimFunc) -> Iterator[Problem]:
    for site in sites(func):
        match site.node:
            case Store(buffer=buffer, indices=indices) | scalars.Load(buffer=buffer, indices=indices):
                if len(indices) != len(buffer.shape):
                    yield Problem(site.stmt, f"{len(indices)} indices for {buffer.name}, which has rank {len(buffer.shape)}")
            case _:
                continue


# --- element types -----------------------------------------------------------------------------------------------------


def operands_have_the_right_number(func: PrimFunc) -> Iterator[Problem]:
    for scalar, stmt in _scalars(func):
        if isinstance(scalar, scalars.Apply) and len(scalar.args) != ARITY[scalar.fn]:
            yield Problem(stmt, f"{scalar.fn.value} takes {ARITY[scalar.fn]} operands; it is called with {len(scalar.args)}")


def numbers_suit_their_type(func: PrimFunc) -> Iterator[Problem]:
    for scalar, stmt in _scalars(func):
        if isinstance(scalar, scalars.Const) and scalar.dtype.is_int and not scalar.dtype.holds(scalar.value):
            yield Problem(stmt, f"{scalar.value} does not fit {scalar.dtype}")


def element_types_agree(func: PrimFunc) -> Iterator[Problem]:
    """Operands have the element types that their node requires, because there are no implicit conversions."""
    for site in sites(func):
        text = ""
        match site.node:
            case Store(buffer=buffer, value=value):
                if dtype_of(value) != buffer.dtype:
                    text = f"{dtype_of(value)} is stored to {buffer.name}, which holds {buffer.dtype}"
            case Let(var=var, value=value):
                if not dtype_of(value).is_int:
                    text = f"{var.name} is {dtype_of(value)}, expected an integer"
            case When(cond=cond):
                if dtype_of(cond) is not DType.BOOL:
                    text = f"the condition is {dtype_of(cond)}, expected bool"
            case scalars.Apply():
                text = _apply_misfit(site.node)
            case scalars.Guard(value=value, otherwise=otherwise):
                if dtype_of(value) != dtype_of(otherwise):
                    text = f"guard chooses between {dtype_of(value)} and {dtype_of(otherwise)}"
            case scalars.Reduce(fn=fn, value=value):
                if (dtype_of(value) is DType.BOOL) != (fn in _BOOL_FOLDS):
                    text = f"{fn.value} folds {dtype_of(value)}, expected {'bool' if fn in _BOOL_FOLDS else 'a number'}"
            case scalars.Contraction():
                text = _contraction_misfit(site.node)
            case scalars.GroupedContraction():
                text = _grouped_misfit(site.node)
            case _:
                pass
        if text:
            line = f" in {print_scalar(site.node)}" if isinstance(site.node, Scalar) else ""
            yield Problem(site.stmt, text + line)


def _contraction_misfit(contraction: scalars.Contraction) -> str:
    """Say which rule the contraction breaks, or return ""."""
    if len(contraction.axes) != 1:
        return f"contract runs over {len(contraction.axes)} axes, expected 1"
    rows, columns = dtype_of(contraction.rows), dtype_of(contraction.columns)
    if rows is not columns:
        return f"contract of {rows} by {columns}; cast them to one type"
    return f"contract of {rows}, expected numbers" if rows is DType.BOOL else ""


def _grouped_misfit(grouped: scalars.GroupedContraction) -> str:
    """Say which rule the contraction breaks, or return ""."""
    dots, begins = grouped.dots, grouped.begins
    if len(dots) not in (1, 2) or len(begins) not in (0, len(dots)) or (grouped.two_planes is not None and len(dots) == 1):
        return f"contract_groups has {len(dots)} sums and {len(begins)} initial values; expected 1 or 2 sums, and as many values or none"
    if any(dtype_of(s) is not DType.I32 for s in (*dots, *begins)):
        return f"contract_groups sums {', '.join(dtype_of(s) for s in (*dots, *begins))}, expected i32"
    if dtype_of(grouped.factor) is not DType.F32:
        return f"contract_groups multiplies by {dtype_of(grouped.factor)}, expected f32"
    if grouped.two_planes is not None and dtype_of(grouped.two_planes) is not DType.BOOL:
        return f"the condition of the second sum of contract_groups is {dtype_of(grouped.two_planes)}, expected bool"
    if grouped.term is not None and dtype_of(grouped.term) is not DType.F32:
        return f"the term of contract_groups is {dtype_of(grouped.term)}, expected f32"
    return ""


def _apply_misfit(apply: scalars.Apply) -> str:
    """Return why the function does not accept operands of these element types, or ""."""
    fn = apply.fn
    dtypes = [dtype_of(a) for a in apply.args]
    if fn is Fn.SELECT and (cond := dtypes.pop(0)) is not DType.BOOL:
        return f"select is decided by {cond}, expected bool"
    if len(set(dtypes)) > 1:
        return f"{fn.value} of {', '.join(dtypes)}; cast them to one type"
    dtype = dtypes[0]
    if fn is Fn.BITS and dtype is not DType.F32:
        return f"{fn.value} of {dtype}, expected f32"
    if fn is Fn.OF_BITS and dtype is not DType.I32:
        return f"{fn.value} of {dtype}, expected i32"
    if fn in _FLOAT_FNS and not dtype.is_float:
        return f"{fn.value} of {dtype}, expected a float"
    if fn in _INT_FNS and not dtype.is_int:
        return f"{fn.value} of {dtype}, expected an integer"
    if fn in _BIT_FNS and dtype.is_float:
        return f"{fn.value} of {dtype}, expected bool or an integer"
    if dtype is DType.BOOL and fn not in _BOOL_FNS:
        return f"{fn.value} of bool, expected a number"
    return ""


def tiles_have_their_operands(func: PrimFunc) -> Iterator[Problem]:
    for stmt in walk_stmts(func.body):
        if isinstance(stmt, Tile):
            yield from (Problem(stmt, f"tile {stmt.op.name}: {text}") for text in _tile_misfits(stmt))


def _tile_misfits(tile: Tile) -> Iterator[str]:
    op, places, dims = tile.op, tile.operands, tile.dims
    yield from op.problems()
    if len(places) != len(op.operands):
        yield f"it has {len(places)} operands, expected {len(op.operands)}: {', '.join(o.name for o in op.operands) or 'none'}"
    if len(dims) != len(op.dims):
        yield f"it has {len(dims)} dimensions, expected {len(op.dims)}: {', '.join(op.dims) or 'none'}"
    for place, operand in zip(places, op.operands, strict=False):
        if operand.dtype not in (None, place.buffer.dtype):
            yield f"{operand.name} is in {place.buffer.name}, which holds {place.buffer.dtype}, expected {operand.dtype}"


# --- loops and memory --------------------------------------------------------------------------------------------------


def lanes_are_counted(func: PrimFunc) -> Iterator[Problem]:
    for stmt in walk_stmts(func.body):
        if isinstance(stmt, For) and stmt.kind in (LoopKind.VECTOR, LoopKind.UNROLL) and not stmt.extent.is_const:
            yield Problem(stmt, f"a {stmt.kind.value} loop has extent {stmt.extent}, expected a constant")


def loops_keep_their_range(func: PrimFunc) -> Iterator[Problem]:
    """Proofs rely on the declared range of a variable, so the range must include every value that the loop or reduction gives the variable.
    A range that is not proved to be too small is accepted."""
    for site in sites(func):
        match site.node:
            case For(var=var, extent=extent):
                axes = ((var, extent),)
            case scalars.Fold(axes=axes):
                pass
            case _:
                continue
        for var, extent in axes:
            low = var.lower > 0
            high = var.upper is not None and prove_lt(var.upper, extent - 1)
            if low or high or (var.multiple_of != 1 and prove_lt(1, extent)):
                yield Problem(site.stmt, f"variable {var.name} runs over 0 .. {extent - 1}, but its declared range is smaller")


def local_memory_has_constant_size(func: PrimFunc) -> Iterator[Problem]:
    """All memory that is not global has constant extents."""
    for stmt in walk_stmts(func.body):
        if isinstance(stmt, Allocate) and stmt.buffer.scope is not Scope.GLOBAL:
            for dim in stmt.buffer.shape:
                if not dim.is_const:
                    yield Problem(stmt, f"{stmt.buffer.scope.value} buffer {stmt.buffer.name} has dimension {dim}, expected a constant")


# The order matters: a rule may rely on the rules before it.
LOOP_RULES: tuple[LoopRule, ...] = (
    signature_is_sound,
    signature_determines_its_dims,
    variables_are_bound_once,
    dims_are_in_scope,
    buffers_are_in_scope,
    scalars_are_parameters,
    ranks_agree,
    operands_have_the_right_number,
    numbers_suit_their_type,
    element_types_agree,
    attention_stands_alone,
    attention_operands_agree,
    tiles_have_their_operands,
    outputs_are_written,
    lanes_are_counted,
    loops_keep_their_range,
    local_memory_has_constant_size,
)
