"""Pad rows that matrix units read, so that rows do not evict each other from caches.

Before: the distance between two adjacent rows of a product's left operand is the length of a row, usually a multiple of a large power of
two. So the rows of a tile map to a few sets of the first-level cache, and the rows of a block map to a few sets of the second-level cache.
After: the distance is one cache line longer, or one line per plane if a row has several planes. The pass pads only rows that a kernel
writes and that only products read. No kernel reads the padding, so results stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from compiler.idioms.product import grouped_product_in, product_in
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Body, Function, Value
from compiler.ir.graph.values import CallTir, TupleGet
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.visit import fresh_prim, loads, rename_buffers
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType, Type
from compiler.machine.target import LINE_BYTES
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import count_uses, rewrite_module

CLASHING_BYTES = 1024  # rows are padded if their length is a multiple of this number of bytes
Output = tuple[Var, int]  # the variable of a call, and the index of one of its outputs


def spread_rows(module: IRModule) -> IRModule:
    """Return the module with padded rows, or the module itself if no rows are to be padded."""
    found = {v: output for f in module.graph_functions.values() for v, output in _rows(module, f)}
    if not found:
        return module
    outputs, outliners, known = set(found.values()), list[Outliner](), dict[tuple[str, tuple[int, ...], tuple[int, ...]], str]()

    def rewritten(builder: Builder, binding: Binding, value: Value) -> Value | None:
        """Return the call of the function with padded rows. Return None for a binding that neither reads nor writes such rows."""
        before = binding.value
        if not isinstance(value, CallTir) or not isinstance(before, CallTir):
            return None
        args = tuple(i for i, a in enumerate(before.args) if a in found)
        outs = tuple(i for i in range(len(value.out)) if (binding.var, i) in outputs)
        if not args and not outs:
            return None
        if not outliners:
            outliners.append(Outliner(builder, module))
        key = (value.func, args, outs)
        if key not in known:
            known[key] = outliners[0].add(f"{value.func}_spread", _spread(module.prim(value.func), args, outs))
        return replace(value, func=known[key], out=tuple(_wider(t) if i in outs else t for i, t in enumerate(value.out)))

    return rewrite_module(module, rewritten)


def _spread(prim: PrimFunc, args: tuple[int, ...], outs: tuple[int, ...]) -> PrimFunc:
    """Return the function with padded rows in the arguments and in the outputs that have these indices."""
    buffers = [prim.params[i] for i in args] + [prim.outputs[i] for i in outs]
    wider = {b: replace(b, shape=_wider(TensorType(b.shape, b.dtype)).shape or ()) for b in buffers if isinstance(b, Buffer)}
    params = tuple(wider.get(p, p) if isinstance(p, Buffer) else p for p in prim.params)
    return fresh_prim(PrimFunc(params, prim.num_outputs, rename_buffers(prim.body, wider), prim.attrs))


def _wider(given: Type) -> TensorType:
    """Return the type of rows, or of planes of rows, that are one cache line longer."""
    assert isinstance(given, TensorType) and given.shape is not None and given.dtype is not None
    return replace(given, shape=(*given.shape[:-1], given.shape[-1] + LINE_BYTES // given.dtype.num_bytes))


# --- the rows to pad --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Uses:
    """How often a function uses a variable: in total, and as the rows of a product."""

    all: Callable[[Var], int]
    as_rows: Callable[[Var], int]


def _rows(module: IRModule, function: Function) -> Iterator[tuple[Var, Output]]:
    """Yield each variable whose rows are to be padded, with the call output that is bound to the variable. Leave out outputs of calls that
    write in place."""
    bindings = function.body.bindings
    calls = {b.var: b.value for b in bindings if isinstance(b.value, CallTir) and not any(i is not None for i in b.value.inplace)}
    uses = _uses(module, function.body)
    for binding in bindings:
        var, value = binding.var, binding.value
        if isinstance(value, TupleGet) and isinstance(value.value, Var) and value.value in calls:
            output = value.value, value.index
        elif var in calls and len(calls[var].out) == 1:
            output = var, 0
        else:
            continue
        if uses.all(var) == uses.as_rows(var) > 0 and _clashes(type_of(var)):
            yield var, output


def _clashes(given: Type) -> bool:
    """Return whether rows of this type evict each other from caches: their length in bytes is a multiple of CLASHING_BYTES. Return False if
    they are neither bf16 nor bytes, or if their length is not a constant."""
    if not isinstance(given, TensorType) or not given.shape or not given.shape[-1].is_const:
        return False
    size = {DType.BF16: 2, DType.I8: 1}.get(given.dtype) if given.dtype else None
    planes = given.shape[-2].const if given.dtype is DType.I8 else 1  # the second last axis of rows of bytes numbers their planes
    return size is not None and planes * given.shape[-1].const * size % CLASHING_BYTES == 0


def _uses(module: IRModule, body: Body) -> _Uses:
    """Count the uses of the variables of a function body."""
    total, as_rows = count_uses(body), dict[Atom, int]()
    read = {name: _read_as_rows(prim) for name, prim in module.prim_functions.items()}
    for binding in body.bindings:
        call = binding.value
        if isinstance(call, CallTir):
            prim = module.prim(call.func)
            for param, atom in zip(prim.params, call.args, strict=False):
                if param in read[call.func]:
                    as_rows[atom] = as_rows.get(atom, 0) + 1
    return _Uses(lambda v: total.get(v, 0), lambda v: as_rows.get(v, 0))


def _read_as_rows(prim: PrimFunc) -> set[Buffer]:
    """Return the buffers that a kernel reads as left and not as right operands of a product. Return no buffers if the kernel is scheduled
    already, or if it is no product."""
    if prim.attrs.get("schedule"):
        return set()
    if (product := product_in(prim)) is not None:
        columns = {load.buffer for s in product.sums for load in loads(s.columns)}
        return {load.buffer for s in product.sums for load in loads(s.rows)} - columns
    integers = grouped_product_in(prim)
    return set() if integers is None else {s.q.buffer for s in integers.sums}
