"""Join loop nests so that values pass in registers instead of memory.

A producer with one consumer moves into it, in one of two ways:

  inline     the producer computes each element from elements alone: its right-hand side takes the place of every load of it. This takes
             in custom nests too: the decoding of packed weights ends up inside the product that reads them.
  epilogue   the producer folds (a product, a norm), the consumer works on its elements one by one: the consumer's right-hand side is
             wrapped around the producer's last store.

Fusing is substitution on the mathematical form of nests. The joined call stands where the consumer stood, so everything it reads, symbolic
variables included, is defined there; nothing is moved over a write to memory that the producer reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.ir.builder import Builder
from compiler.ir.deduce import type_of
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph import Atom, Binding, Block, BlockKind, Body, CallTir, Function, If, ScalarValue, Var
from compiler.ir.loops import Apply, Buffer, Fn, For, Load, PrimFunc, Reduce, Scalar, ScalarParam, Stmt, Store
from compiler.ir.module import IRModule
from compiler.ir.subsume import unify
from compiler.ir.types import TensorType
from compiler.ir.visit import operands
from compiler.ir.visit_loops import (
    loads,
    map_scalar,
    map_scalars,
    rename_buffers,
    rewrite_dims,
    sequence,
    statements,
    walk_scalar,
    walk_stmts,
)
from compiler.passes.annotate_patterns import Pattern, Staged, pattern_of, staged
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import count_uses
from compiler.schedule.matmul import match_product
from compiler.schedule.nests import PerfectNest, allocated, perfect_nest, without_allocations

MOST_OPERANDS = 24  # of a joined function


def fuse(module: IRModule) -> IRModule:
    builder = Builder(module)
    outliner = Outliner(builder, module)
    changed: dict[str, Function] = {}
    for name, func in module.graph_functions.items():
        body = _Fuser(module, outliner).body(func.body, dict(count_uses(func.body)))
        if body is not func.body:
            changed[name] = Function(func.params, body, func.result_type, func.pure, func.num_inputs, func.arena)
    return builder.finish().update(changed) if changed else module


@dataclass(frozen=True, slots=True)
class _Call:
    """A call written out in the variables of the graph function: what outlining undoes."""

    name: str
    operands: tuple[tuple[Buffer | ScalarParam, Atom], ...]
    outputs: tuple[Buffer, ...]
    body: Stmt
    inplace: tuple[int | None, ...] = ()


class _Fuser:
    def __init__(self, module: IRModule, outliner: Outliner) -> None:
        self._module = module
        self._outliner = outliner

    def body(self, body: Body, uses: dict[Var, int]) -> Body:
        blocks = tuple(self._block(block, uses) for block in body.blocks)
        return body if all(a is b for a, b in zip(blocks, body.blocks, strict=True)) else Body(blocks, body.result)

    def _block(self, block: Block, uses: dict[Var, int]) -> Block:
        done: list[Binding] = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                then, orelse = self.body(value.then, uses), self.body(value.orelse, uses)
                if then is not value.then or orelse is not value.orelse:
                    binding = Binding(binding.var, If(value.cond, then, orelse))
            elif isinstance(value, CallTir) and block.kind is BlockKind.DATAFLOW:
                binding = self._absorb(binding, value, done, uses)
            done.append(binding)
        same = len(done) == len(block.bindings) and all(a is b for a, b in zip(done, block.bindings, strict=True))
        return block if same else Block(tuple(done), block.kind)

    def _absorb(self, binding: Binding, consumer: CallTir, done: list[Binding], uses: dict[Var, int]) -> Binding:
        """Take producers into the call until none fits. Those taken leave `done`."""
        while True:
            for index in range(len(done) - 1, -1, -1):
                joined = self._join(done, index, consumer, uses)
                if joined is not None:
                    for call, count in ((done[index].value, -1), (consumer, -1), (joined, 1)):
                        for atom in operands(call):
                            if isinstance(atom, Var):
                                uses[atom] = uses.get(atom, 0) + count
                    consumer = joined
                    del done[index]
                    binding = Binding(binding.var, consumer)
                    break
            else:
                return binding

    def _join(self, done: list[Binding], index: int, consumer: CallTir, uses: Mapping[Var, int]) -> CallTir | None:
        var, producer = done[index].var, done[index].value
        places = [i for i, a in enumerate(consumer.args) if a is var]
        if not places or not isinstance(producer, CallTir) or uses[var] != len(places) or len(producer.out) != 1:
            return None
        if _crosses_write(producer, done[index + 1 :]) or len(producer.args) + len(consumer.args) > MOST_OPERANDS:
            return None
        if any(i is not None for i in producer.inplace) or any(consumer.inplace[i] in places for i in range(len(consumer.inplace))):
            return None
        first, second = self._module_prim(producer.func), self._module_prim(consumer.func)
        form = staged(first)
        if form is None or "schedule" in first.attrs or "schedule" in second.attrs or "attention" in second.attrs:
            return None
        kind = pattern_of(first)
        if kind in (Pattern.ELEMENTWISE, Pattern.BROADCAST, Pattern.INJECTIVE):
            if not _inlinable(first, second, places):
                return None
        elif not _wraps(second, places, first):
            return None
        a, b = self._written_out(producer, first), self._written_out(consumer, second)
        target = next(place for place, atom in b.operands if atom is var)
        joined = _inlined(a, b, target) if not form.stages and not _folds(form) else _wrapped(a, b, target)
        return self._outliner.call(joined.name, joined.operands, joined.outputs, joined.body, inplace=joined.inplace)

    def _module_prim(self, name: str) -> PrimFunc:
        func = self._outliner.builder.find(name)
        assert isinstance(func, PrimFunc), name
        return func

    def _written_out(self, call: CallTir, prim: PrimFunc) -> _Call:
        """The function's body over buffers of its own, in the graph's variables; operands that are the same value are one."""
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
        for param, atom in zip(params, call.args, strict=True):
            if isinstance(param, Buffer):
                if atom in seen and not call.inplace:
                    buffers[param] = seen[atom]
                    continue
                seen[atom] = buffers[param] = fresh(param)
                operands.append((buffers[param], atom))
            elif isinstance(param, ScalarParam):
                operands.append((param, atom))
        outs = tuple(fresh(b) for b in outputs)
        buffers |= dict(zip(outputs, outs, strict=True))
        numbers = {param: i for i, (param, _) in enumerate(operands)}
        inplace = tuple(None if i is None else numbers[buffers[_buffer(params[i])]] for i in call.inplace)
        return _Call(call.func, tuple(operands), outs, rename_buffers(rewrite_dims(prim.body, mapping), buffers), inplace)


def _buffer(param: Buffer | ScalarParam | DimVar) -> Buffer:
    assert isinstance(param, Buffer)
    return param


# --- when --------------------------------------------------------------------------------------------------------------


def _crosses_write(producer: CallTir, between: list[Binding]) -> bool:
    """Whether memory that the producer reads is written between it and the consumer."""
    reads = {a for a in producer.args if isinstance(a, Var)}
    for binding in between:
        value = binding.value
        if isinstance(value, CallTir) and any(i is not None and value.args[i] in reads for i in value.inplace):
            return True
    return False


def _folds(form: Staged) -> bool:
    return any(isinstance(s, Reduce) for s in walk_scalar(form.last.store.value))


def _inlinable(first: PrimFunc, second: PrimFunc, places: list[int]) -> bool:
    """Recomputing must not cost more than memory would: only plain loads go where an element is read again and again."""
    target = [second.params[i] for i in places]
    product = match_product(second)
    if product is not None:
        rows = {load.buffer for s in product.sums for load in loads(s.rows)}
        return not any(t in rows for t in target)
    inside = [r for s in _values(second) for r in walk_scalar(s) if isinstance(r, Reduce)]
    read_in_fold = any(load.buffer in target for r in inside for load in loads(r.value))
    times = sum(load.buffer in target for s in _values(second) for load in loads(s))
    cheap = not any(_costly(s) for s in _values(first) for s in walk_scalar(s))
    return cheap or (times == 1 and not read_in_fold) or (times <= 2 and not inside)


def _costly(scalar: Scalar) -> bool:
    return isinstance(scalar, Apply) and scalar.fn in (Fn.EXP, Fn.LOG, Fn.TANH, Fn.ERF, Fn.POW, Fn.SIN, Fn.COS, Fn.DIV, Fn.SQRT, Fn.RSQRT)


def _values(prim: PrimFunc) -> list[Scalar]:
    return [s.value for s in walk_stmts(prim.body) if isinstance(s, Store)]


def _wraps(second: PrimFunc, places: list[int], first: PrimFunc) -> bool:
    """Whether the consumer reads the producer element by element: at its own loop variables, outside of folds, over the same extents."""
    form = staged(second)
    if form is None or form.stages or form.temporaries:
        return False
    targets = {second.params[i] for i in places}
    at = tuple(Dim.of(v) for v in form.last.vars)
    value = form.last.store.value
    inside = {load for r in walk_scalar(value) if isinstance(r, Reduce) for load in loads(r.value)}
    read = [load for load in loads(value) if load.buffer in targets]
    if any(load in inside or load.indices != at for load in read):
        return False
    if any(list(b.shape) != list(form.last.store.buffer.shape) for b in (second.params[i] for i in places) if isinstance(b, Buffer)):
        return False
    other = match_product(second)
    own = match_product(first)
    # Two products share a tile when they run over the same rows and the same contracted extent; anything else keeps to itself.
    has_fold = any(isinstance(s, Reduce) for s in walk_scalar(value))
    if not has_fold:
        return True
    return own is not None and other is not None and str(own.sums[0].axis[1]) == str(other.sums[0].axis[1])


# --- how ---------------------------------------------------------------------------------------------------------------


def _merged(a: _Call, b: _Call, target: Buffer | ScalarParam) -> tuple[dict[Buffer, Buffer], list[tuple[Buffer | ScalarParam, Atom]]]:
    """Operands of both, the joined value left out; a value that both read is one operand. Also what that renames."""
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
            seen[atom] = place
        operands.append((place, atom))
    return renamed, operands


def _only_store(body: Stmt) -> PerfectNest:
    _, inner = without_allocations(body)
    nest = perfect_nest(inner)
    assert nest is not None
    return nest


def _inlined(a: _Call, b: _Call, target: Buffer | ScalarParam) -> _Call:
    renamed, operands = _merged(a, b, target)
    nest = _only_store(a.body)

    def value(scalar: Scalar) -> Scalar:
        if isinstance(scalar, Load) and scalar.buffer is target:
            return rewrite_dims(nest.store.value, dict(zip(nest.vars, scalar.indices, strict=True)))
        return scalar

    body = rename_buffers(map_scalars(b.body, value), renamed)
    numbers = {place: i for i, (place, _) in enumerate(operands)}
    inplace = tuple(None if i is None else numbers[b.operands[i][0]] for i in b.inplace)
    return _Call(_name(a, b), tuple(operands), b.outputs, body, inplace)


def _wrapped(a: _Call, b: _Call, target: Buffer | ScalarParam) -> _Call:
    renamed, operands = _merged(a, b, target)
    temporaries, inner = without_allocations(a.body)
    stages = statements(inner)
    outer, producer = _only_store(b.body), _only_store(stages[-1])
    value = rewrite_dims(producer.store.value, {v: Dim.of(w) for v, w in zip(producer.vars, outer.vars, strict=True)})
    joined = map_scalar(outer.store.value, lambda s: value if isinstance(s, Load) and s.buffer is target else s)
    last: Stmt = Store(outer.store.buffer, outer.store.indices, joined)
    for var, extent in reversed(outer.axes):
        last = For(var, extent, last)
    body = allocated(temporaries, sequence((*stages[:-1], last)))
    return _Call(_name(a, b), tuple(operands), b.outputs, rename_buffers(body, renamed))


def _name(a: _Call, b: _Call) -> str:
    name = f"{a.name}_{b.name}"
    return name if len(name) <= 60 else f"{name[:40]}_and_more"
