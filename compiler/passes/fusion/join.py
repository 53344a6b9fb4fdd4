"""Join two calls of loop nests into one, in one of three ways.

  inline     The producer reduces nothing: its right-hand side replaces every load of its result. Loads of one element share one node,
             which is computed once. This applies to hand-written nests, too: the decoding of packed weights ends up inside the product
             that reads them.
  epilogue   The producer reduces or has stages (a product, a norm) and the consumer is elementwise: the consumer's right-hand side is
             wrapped around the producer's last store. The consumer may also be a product with sums of the same kind, whose epilogue reads
             the producer: one tile then computes the sums of both.
  row        The producer writes one row at a time (a norm) and the consumer reduces parts of the same rows (to round groups of numbers,
             each with a scale): the stages of both run one after another, and the row stays in the thread's own memory.

Joining is substitution on the mathematical form of nests. The result stays within MOST_NODES and MOST_DEPTH, so a long chain of operators
becomes several nests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from compiler.idioms.nest import PerfectNest, allocated, product_nest, without_allocations
from compiler.idioms.product import GroupedSum, grouped_product_in, product_in, with_products
from compiler.idioms.rows import match_rows
from compiler.ir.dims import Dim, DimVar, product_of
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Fold, Load, Scalar, ScalarParam
from compiler.ir.loops.statements import For, Let, Seq, Stmt, Store
from compiler.ir.loops.visit import (
    loads,
    map_scalar,
    map_scalars,
    rename_buffers,
    rewrite_dims,
    scalar_depth,
    scalars_of,
    sequence,
    statements,
    substitute,
    walk_scalar,
    walk_stmts,
)
from compiler.ir.prove import prove_le
from compiler.ir.subsume import unify
from compiler.ir.types import TensorType
from compiler.ops.ranks import RANKS
from compiler.passes.fusion.annotate_patterns import Pattern, Staged, pattern_of, staged

MOST_SUMS = 2  # maximum number of sums in one tile, since they share its registers
MOST_NODES = 512  # maximum number of nodes of a joined nest, since each join walks all expressions
MOST_DEPTH = 40  # maximum depth of an expression: keeps text far within the parser's MAX_NESTING, and recursion shallow


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call whose loop nest is written in the variables of the graph function: the inverse of outlining."""

    name: str
    operands: tuple[tuple[Buffer | ScalarParam, Atom], ...]
    outputs: tuple[Buffer, ...]
    body: Stmt
    inplace: tuple[int | None, ...] = ()


def join(producer: CallTir, first: PrimFunc, consumer: CallTir, second: PrimFunc, var: Var) -> WrittenCall | None:
    """Return the consumer with the producer of `var` joined in. Return None if that is impossible or too costly, or if one of the functions
    is scheduled already. `first` and `second` are the functions that producer and consumer call."""
    form = staged(first)
    if form is None or "schedule" in first.attrs or "schedule" in second.attrs or isinstance(second.body, Attention):
        return None
    if RANKS in second.attrs:  # values that other ranks read must be in memory
        return None
    places = [i for i, a in enumerate(consumer.args) if a is var]
    if not _fits(first, second, places):
        return None
    kind = pattern_of(first)
    if kind in (Pattern.ELEMENTWISE, Pattern.BROADCAST, Pattern.INJECTIVE):
        if not _inlinable(first, second, places):
            return None
    elif not _wraps(second, places, first):
        return _rows(producer, first, consumer, second, var) if _by_rows(first) and _by_rows(second) else None
    a, b = written_out(producer, first), written_out(consumer, second)
    target = next(place for place, atom in b.operands if atom is var)
    if not form.stages and not _folds(form):
        return _inlined(a, b, target)
    joined = _wrapped(a, b, target)
    return joined if not _sums(second) or _multiplies(joined) else None


# --- whether to join ---------------------------------------------------------------------------------------------------

# `first` and `second` are the functions that producer and consumer call. `places` has the positions of the producer's result among the
# parameters of `second`.


def _fits(first: PrimFunc, second: PrimFunc, places: list[int]) -> bool:
    """Whether the expressions of the joined nest stay within the limits on nodes and depth."""
    targets = {second.params[i] for i in places}
    roots = _expressions(second)
    read = {load.indices for root in roots for load in loads(root) if load.buffer in targets}
    if _num_nodes(second) + len(read) * _num_nodes(first) > MOST_NODES:
        return False
    deepest = max(map(scalar_depth, _expressions(first)), default=1)

    def depth(load: Load) -> int:
        return deepest if load.buffer in targets else 1

    return all(scalar_depth(root, depth) <= MOST_DEPTH for root in roots)


