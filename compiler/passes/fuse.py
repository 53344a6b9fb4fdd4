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

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import takewhile
from math import prod

from compiler.ir.builder import Builder
from compiler.ir.deduce import type_of
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph import Atom, Binding, Block, BlockKind, Body, CallTir, Function, If, ScalarValue, Value, Var
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
from compiler.schedule.integer import match_integer
from compiler.schedule.matmul import match_product
from compiler.schedule.nests import PerfectNest, allocated, perfect_nest, without_allocations

MOST_OPERANDS = 24  # of a joined function
MOST_SUMS = 2  # that share a tile: they share its registers too


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


class _Done:
    """The bindings of a block so far. Those that were taken into a later one leave a gap."""

    def __init__(self) -> None:
        self._bindings: list[Binding | None] = []
        self._places: dict[Var, int] = {}
        self._writes: list[tuple[int, Var]] = []  # when memory was written in place, and whose

    def add(self, binding: Binding) -> None:
        self._places[binding.var] = len(self._bindings)
        value = binding.value
        if isinstance(value, CallTir):
            written = [value.args[i] for i in value.inplace if i is not None]
            self._writes += [(len(self._bindings), a) for a in written if isinstance(a, Var)]
        self._bindings.append(binding)

    def remove(self, var: Var) -> None:
        self._bindings[self._places.pop(var)] = None

    def value(self, var: Var) -> Value:
        binding = self._bindings[self._places[var]]
        assert binding is not None
        return binding.value

    def latest_first(self, call: CallTir) -> list[Var]:
        """The operands that bindings here made."""
        made = {a for a in call.args if isinstance(a, Var) and a in self._places}
        return sorted(made, key=self._places.__getitem__, reverse=True)

    def written_since(self, var: Var, producer: CallTir) -> bool:
        """Whether memory that the producer reads has been written since it stood."""
        since = takewhile(lambda write: write[0] > self._places[var], reversed(self._writes))
        return any(written in producer.args for _, written in since)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return tuple(b for b in self._bindings if b is not None)


class _Fuser:
    def __init__(self, module: IRModule, outliner: Outliner) -> None:
        self._module = module
        self._outliner = outliner
        self._joined: dict[Hashable, tuple[CallTir, list[Atom]] | None] = {}  # layers repeat: what joining gave, by what was joined

    def body(self, body: Body, uses: dict[Var, int]) -> Body:
        blocks = tuple(self._block(block, uses) for block in body.blocks)
        return body if all(a is b for a, b in zip(blocks, body.blocks, strict=True)) else Body(blocks, body.result)

    def _block(self, block: Block, uses: dict[Var, int]) -> Block:
        done = _Done()
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                then, orelse = self.body(value.then, uses), self.body(value.orelse, uses)
                if then is not value.then or orelse is not value.orelse:
                    binding = Binding(binding.var, If(value.cond, then, orelse))
            elif isinstance(value, CallTir) and block.kind is BlockKind.DATAFLOW:
                binding = self._absorb(binding, value, done, uses)
            done.add(binding)
        kept = done.bindings
        same = len(kept) == len(block.bindings) and all(a is b for a, b in zip(kept, block.bindings, strict=True))
        return block if same else Block(kept, block.kind)

    def _absorb(self, binding: Binding, consumer: CallTir, done: _Done, uses: dict[Var, int]) -> Binding:
        """Take producers into the call, the latest first, until none fits. Those taken leave `done`."""
        while True:
            for var in done.latest_first(consumer):
                joined = self._join(done, var, consumer, uses)
                if joined is not None:
                    for call, count in ((done.value(var), -1), (consumer, -1), (joined, 1)):
                        for atom in operands(call):
                            if isinstance(atom, Var):
                                uses[atom] = uses.get(atom, 0) + count
                    consumer = joined
                    done.remove(var)
                    binding = Binding(binding.var, consumer)
                    break
            else:
                return binding

    def _join(self, done: _Done, var: Var, consumer: CallTir, uses: dict[Var, int]) -> CallTir | None:
        producer = done.value(var)
        places = [i for i, a in enumerate(consumer.args) if a is var]
        if not places or not isinstance(producer, CallTir) or uses[var] != len(places) or len(producer.out) != 1:
            return None
        if done.written_since(var, producer) or len(producer.args) + len(consumer.args) > MOST_OPERANDS:
            return None
        if any(i is not None for i in producer.inplace) or any(consumer.inplace[i] in places for i in range(len(consumer.inplace))):
            return None
        first, second = self._module_prim(producer.func), self._module_prim(consumer.func)
        atoms: list[Atom] = []
        key = _key(producer, first, consumer, second, var, atoms)
        if key not in self._joined:
            joined = self._join_anew(producer, first, consumer, second, var, places)
            self._joined[key] = None if joined is None else (joined, atoms)
        known = self._joined[key]
        if known is None:
            return None
        joined, made_of = known
        new = dict(zip(made_of, atoms, strict=True))
        return CallTir(joined.func, tuple(new.get(a, a) for a in joined.args), joined.out, joined.inplace)

    def _join_anew(
        self, producer: CallTir, first: PrimFunc, consumer: CallTir, second: PrimFunc, var: Var, places: list[int]
    ) -> CallTir | None:
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


