"""Fuse loop nests, so that intermediate values stay in registers.

In dataflow blocks, `join` joins a producer that has exactly one consumer into this consumer. The joined call is at the consumer's position,
so everything that it reads, symbolic variables included, is defined before. A producer never moves past a write to memory that it reads,
and a call that works in place is never joined into its consumer.

A kernel that decodes or moves stacked weights is not joined with the stacking, which is computed once, when weights are loaded: the joined
kernel would select among the parts element by element, and read them in an order in which they cannot be packed. If the scales of weights
are themselves decoded, they are decoded once, too, because products on tensor cores read one scale per group. Weights with shifts are an
exception, because products on tensor cores read no shifts.

A call with several independent results (a split) is fused result by result, as if each result had a separate producer. If some results
moved into their consumers, the call is narrowed to the remaining results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import takewhile

from compiler.ir.dims import DimVar
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function, If, Value
from compiler.ir.graph.values import CallTir, TupleGet
from compiler.ir.graph.visit import operands
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.module import IRModule
from compiler.ir.types import TupleType
from compiler.ops.memory import Owners, Place
from compiler.passes.fusion.annotate_patterns import Pattern, pattern_of
from compiler.passes.fusion.join import decodes, join, stacks
from compiler.passes.fusion.results import with_results
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import count_uses, rewrite_bodies

MOST_OPERANDS = 24  # maximum number of operands of producer and consumer together
NUMBERS_AND_SCALES = 3  # numbers, scales and result: the buffers of a function that multiplies numbers by scales and subtracts no shifts


def fuse(module: IRModule) -> IRModule:
    builder = Builder(module)
    outliner = Outliner(builder, module)

    def body_of(func: Function) -> Body:
        return _Fuser(module, outliner, Owners(func.body), of_weights(func)).body(func.body, dict(count_uses(func.body)))

    return rewrite_bodies(module, body_of, builder)


def of_weights(func: Function) -> frozenset[Var]:
    """Return the weights, and all values outside branches that are computed from weights and constants alone."""
    found = set(func.weights)
    for binding in func.body.bindings:
        read = [atom for atom in operands(binding.value) if isinstance(atom, Var)]
        if read and found.issuperset(read):
            found.add(binding.var)
    return frozenset(found)


class _Done:
    """The bindings of a block so far. A binding that was fused into a later binding leaves None in its place."""

    def __init__(self, owners: Owners, block: Block) -> None:
        self._owners = owners
        gets = (b.value.value for b in block.bindings if isinstance(b.value, TupleGet))
        # for each tuple, the number of bindings of the block that read one of its fields and were not fused into a consumer
        self.num_fields = Counter(tuple_ for tuple_ in gets if isinstance(tuple_, Var))
        self._bindings: list[Binding | None] = []
        self._places: dict[Var, int] = {}
        self._writes: list[tuple[int, frozenset[Place]]] = []  # in-place writes: position in the block, and the memory written

    def add(self, binding: Binding) -> None:
        self._places[binding.var] = len(self._bindings)
        value = binding.value
        if isinstance(value, CallTir) and (taken := self.taken(value)):
            self._writes.append((len(self._bindings), taken))
        self._bindings.append(binding)

    def remove(self, var: Var) -> None:
        self._bindings[self._places.pop(var)] = None

    def replace(self, var: Var, binding: Binding) -> None:
        self._places[binding.var] = place = self._places.pop(var)
        self._bindings[place] = binding

    def value(self, var: Var) -> Value:
        binding = self._bindings[self._places[var]]
        assert binding is not None
        return binding.value

    def call_of(self, value: Value) -> tuple[Var, CallTir] | None:
        """If the value is one of the several results of a call, return the variable of the call, and the call. Otherwise return None."""
        if not isinstance(value, TupleGet) or not isinstance(value.value, Var) or value.value not in self._places:
            return None
        call = self.value(value.value)
        return (value.value, call) if isinstance(call, CallTir) and len(call.out) > 1 else None

    def fields(self, var: Var) -> dict[Var, int]:
        """Return the variables that hold fields of a tuple, with the indices of these fields."""
        found = (b for b in self._bindings if b is not None)
        return {b.var: b.value.index for b in found if isinstance(b.value, TupleGet) and b.value.value is var}

    def latest_first(self, call: CallTir) -> list[Var]:
        """Return the operands that bindings of this block made, the latest first."""
        made = {a for a in call.args if isinstance(a, Var) and a in self._places}
        return sorted(made, key=self._places.__getitem__, reverse=True)

    def taken(self, call: CallTir) -> frozenset[Place]:
        """Return the memory that the call overwrites."""
        return self._owners.of(*(call.args[i] for i in call.inplace if i is not None))

    def may_move(self, var: Var, producer: CallTir, consumer: CallTir) -> bool:
        """Whether neither the consumer nor any binding between the producer and the consumer overwrites an operand of the producer."""
        since = takewhile(lambda write: write[0] > self._places[var], reversed(self._writes))
        taken = self.taken(consumer).union(*(written for _, written in since))
        return not taken or not taken & self._owners.of(*producer.args)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return tuple(b for b in self._bindings if b is not None)


class _Fuser:
    """Fuses the calls of one function. `of_weights` has the values that depend on weights and constants alone."""

    def __init__(self, module: IRModule, outliner: Outliner, owners: Owners, of_weights: frozenset[Var]) -> None:
        self._module = module
        self._owners = owners
        self._of_weights = of_weights
        self._outliner = outliner
        self._scales: set[Var] = set()  # decoded scales of weights, which are not joined into any call
        # calls narrowed to some of their results, by call and indices of results; None: that is impossible
        self._parts: dict[tuple[CallTir, tuple[int, ...]], CallTir | None] = {}
        # joined call and its atoms, by join key; None: joining is impossible. A cache, since layers repeat the same joins
        self._joined: dict[Hashable, tuple[CallTir, list[Atom]] | None] = {}

    def body(self, body: Body, uses: dict[Var, int]) -> Body:
        """Fuse the calls of a body. `uses` counts how often the function reads each variable, and is kept up to date."""
        blocks = tuple(self._block(block, uses) for block in body.blocks)
        return body if all(a is b for a, b in zip(blocks, body.blocks, strict=True)) else Body(blocks, body.result)

    def _block(self, block: Block, uses: dict[Var, int]) -> Block:
        done = _Done(self._owners, block)
        split: dict[Var, None] = {}  # variables of calls with several results, one of which was fused into its consumer
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                then, orelse = self.body(value.then, uses), self.body(value.orelse, uses)
                if then is not value.then or orelse is not value.orelse:
                    binding = Binding(binding.var, If(value.cond, then, orelse))
            elif isinstance(value, CallTir) and block.kind is BlockKind.DATAFLOW:
                binding = self._absorb(binding, value, done, uses, split)
            done.add(binding)
        for var in split:
            self._narrow(var, done, uses)
        kept = done.bindings
        same = len(kept) == len(block.bindings) and all(a is b for a, b in zip(kept, block.bindings, strict=True))
        return block if same else Block(kept, block.kind)

    def _absorb(self, binding: Binding, consumer: CallTir, done: _Done, uses: dict[Var, int], split: dict[Var, None]) -> Binding:
        """Join producers into the call, the latest first, until no producer can be joined. Remove joined producers from `done`; add to
        `split` the calls of which one of several results was joined."""
        while True:
            for var in done.latest_first(consumer):
                joined = self._join(done, var, consumer, uses)
                if joined is not None:
                    _count(uses, (done.value(var), -1), (consumer, -1), (joined, 1))
                    consumer = joined
                    if found := done.call_of(done.value(var)):
                        split[found[0]] = None
                        done.num_fields[found[0]] -= 1
                    done.remove(var)
                    binding = Binding(binding.var, consumer)
                    break
            else:
                return binding

    def _narrow(self, var: Var, done: _Done, uses: dict[Var, int]) -> None:
        """Drop those results of the call `var` that nothing reads, and the call itself if nothing reads any. The call keeps all results if
        it cannot be narrowed, or if two variables hold the same result."""
        call, fields = done.value(var), done.fields(var)
        assert isinstance(call, CallTir)
        wanted = tuple(sorted(set(fields.values())))
        if not wanted:
            _count(uses, (call, -1))
            done.remove(var)
            return
        narrowed = self._only(call, wanted) if len(fields) == len(wanted) else None
        if narrowed is None:
            return
        _count(uses, (call, -1), (narrowed, 1))
        if len(wanted) == 1:
            (field,) = fields
            done.remove(field)
            done.replace(var, Binding(field, narrowed))
            return
        made = Var(var.name, TupleType(narrowed.out))
        done.replace(var, Binding(made, narrowed))
        for field, index in fields.items():
            done.replace(field, Binding(field, TupleGet(made, wanted.index(index))))
        uses[made] = uses.pop(var)

    def _only(self, call: CallTir, results: tuple[int, ...]) -> CallTir | None:
        """Return a call that computes only these results, or None if the call cannot be narrowed (`with_results`)."""
        if (call, results) not in self._parts:
            made = with_results(call, self._module_prim(call.func), results)
            self._parts[call, results] = made and self._outliner.call(made.name, made.operands, made.outputs, made.body)
        return self._parts[call, results]

    def _producer(self, value: Value, done: _Done, uses: dict[Var, int]) -> CallTir | None:
        """Return a call whose only result is this value. A call with several results is narrowed to this result. Return None if that is
        impossible, if the tuple of results has uses besides reads of its fields in this block, or if no call of a loop nest makes the
        value."""
        if found := done.call_of(value):
            var, call = found
            assert isinstance(value, TupleGet)
            return self._only(call, (value.index,)) if uses[var] == done.num_fields[var] else None
        return value if isinstance(value, CallTir) and len(value.out) == 1 else None

    def _join(self, done: _Done, var: Var, consumer: CallTir, uses: dict[Var, int]) -> CallTir | None:
        """Return the consumer with the producer of `var` joined in. Return None if `_producer` finds no producer, if other values read
        `var`, too, if both calls together have more than MOST_OPERANDS operands, if the producer works in place, if the consumer overwrites
        `var`, or if `join` or a rule at the head of this file forbids the join."""
        places = [i for i, a in enumerate(consumer.args) if a is var]
        if not places or uses[var] != len(places):
            return None
        value = done.value(var)
        producer = self._producer(value, done, uses)
        if producer is None:
            return None
        found = done.call_of(value)
        if not done.may_move(found[0] if found else var, producer, consumer) or len(producer.args) + len(consumer.args) > MOST_OPERANDS:
            return None
        if any(i is not None for i in producer.inplace) or any(consumer.inplace[i] in places for i in range(len(consumer.inplace))):
            return None
        first, second = self._module_prim(producer.func), self._module_prim(consumer.func)
        if var in self._of_weights and (decodes(second) or pattern_of(second) in (Pattern.INJECTIVE, Pattern.OPAQUE)):
            if stacks(first):
                return None
            if decodes(first) and decodes(second) and len(second.buffers) == NUMBERS_AND_SCALES:
                self._scales.add(var)
        if var in self._scales:
            return None
        atoms: list[Atom] = []
        key = _key(producer, first, consumer, second, var, atoms)
        if key not in self._joined:
            joined = self._join_anew(producer, first, consumer, second, var)
            self._joined[key] = None if joined is None else (joined, atoms)
        known = self._joined[key]
        if known is None:
            return None
        joined, made_of = known
        new = dict(zip(made_of, atoms, strict=True))
        return CallTir(joined.func, tuple(new.get(a, a) for a in joined.args), joined.out, joined.inplace)

    def _join_anew(self, producer: CallTir, first: PrimFunc, consumer: CallTir, second: PrimFunc, var: Var) -> CallTir | None:
        """Return the joined call, and add its function to the module. Return None if `join` returns None."""
        made = join(producer, first, consumer, second, var)
        return made and self._outliner.call(made.name, made.operands, made.outputs, made.body, inplace=made.inplace)

    def _module_prim(self, name: str) -> PrimFunc:
        func = self._outliner.builder.find(name)
        assert isinstance(func, PrimFunc), name
        return func


def _count(uses: dict[Var, int], *changes: tuple[Value, int]) -> None:
    """For each pair of a value and a number, add the number to the uses of the variables that the value reads, once per read."""
    for value, count in changes:
        for atom in operands(value):
            if isinstance(atom, Var):
                uses[atom] = uses.get(atom, 0) + count


def _key(producer: CallTir, first: PrimFunc, consumer: CallTir, second: PrimFunc, var: Var, atoms: list[Atom]) -> Hashable:
    """Return a key of a join, and append its distinct operands to `atoms`. Values of dimensions are not appended; they are part of the key.
    So joins with equal keys differ only in the operands in `atoms`."""
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
