"""Join a product with the calls that read its elements one by one.

Before: a product of matrices is written to memory, and several calls read its elements there one by one. For example, one call rotates
queries and another appends keys to the cache. After: one call does all of this, and the elements of the product stay on the chip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from compiler.backends.cuda.passes.joined import Element, JoinedCall, with_results
from compiler.idioms.product import product_in
from compiler.idioms.spatial import match_spatial, stages
from compiler.ir.dims import Dim, row_major
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Block, Body, Function, If
from compiler.ir.graph.values import Call, CallTir
from compiler.ir.graph.visit import operands
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Fold, Load, Scalar
from compiler.ir.loops.visit import walk_scalars
from compiler.ir.module import IRModule
from compiler.ops.manipulate import RESHAPE
from compiler.ops.memory import Owners
from compiler.ops.ranks import RANKS
from compiler.passes.fusion.join import written_out
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import count_uses, rewrite_bodies, rewrite_dataflow


@dataclass(frozen=True, slots=True)
class JoinBranches:
    """The pass."""

    takes: Callable[[PrimFunc], bool]  # whether a schedule supports all stages (statements) of a function

    def __call__(self, module: IRModule) -> IRModule:
        """Return the module in which products are joined with the calls that read their elements, where a schedule supports the result."""
        builder = Builder(module)
        joiner = _Joiner(Outliner(builder, module), self.takes)

        def body_of(func: Function) -> Body:
            owners, uses = Owners(func.body), count_uses(func.body)
            return rewrite_dataflow(func.body, lambda block: joiner.block(block, owners, uses))

        return rewrite_bodies(module, body_of, builder)


@dataclass(frozen=True, slots=True)
class _Group:
    """A product, and the calls that read its result."""

    product: Binding
    views: frozenset[Var]  # the product and its reshapes
    readers: tuple[Binding, ...]


@dataclass(frozen=True, slots=True)
class _Joiner:
    """Joins products with their readers in the blocks of all functions."""

    outliner: Outliner
    takes: Callable[[PrimFunc], bool]

    def block(self, block: Block, owners: Owners, uses: Mapping[Var, int]) -> Block:
        """Join each product of a block with the calls that read it, where this is possible."""
        bindings = list(block.bindings)
        for binding in block.bindings:
            group = self._group(binding, bindings, uses)
            joined = None if group is None or not _may_join(group, bindings, owners) else self._joined(group)
            if group is not None and joined is not None:
                last = bindings.index(group.readers[-1])
                bindings[last:last] = with_results(joined, group.readers)
                bindings = [b for b in bindings if b.var not in group.views and b not in group.readers]
        return block if len(bindings) == len(block.bindings) else Block(tuple(bindings), block.kind)

    def _group(self, product: Binding, bindings: Sequence[Binding], uses: Mapping[Var, int]) -> _Group | None:
        """Return the product with its readers. Return None if the binding is not a product, if nothing in the block reads its result, if
        anything outside of the block reads it, or if a reader does not process elements one by one."""
        call = product.value
        if not isinstance(call, CallTir) or len(call.out) != 1 or product_in(self.prim(call)) is None:
            return None
        views, readers, found = {product.var}, list[Binding](), 0
        for binding in bindings[bindings.index(product) + 1 :]:
            value = binding.value
            if not (count := sum(atom in views for atom in operands(value))):
                continue
            found += count
            if isinstance(value, Call) and value.op is RESHAPE:
                views.add(binding.var)
            elif isinstance(value, CallTir) and _is_elementwise(self.prim(value)):
                readers.append(binding)
            else:
                return None
        if not readers or found != sum(uses[view] for view in views):
            return None
        return _Group(product, frozenset(views), tuple(readers))

    def _joined(self, group: _Group) -> CallTir | None:
        """Return the call that replaces a group. Return None if its calls cannot be one call (`JoinedCall.outlined`), or if no schedule
        supports the result."""
        assert isinstance(group.product.value, CallTir)
        product, joined = written_out(group.product.value, self.prim(group.product.value)), JoinedCall()
        joined.add(product)
        (source,) = joined.outputs
        joined.outputs, joined.inplace, joined.temporaries = [], [], [source]
        elements: dict[Atom, Element] = {view: partial(_element, source) for view in group.views}
        for reader in group.readers:
            assert isinstance(reader.value, CallTir)
            joined.add(written_out(reader.value, self.prim(reader.value)), elements=elements)
        names = "_".join([product.name, *(reader.value.func for reader in group.readers if isinstance(reader.value, CallTir))])
        call = joined.outlined(self.outliner, names)
        return call if call is not None and self.takes(self.prim(call)) else None

    def prim(self, call: CallTir) -> PrimFunc:
        """Return the called function: one of the module, or one that this pass made."""
        found = self.outliner.builder.find(call.func)
        assert isinstance(found, PrimFunc), call.func
        return found


def _is_elementwise(prim: PrimFunc) -> bool:
    """Return whether the function computes its elements one by one, without reductions, and no other rank (a GPU that runs the same
    program) reads them."""
    if RANKS in prim.attrs:  # what other ranks read must be in memory
        return False
    return all(match_spatial(stage) for stage in stages(prim.body)) and not any(isinstance(s, Fold) for s in walk_scalars(prim.body))


def _element(source: Buffer, shape: Sequence[Dim], indices: Sequence[Dim]) -> Scalar:
    """Load the element at these indices of a view: `source[rows, columns]`, reshaped to `shape`."""
    return Load(source, (indices[0], row_major(indices[1:], shape[1:])))


def _may_join(group: _Group, bindings: Sequence[Binding], owners: Owners) -> bool:
    """Return whether all calls can move to the place of the last one. No binding in between may use a result of these calls, be an `If`, or
    overwrite an operand of its own, and none of the calls may overwrite memory that another of them reads."""
    results = {reader.var for reader in group.readers}
    for binding in bindings[bindings.index(group.product) + 1 : bindings.index(group.readers[-1])]:
        if binding in group.readers or binding.var in group.views:
            continue
        value = binding.value
        if isinstance(value, If) or results & set(operands(value)):
            return False
        if isinstance(value, CallTir) and any(i is not None for i in value.inplace):
            return False
    members = [b.value for b in (group.product, *group.readers) if isinstance(b.value, CallTir)]
    for member in members:
        taken = owners.of(*(member.args[i] for i in member.inplace if i is not None))
        if any(taken & owners.of(*other.args) for other in members if other is not member):
            return False
    return True
