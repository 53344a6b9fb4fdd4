"""Count the bytes that the kernels of a compiled step read. In each kernel, every element that its loops access counts once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from compiler.backends.registry import backend_of
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Fold, Load
from compiler.ir.loops.statements import For, Let, Stmt
from compiler.ir.loops.visit import free_dims, loads, statements, walk_scalars, walk_stmts
from compiler.ir.module import IRModule
from compiler.machine.target import Target
from compiler.passes.fusion.join import written_out
from runtime.cache_groups import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a step: the values of the program's variables by name, the number of sequences, and the number of tokens of each
    sequence after the step."""

    variables: Mapping[str, int]
    sequences: int
    context: int

    def value(self, dim: Dim) -> int | None:
        """Return the value of a dimension, or None if it depends on data."""
        found = dim.substitute({v: self.variables[v.name] for v in dim.vars() if v.name in self.variables})
        return found.const if found.is_const else None


def planned_bytes(module: IRModule, entry: str, target: Target, sizes: Sizes) -> dict[str, int]:
    """Return the bytes that each binding of a step reads, by the binding's name. `module` is the input of the driver."""
    nests = _nests(module, target)
    found: dict[str, int] = {}
    for binding in nests.graph(entry).body.bindings:
        if isinstance(binding.value, CallTir):
            call = written_out(binding.value, nests.prim(binding.value.func))
            name = f"{len(found)} {call.name}"
            # An output in the memory of an operand holds what the operand held before: a scan reads states from it.
            held = [out for out, operand in zip(call.outputs, call.inplace, strict=False) if operand is not None]
            places = [*(place for place, _ in call.operands), *held]
            found[name] = sum(
                min(count, _count(buffer, sizes)) * buffer.dtype.num_bytes
                for buffer, count in _touched(call.body, sizes).items()
                if any(place is buffer for place in places)
            )
    return found


@lru_cache(maxsize=8)  # callers ask for steps of several sizes of one program
def _nests(module: IRModule, target: Target) -> IRModule:
    return backend_of(target).pipeline(target, ()).until("lift_weights")(module)


def _count(buffer: Buffer, sizes: Sizes) -> int:
    return prod(0 if (extent := sizes.value(d)) is None else extent for d in buffer.shape)


def _touched(body: Stmt, sizes: Sizes) -> dict[Buffer, int]:
    """Return, for each buffer, an upper bound on the number of elements that the loops read. The loads of a buffer in one stage are assumed
    to read the same elements."""
    found: dict[Buffer, int] = {}
    for stage in statements(body):
        most = _of_attention(stage, sizes) if isinstance(stage, Attention) else _of_nest(stage, sizes)
        for buffer, count in most.items():
            found[buffer] = found.get(buffer, 0) + count
    return found


def _of_nest(stage: Stmt, sizes: Sizes) -> dict[Buffer, int]:
    axes: dict[DimVar, Dim] = {}
    lets: dict[DimVar, tuple[DimVar, ...]] = {}
    for stmt in walk_stmts(stage):
        if isinstance(stmt, For):
            axes[stmt.var] = stmt.extent
        elif isinstance(stmt, Let):
            lets[stmt.var] = free_dims(stmt.value)
    for scalar in walk_scalars(stage):
        if isinstance(scalar, Fold):
            axes.update(scalar.axes)
    found: dict[Buffer, int] = {}
    for load in loads(stage):
        extents = [sizes.value(axes[var]) for var in _axes_of(load, lets) if var in axes]
        count = prod(_count(load.buffer, sizes) if extent is None else extent for extent in extents)
        found[load.buffer] = max(found.get(load.buffer, 0), count)
    return found


def _axes_of(load: Load, lets: Mapping[DimVar, tuple[DimVar, ...]]) -> set[DimVar]:
    """Return the loop variables on which the position of a load depends, directly or through integers that were loaded."""
    found: set[DimVar] = set()
    left = [var for index in load.indices for var in index.vars()]
    while left:
        var = left.pop()
        if var not in found:
            found.add(var)
            left += lets.get(var, ())
    return found


def _of_attention(node: Attention, sizes: Sizes) -> dict[Buffer, int]:
    """Count the elements of attention's operands: the keys and values of the tokens in the context, and all elements of other operands."""
    assert isinstance(node.keys, Paged), "a step attends to pages"
    cache = node.keys.cache
    seen = min(sizes.context, node.window or sizes.context) * sizes.sequences
    in_page = cache.shape[3].const * cache.shape[4].const * 2  # elements of a page's keys and values
    others = (node.queries, node.keys.tables, node.sequences, node.positions, node.sinks)
    return {cache: seen * in_page // PAGE_SIZE} | {b: _count(b, sizes) for b in others if b is not None}