def _expressions(prim: PrimFunc) -> list[Scalar]:
    """Return the scalar expressions of all statements."""
    return [scalar for stmt in walk_stmts(prim.body) for scalar in scalars_of(stmt)]


@lru_cache(maxsize=512)
def _num_nodes(prim: PrimFunc) -> int:
    return sum(1 for root in _expressions(prim) for _ in walk_scalar(root))


def _folds(form: Staged) -> bool:
    return any(isinstance(s, Fold) for s in walk_scalar(form.last.store.value))


def _inlinable(first: PrimFunc, second: PrimFunc, places: list[int]) -> bool:
    """Whether to recompute the producer at each read. This must cost less than to write its result to memory and read it back. If the
    consumer is a product of floats, the producer must decode, and must not be read as rows. If the consumer is a product of integers, its
    sums must not read the producer. Elsewhere, a producer without costly functions is always recomputed. A producer with costly functions
    is recomputed if the consumer reads one element of it outside folds, or up to two elements and has no fold."""
    target = [second.params[i] for i in places]
    product = product_in(second)
    if product is not None:
        rows = {load.buffer for s in product.sums for load in loads(s.rows)}
        return not any(t in rows for t in target) and decodes(first)
    integer = grouped_product_in(second)
    if integer is not None and any(load.buffer in target for s in integer.sums for load in loads(s.node)):
        return False
    inside = [r for s in _values(second) for r in walk_scalar(s) if isinstance(r, Fold)]
    read_in_fold = any(load.buffer in target for r in inside for load in loads(r))
    times = sum(len({load.indices for load in loads(s) if load.buffer in target}) for s in _values(second))
    cheap = not any(_costly(s) for s in _values(first) for s in walk_scalar(s))
    return cheap or (times == 1 and not read_in_fold) or (times <= 2 and not inside)


def decodes(prim: PrimFunc) -> bool:
    """Whether the operands are provably smaller than the result, so that reading them instead of the result saves memory traffic. A value
    that is merely moved (stacked, permuted) is better moved once; for weights that happens at load time."""

    def num_bytes(buffers: tuple[Buffer, ...]) -> Dim:
        return Dim.of(0) + sum(product_of(b.shape) * b.dtype.num_bytes for b in buffers)

    read, made = num_bytes(prim.buffers[: len(prim.buffers) - prim.num_outputs]), num_bytes(prim.outputs)
    return read != made and prove_le(read, made)


def stacks(prim: PrimFunc) -> bool:
    """Whether the function only moves elements, of several operands."""
    return (
        len(prim.buffers) - prim.num_outputs > 1
        and pattern_of(prim) is Pattern.INJECTIVE
        and not any(isinstance(s, Apply) for v in _values(prim) for s in walk_scalar(v))
    )


def _costly(scalar: Scalar) -> bool:
    """Whether the scalar applies a function that takes much longer than an addition."""
    costly = (Fn.EXP, Fn.EXP2, Fn.LOG, Fn.TANH, Fn.ERF, Fn.POW, Fn.SIN, Fn.COS, Fn.DIV, Fn.SQRT, Fn.RSQRT)
    return isinstance(scalar, Apply) and scalar.fn in costly


def _values(prim: PrimFunc) -> list[Scalar]:
    """Return the values that the function stores."""
    return [s.value for s in walk_stmts(prim.body) if isinstance(s, Store)]


def _wraps(second: PrimFunc, places: list[int], first: PrimFunc) -> bool:
    """Whether the consumer's right-hand side can be wrapped around the producer's last store. The consumer must be a single loop nest that
    reads the producer at the consumer's own loop variables, outside folds, over the same extents. If the consumer has folds itself, both
    must be products, and their sums must fit into one tile."""
    form = staged(second)
    if form is None or form.stages or form.temporaries:
        return False
    targets = {second.params[i] for i in places}
    at = tuple(Dim.of(v) for v in form.last.vars)
    value = form.last.store.value
    inside = {load for r in walk_scalar(value) if isinstance(r, Fold) for load in loads(r)}
    read = [load for load in loads(value) if load.buffer in targets]
    if any(load in inside or load.indices != at for load in read):
        return False
    if any(list(b.shape) != list(form.last.store.buffer.shape) for b in (second.params[i] for i in places) if isinstance(b, Buffer)):
        return False
    # The sums of two products may share a tile if there are at most MOST_SUMS of them, all with the same key (`_sums`).
    has_fold = any(isinstance(s, Fold) for s in walk_scalar(value))
    if not has_fold:
        return True
    own, other = _sums(first), _sums(second)
    return bool(own and other) and len(own) + len(other) <= MOST_SUMS and len({*own, *other}) == 1


