"""Join loop nests so that values pass in registers instead of memory.

A producer with one consumer moves into it, by `join`. The joined call stands where the consumer stood, so everything it reads, symbolic
variables included, is defined there; nothing is moved over a write to memory that the producer reads.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import takewhile

from compiler.ir.builder import Builder
from compiler.ir.deduce import type_of
from compiler.ir.dims import DimVar
from compiler.ir.graph import Atom, Binding, Block, BlockKind, Body, CallTir, Function, If, ScalarValue, Value, Var
from compiler.ir.loops import Buffer, PrimFunc, ScalarParam
from compiler.ir.module import IRModule
from compiler.ir.visit import operands
from compiler.ops.memory import Owners, Place
from compiler.passes.join import join
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import count_uses

MOST_OPERANDS = 24  # of a joined function


def fuse(module: IRModule) -> IRModule:
    builder = Builder(module)
    outliner = Outliner(builder, module)
    changed: dict[str, Function] = {}
    for name, func in module.graph_functions.items():
        body = _Fuser(module, outliner, Owners(func.body)).body(func.body, dict(count_uses(func.body)))
        if body is not func.body:
            changed[name] = Function(func.params, body, func.result_type, func.pure, func.num_inputs, func.arena)
    return builder.finish().update(changed) if changed else module


class _Done:
    """The bindings of a block so far. Those that were taken into a later one leave a gap."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._bindings: list[Binding | None] = []
        self._places: dict[Var, int] = {}
        self._writes: list[tuple[int, frozenset[Place]]] = []  # when memory was written in place, and whose

    def add(self, binding: Binding) -> None:
        self._places[binding.var] = len(self._bindings)
        value = binding.value
        if isinstance(value, CallTir) and (taken := self.taken(value)):
            self._writes.append((len(self._bindings), taken))
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

    def taken(self, call: CallTir) -> frozenset[Place]:
        """The memory that the call writes in place."""
        return self._owners.of(*(call.args[i] for i in call.inplace if i is not None))

    def may_move(self, var: Var, producer: CallTir, consumer: CallTir) -> bool:
        """Whether nothing writes what the producer reads between the two, nor the consumer itself."""
        since = takewhile(lambda write: write[0] > self._places[var], reversed(self._writes))
        taken = self.taken(consumer).union(*(written for _, written in since))
        return not taken or not taken & self._owners.of(*producer.args)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return tuple(b for b in self._bindings if b is not None)


class _Fuser:
    def __init__(self, module: IRModule, outliner: Outliner, owners: Owners) -> None:
        self._module = module
        self._owners = owners
        self._outliner = outliner
        self._joined: dict[Hashable, tuple[CallTir, list[Atom]] | None] = {}  # layers repeat: what joining gave, by what was joined

    def body(self, body: Body, uses: dict[Var, int]) -> Body:
        blocks = tuple(self._block(block, uses) for block in body.blocks)
        return body if all(a is b for a, b in zip(blocks, body.blocks, strict=True)) else Body(blocks, body.result)

    def _block(self, block: Block, uses: dict[Var, int]) -> Block:
        done = _Done(self._owners)
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
        if not done.may_move(var, producer, consumer) or len(producer.args) + len(consumer.args) > MOST_OPERANDS:
            return None
        if any(i is not None for i in producer.inplace) or any(consumer.inplace[i] in places for i in range(len(consumer.inplace))):
            return None
        first, second = self._module_prim(producer.func), self._module_prim(consumer.func)
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
        made = join(producer, first, consumer, second, var)
        return made and self._outliner.call(made.name, made.operands, made.outputs, made.body, inplace=made.inplace)

    def _module_prim(self, name: str) -> PrimFunc:
        func = self._outliner.builder.find(name)
        assert isinstance(func, PrimFunc), name
        return func


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
