"""Join adjacent calls that do not depend on each other, if one launch can compute them.

Before: queries and keys are normalised by one call each, and rotated by one call each. After: one call normalises both, and one rotates
both. Some blocks of the launch compute the first call, and others the second one. A step of few tokens consists of many short kernels, so
it takes less time with fewer launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.backends.cuda.passes.joined import JoinedCall, with_results
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Block, Body, Function
from compiler.ir.graph.values import CallTir
from compiler.ir.graph.visit import operands
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ops.memory import Owners
from compiler.ops.ranks import RANKS
from compiler.passes.fusion.fuse import of_weights
from compiler.passes.fusion.join import written_out
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import rewrite_bodies, rewrite_dataflow


@dataclass(frozen=True, slots=True)
class JoinIndependent:
    """The pass. Only adjacent calls are joined, two at a time."""

    takes: Callable[[PrimFunc], bool]  # whether one launch computes all stages (statements) of a function, as fast as any other schedule

    def __call__(self, module: IRModule) -> IRModule:
        """Return the module in which pairs of adjacent, independent calls are joined, where one launch can compute both."""
        builder = Builder(module)
        outliner = Outliner(builder, module)

        def body_of(func: Function) -> Body:
            return rewrite_dataflow(func.body, _Joiner(outliner, self.takes, Owners(func.body), of_weights(func), {}).block)

        return rewrite_bodies(module, body_of, builder)


@dataclass(frozen=True, slots=True)
class _Joiner:
    """Joins calls in the blocks of one function."""

    outliner: Outliner
    takes: Callable[[PrimFunc], bool]
    owners: Owners
    of_weights: frozenset[Var]  # variables that depend on weights alone: computed once, so their calls are not joined
    known: dict[str, bool]  # whether functions may be joined, by name: all layers call the same functions, so test each once

    def block(self, block: Block) -> Block:
        """Join adjacent calls of a block in pairs, where this is possible."""
        found: list[Binding] = []
        pending: Binding | None = None  # the last binding, which may still be joined with the next one
        for binding in block.bindings:
            joined = None if pending is None else self._joined(pending, binding)
            if joined is not None:
                found += joined
                pending = None
                continue
            found += [] if pending is None else [pending]
            pending = binding
        found += [] if pending is None else [pending]
        return block if len(found) == len(block.bindings) else Block(tuple(found), block.kind)

    def _joined(self, first: Binding, second: Binding) -> list[Binding] | None:
        """Return the bindings that replace two adjacent calls by one. Return None if the calls cannot be joined."""
        a, b = first.value, second.value
        if not isinstance(a, CallTir) or not isinstance(b, CallTir) or {first.var, second.var} & self.of_weights:
            return None
        if first.var in operands(b) or self._overwrites(a, b) or self._overwrites(b, a):
            return None
        if not (self._may_join(a) and self._may_join(b)):
            return None
        joined = JoinedCall()
        for call in (a, b):
            joined.add(written_out(call, self.prim(call)))
        call = joined.outlined(self.outliner, f"{a.func}_{b.func}")
        return None if call is None or not self.takes(self.prim(call)) else with_results(call, [first, second])

    def _may_join(self, call: CallTir) -> bool:
        """Return whether one launch computes the called function as fast as any other schedule, and no other rank (a GPU that runs the same
        program) reads its result."""
        if call.func not in self.known:
            prim = self.prim(call)
            self.known[call.func] = RANKS not in prim.attrs and self.takes(prim)
        return self.known[call.func]

    def _overwrites(self, call: CallTir, other: CallTir) -> bool:
        """Return whether a call overwrites memory that `other` reads or overwrites."""
        taken = self.owners.of(*(call.args[i] for i in call.inplace if i is not None))
        return bool(taken & self.owners.of(*other.args))

    def prim(self, call: CallTir) -> PrimFunc:
        """Return the called function: one of the module, or one that this pass made."""
        found = self.outliner.builder.find(call.func)
        assert isinstance(found, PrimFunc), call.func
        return found