def _key(producer: CallTir, first: PrimFunc, consumer: CallTir, second: PrimFunc, var: Var, atoms: list[Atom]) -> Hashable:
    """Two joins with one key differ in the values they are about alone; `atoms` collects those, each once."""
    numbers: dict[Atom, int] = {}

    def operand(param: Buffer | ScalarParam | DimVar, atom: Atom) -> Hashable:
        if isinstance(param, DimVar):
            assert isinstance(atom, ScalarValue)
            return ("dim", atom.value)
        if atom not in numbers:
            numbers[atom] = len(atoms)
            atoms.append(atom)
        return (numbers[atom], type_of(atom) if isinstance(param, Buffer) else param.dtype, atom is var)

    calls = ((producer, first), (consumer, second))
    return tuple(
        (call.func, call.out, call.inplace, tuple(operand(p, a) for p, a in zip(prim.params, call.args, strict=False)))
        for call, prim in calls
    )


def _buffer(param: Buffer | ScalarParam | DimVar) -> Buffer:
    assert isinstance(param, Buffer)
    return param


# --- when --------------------------------------------------------------------------------------------------------------


def _folds(form: Staged) -> bool:
    return any(isinstance(s, Reduce) for s in walk_scalar(form.last.store.value))


def _inlinable(first: PrimFunc, second: PrimFunc, places: list[int]) -> bool:
    """Recomputing must not cost more than memory would: only plain loads go where an element is read again and again."""
    target = [second.params[i] for i in places]
    product = match_product(second)
    if product is not None:
        rows = {load.buffer for s in product.sums for load in loads(s.rows)}
        return not any(t in rows for t in target) and _decodes(first)
    integer = match_integer(second)
    if integer is not None and any(load.buffer in target for s in integer.sums for load in loads(s.reduce)):
        return False
    inside = [r for s in _values(second) for r in walk_scalar(s) if isinstance(r, Reduce)]
    read_in_fold = any(load.buffer in target for r in inside for load in loads(r.value))
    times = sum(load.buffer in target for s in _values(second) for load in loads(s))
    cheap = not any(_costly(s) for s in _values(first) for s in walk_scalar(s))
    return cheap or (times == 1 and not read_in_fold) or (times <= 2 and not inside)


def _decodes(prim: PrimFunc) -> bool:
    """Whether the operands are smaller than the result: then reading them instead saves memory. What is merely moved (stacked, permuted)
    is better moved once, and for weights that is at load time."""

    def num_bytes(buffers: tuple[Buffer, ...]) -> int | None:
        sizes = [prod(d.const for d in b.shape) * b.dtype.num_bytes if all(d.is_const for d in b.shape) else None for b in buffers]
        known = [s for s in sizes if s is not None]
        return sum(known) if len(known) == len(sizes) else None

    read, made = num_bytes(prim.buffers[: len(prim.buffers) - prim.num_outputs]), num_bytes(prim.outputs)
    return read is not None and made is not None and read < made


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
    # Two products share a tile when they run over the same rows and the same contracted extent; anything else keeps to itself.
    has_fold = any(isinstance(s, Reduce) for s in walk_scalar(value))
    if not has_fold:
        return True
    own, other = _sums(first), _sums(second)
    return bool(own) and len(own) + len(other) <= MOST_SUMS and len({*own, *other}) == 1


def _sums(prim: PrimFunc) -> list[str]:
    """The sums of a product, each as the extent it runs over."""
    product, integer = match_product(prim), match_integer(prim)
    if product is not None:
        return [str(s.axis[1]) for s in product.sums]
    return [] if integer is None else [f"{s.num_groups} of {s.planes[0].group}" for s in integer.sums]


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