def _sums(prim: PrimFunc) -> list[str]:
    """Return a key for each sum of a product: its extent, or its groups and formats if it adds integers. One schedule can compute all sums
    with equal keys. Return [] for a function that is no product."""
    product, integer = product_in(prim), grouped_product_in(prim)
    if product is not None:
        return [str(s.extent) for s in product.sums]
    return [] if integer is None else [_kind(s) for s in integer.sums]


def _multiplies(joined: WrittenCall) -> bool:
    """Whether one schedule can compute all sums of the joined nest. If rows choose matrices, all sums must make the same choice."""
    return bool(_sums(PrimFunc(joined.outputs, len(joined.outputs), joined.body)))


def _kind(s: GroupedSum) -> str:
    return f"{s.num_groups} of {s.group}: {s.num_planes} of {s.q.buffer.dtype} by {s.format.name}"


def _by_rows(prim: PrimFunc) -> bool:
    """Whether the function has several stages that work row by row (`match_rows`), and does not work in place."""
    return "inplace" not in prim.attrs and isinstance(without_allocations(prim.body)[1], Seq) and match_rows(prim.body) is not None


# --- the three ways to join --------------------------------------------------------------------------------------------


def written_out(call: CallTir, prim: PrimFunc) -> WrittenCall:
    """Write out the function's body over new buffers, in the graph's variables. Tensor operands with the same value become one operand,
    except memory that the call overwrites."""
    num_inputs = len(prim.params) - prim.num_outputs
    mapping: dict[DimVar, Dim] = {}
    params, outputs = prim.params[:num_inputs], prim.outputs
    for param, atom in zip(params, call.args, strict=True):
        if isinstance(param, DimVar):
            assert isinstance(atom, ScalarValue) and isinstance(atom.value, Dim)
            mapping[param] = atom.value
    shaped = [(p, type_of(a)) for p, a in zip(params, call.args, strict=True) if isinstance(p, Buffer)]
    shaped += list(zip(outputs, call.out, strict=True))
    known = unify(tuple(TensorType(b.shape, b.dtype) for b, _ in shaped), tuple(t for _, t in shaped))
    mapping = {**known, **mapping}

    def fresh(buffer: Buffer) -> Buffer:
        return Buffer(buffer.name, tuple(d.substitute(mapping) for d in buffer.shape), buffer.dtype, buffer.scope)

    buffers: dict[Buffer, Buffer] = {}
    operands: list[tuple[Buffer | ScalarParam, Atom]] = []
    seen: dict[Atom, Buffer] = {}
    written = {params[i] for i in call.inplace if i is not None}
    for param, atom in zip(params, call.args, strict=True):
        if isinstance(param, Buffer):
            if atom in seen and param not in written:
                buffers[param] = seen[atom]
                continue
            buffers[param] = fresh(param)
            if param not in written:
                seen[atom] = buffers[param]
            operands.append((buffers[param], atom))
        elif isinstance(param, ScalarParam):
            operands.append((param, atom))
    outs = tuple(fresh(b) for b in outputs)
    buffers |= dict(zip(outputs, outs, strict=True))
    numbers = {param: i for i, (param, _) in enumerate(operands)}
    inplace = tuple(None if i is None else numbers[buffers[_buffer(params[i])]] for i in call.inplace)
    return WrittenCall(call.func, tuple(operands), outs, substitute(prim.body, mapping, buffers), inplace)


def _buffer(param: Buffer | ScalarParam | DimVar) -> Buffer:
    assert isinstance(param, Buffer)
    return param


