"""Build a call that does what several calls do one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from compiler.idioms.nest import allocated, without_allocations
from compiler.idioms.spatial import stages
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.function import Binding
from compiler.ir.graph.values import CallTir, MakeTuple, TupleGet
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Scalar, ScalarParam
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import rename_buffers, replace_loads, sequence
from compiler.ir.types import TupleType
from compiler.passes.fusion.fuse import MOST_OPERANDS
from compiler.passes.fusion.join import WrittenCall
from compiler.passes.outline import Outliner

Element = Callable[[Sequence[Dim], Sequence[Dim]], Scalar]  # an element of a value, from the value's shape and the indices


@dataclass(slots=True)
class JoinedCall:
    """The parts of a call that does what several calls do: `add` appends these calls one after another."""

    operands: list[tuple[Buffer | ScalarParam, Atom]] = field(default_factory=list[tuple[Buffer | ScalarParam, Atom]])
    outputs: list[Buffer] = field(default_factory=list[Buffer])
    # for each output, the index of the operand whose memory it reuses, or None
    inplace: list[int | None] = field(default_factory=list[int | None])
    temporaries: list[Buffer] = field(default_factory=list[Buffer])
    stmts: list[Stmt] = field(default_factory=list[Stmt])

    def add(
        self,
        call: WrittenCall,
        held: Mapping[Atom, Buffer] = MappingProxyType({}),
        elements: Mapping[Atom, Element] = MappingProxyType({}),
    ) -> None:
        """Append a call. `held` has the buffers of values that earlier calls computed, and `elements` has functions that compute elements
        of other values; neither becomes an operand. A tensor that earlier calls read does not become a second operand, unless this call
        overwrites it."""
        known = {atom: place for place, atom in self.operands if isinstance(place, Buffer)}
        taken = {call.operands[i][0] for i in call.inplace if i is not None}
        renamed: dict[Buffer, Buffer] = {}
        body, numbers = call.body, dict[int, int]()
        for i, (place, atom) in enumerate(call.operands):
            if isinstance(place, Buffer) and atom in elements:
                body = replace_loads(body, place, partial(elements[atom], place.shape))
            elif isinstance(place, Buffer) and atom in held:
                renamed[place] = held[atom]
            elif isinstance(place, Buffer) and atom in known and place not in taken:
                renamed[place] = known[atom]
            else:
                numbers[i] = len(self.operands)
                self.operands.append((place, atom))
        self.outputs += call.outputs
        self.inplace += [None if i is None else numbers[i] for i in call.inplace or [None] * len(call.outputs)]
        temporaries, inner = without_allocations(rename_buffers(body, renamed))
        self.temporaries += temporaries
        self.stmts += stages(inner)

    def outlined(self, outliner: Outliner, name: str) -> CallTir | None:
        """Return the call. Return None if it has too many operands, or if two of its calls have the same scalar parameter."""
        scalars = [place for place, _ in self.operands if isinstance(place, ScalarParam)]
        if len(set(scalars)) != len(scalars) or len(self.operands) > MOST_OPERANDS:
            return None
        inplace = tuple(self.inplace) if any(i is not None for i in self.inplace) else ()
        body = allocated(self.temporaries, sequence(self.stmts))
        return outliner.call(name, self.operands, tuple(self.outputs), body, inplace=inplace)


def with_results(call: CallTir, replaced: Sequence[Binding]) -> list[Binding]:
    """Return the binding of the joined call, and bindings that give its outputs to the variables of `replaced`. `replaced` has those joined
    calls whose results are read, in the order of the outputs. If there is one output, the variable of the replaced call is bound to the
    joined call itself."""
    made = Var(replaced[-1].var.name, TupleType(call.out))
    if len(call.out) == 1:
        return [Binding(replaced[0].var, call)]
    found, first = [Binding(made, call)], 0
    for binding in replaced:
        assert isinstance(binding.value, CallTir)
        fields = [Var(binding.var.name, type_) for type_ in binding.value.out]
        single = len(fields) == 1
        found += [Binding(binding.var if single else field, TupleGet(made, first + i)) for i, field in enumerate(fields)]
        if not single:
            found.append(Binding(binding.var, MakeTuple(tuple(fields))))
        first += len(fields)
    return found
