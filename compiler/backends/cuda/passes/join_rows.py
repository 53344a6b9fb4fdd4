"""Join the calls that route tokens to experts.

Before: several adjacent calls compute the same short rows one after another. For example, a softmax is followed by the choice of the best
experts, and by their shares. After: one call does all of this, and a row stays on the chip between the stages of this call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from compiler.backends.cuda.passes.joined import JoinedCall, with_results
from compiler.idioms.small_rows import match_small_rows
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Block, Body, Function
from compiler.ir.graph.values import CallTir
from compiler.ir.graph.visit import operands
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.passes.fusion.join import written_out
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import count_uses, rewrite_bodies, rewrite_dataflow

NAME = "route"  # name of joined calls


@dataclass(frozen=True, slots=True)
class JoinRows:
    """The pass."""

    takes: Callable[[PrimFunc], bool]  # whether a schedule supports all stages (statements) of a function

    def __call__(self, module: IRModule) -> IRModule:
        """Return the module in which runs of calls that compute short rows are joined, where a schedule supports the result."""
        builder = Builder(module)
        joiner = _Joiner(Outliner(builder, module), self.takes, {})

        def body_of(func: Function) -> Body:
            uses = count_uses(func.body)
            return rewrite_dataflow(func.body, lambda block: joiner.block(block, uses))

        return rewrite_bodies(module, body_of, builder)


@dataclass(frozen=True, slots=True)
class _Joiner:
    """Joins runs of calls in the blocks of all functions."""

    outliner: Outliner
    takes: Callable[[PrimFunc], bool]
    known: dict[str, bool]  # whether functions compute short rows, by name: all layers call the same functions, so test each once

    def block(self, block: Block, uses: Mapping[Var, int]) -> Block:
        """Return the block with runs of calls joined. `uses` says how often the function reads each variable."""
        found: list[Binding] = []
        for run in self._runs(block.bindings):
            joined = self._joined(run, uses) if len(run) > 1 else None
            found += joined or run
        return block if found == list(block.bindings) else Block(tuple(found), block.kind)

    def _runs(self, bindings: Sequence[Binding]) -> Iterator[list[Binding]]:
        """Divide bindings into runs. The calls of a run compute equally many short rows, and each except the first reads the result of an
        earlier call of the run. Any other binding is a run of its own."""
        run: list[Binding] = []
        rows: Dim | None = None
        for binding in bindings:
            own = self._num_rows(binding)
            made = {b.var for b in run}
            if run and (own is None or own != rows or not made & set(operands(binding.value))):
                yield run
                run = []
            run, rows = [*run, binding], own
        if run:
            yield run

    def _num_rows(self, binding: Binding) -> Dim | None:
        """Return the number of short rows that a call computes. Return None for any other binding, and if the call has several results or
        overwrites an operand."""
        call = binding.value
        if not isinstance(call, CallTir) or len(call.out) != 1 or any(i is not None for i in call.inplace):
            return None
        (made,) = call.out
        if not isinstance(made, TensorType) or not made.shape:
            return None
        if call.func not in self.known:
            self.known[call.func] = match_small_rows(self.prim(call)) is not None
        return made.shape[0] if self.known[call.func] else None

    def _joined(self, run: Sequence[Binding], uses: Mapping[Var, int]) -> list[Binding] | None:
        """Return the bindings that replace the calls of a run by one. Return None if the calls cannot be joined, or if nothing outside the
        run reads their results."""
        joined, made = JoinedCall(), dict[Atom, Buffer]()
        for binding in run:
            call = binding.value
            assert isinstance(call, CallTir)
            joined.add(written_out(call, self.prim(call)), made)
            made[binding.var] = joined.outputs[-1]
        inside = [atom for binding in run for atom in operands(binding.value)]
        results = [b for b in run if uses.get(b.var, 0) > inside.count(b.var)]
        joined.outputs = [made[b.var] for b in results]
        joined.inplace = [None] * len(results)
        joined.temporaries += [buffer for buffer in made.values() if buffer not in joined.outputs]
        call = joined.outlined(self.outliner, NAME) if results else None
        return None if call is None or not self.takes(self.prim(call)) else with_results(call, results)

    def prim(self, call: CallTir) -> PrimFunc:
        """Return the called function: one of the module, or one that this pass made."""
        found = self.outliner.builder.find(call.func)
        assert isinstance(found, PrimFunc), call.func
        return found