def _merged(
    a: WrittenCall, b: WrittenCall, target: Buffer | ScalarParam
) -> tuple[dict[Buffer, Buffer], list[tuple[Buffer | ScalarParam, Atom]]]:
    """Return the renaming of buffers, and the operands of both calls without `target`, which stands for the joined value. If two operands
    have the same value, the second is renamed to the first. An operand of `b` whose memory a result of `b` reuses is never renamed, and no
    operand is renamed to it."""
    renamed: dict[Buffer, Buffer] = {}
    operands: list[tuple[Buffer | ScalarParam, Atom]] = []
    seen: dict[Atom, Buffer] = {}
    kept = {i for i in b.inplace if i is not None}
    for number, (place, atom) in enumerate([*b.operands, *a.operands]):
        if place is target:
            continue
        if isinstance(place, Buffer):
            if isinstance(atom, Var) and atom in seen and number not in kept:
                renamed[place] = seen[atom]
                continue
            if number not in kept:
                seen[atom] = place
        operands.append((place, atom))
    return renamed, operands


def _only_store(body: Stmt) -> PerfectNest:
    _, inner = without_allocations(body)
    nest = product_nest(inner)
    assert nest is not None
    return nest


def _inlined(a: WrittenCall, b: WrittenCall, target: Buffer | ScalarParam) -> WrittenCall:
    """Join `a` into `b` by inlining: `a` has one store, and its value replaces the loads of `target` in `b`."""
    renamed, operands = _merged(a, b, target)
    nest = _only_store(a.body)
    elements: dict[tuple[Dim, ...], Scalar] = {}

    def value(scalar: Scalar) -> Scalar:
        if not isinstance(scalar, Load) or scalar.buffer is not target:
            return scalar
        if scalar.indices not in elements:
            elements[scalar.indices] = rewrite_dims(nest.store.value, dict(zip(nest.vars, scalar.indices, strict=True)))
        return elements[scalar.indices]

    body = rename_buffers(with_products(map_scalars(b.body, value)), renamed)
    numbers = {place: i for i, (place, _) in enumerate(operands)}
    inplace = tuple(None if i is None else numbers[b.operands[i][0]] for i in b.inplace)
    return WrittenCall(_name(a, b), tuple(operands), b.outputs, body, inplace)


def _wrapped(a: WrittenCall, b: WrittenCall, target: Buffer | ScalarParam) -> WrittenCall:
    """Join `b` into `a` as an epilogue: the value of the last store of `a` replaces the loads of `target` in the only store of `b`, which
    becomes the last store. The earlier stages of `a` stay."""
    renamed, operands = _merged(a, b, target)
    temporaries, inner = without_allocations(a.body)
    stages = statements(inner)
    outer, producer = _only_store(b.body), _only_store(stages[-1])
    here = {v: Dim.of(w) for v, w in zip(producer.vars, outer.vars, strict=True)}
    value = rewrite_dims(producer.store.value, here)
    joined = map_scalar(outer.store.value, lambda s: value if isinstance(s, Load) and s.buffer is target else s)
    last: Stmt = Store(outer.store.buffer, outer.store.indices, joined)
    for number, (var, extent) in reversed([*enumerate(outer.axes)]):
        last = For(var, extent, last)
        if number == len(outer.axes) - 1:
            for name, index in reversed((*outer.lets, *((v, rewrite_dims(i, here)) for v, i in producer.lets))):
                last = Let(name, index, last)
    body = allocated(temporaries, sequence((*stages[:-1], last)))
    return WrittenCall(_name(a, b), tuple(operands), b.outputs, rename_buffers(body, renamed))


def _rows(producer: CallTir, first: PrimFunc, consumer: CallTir, second: PrimFunc, var: Var) -> WrittenCall | None:
    """Run the stages of both calls one after another, with the producer's result as a temporary buffer. Return None if the stages together
    do not work row by row (`match_rows`)."""
    a, b = written_out(producer, first), written_out(consumer, second)
    target = next(place for place, atom in b.operands if atom is var)
    assert isinstance(target, Buffer)
    renamed, operands = _merged(a, b, target)
    (made,), (before, whole), (between, parts) = a.outputs, without_allocations(a.body), without_allocations(b.body)
    body = allocated((*before, made, *between), sequence((*statements(whole), *statements(parts))))
    body = rename_buffers(body, {**renamed, target: made})
    return None if match_rows(body) is None else WrittenCall(_name(a, b), tuple(operands), b.outputs, body)


def _name(a: WrittenCall, b: WrittenCall) -> str:
    name = f"{a.name}_{b.name}"
    return name if len(name) <= 60 else f"{name[:40]}_and_more"
