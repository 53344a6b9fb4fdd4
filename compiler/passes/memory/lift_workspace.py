"""Make the workspace of kernels visible to the planner.

Before: a `PrimFunc` may allocate buffers of global scope around its body. After: these buffers are additional outputs of the function and
additional results of every call, so memory planning places them in the arena.
"""

from __future__ import annotations

from compiler.idioms.nest import allocated, without_allocations
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import CallTir, MakeTuple, TupleGet
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.subsume import unify
from compiler.ir.types import TensorType
from compiler.passes.rewrite import rewrite_module


def lift_workspace(module: IRModule) -> IRModule:
    lifted: dict[str, PrimFunc] = {}
    spaces: dict[str, tuple[Buffer, ...]] = {}
    for name, prim in module.prim_functions.items():
        temporaries, body = without_allocations(prim.body)
        workspace = tuple(t for t in temporaries if t.scope is Scope.GLOBAL)
        if workspace:
            kept = tuple(t for t in temporaries if t.scope is not Scope.GLOBAL)
            attrs = {**prim.attrs, "num_workspaces": len(workspace)}
            lifted[name] = PrimFunc((*prim.params, *workspace), prim.num_outputs + len(workspace), allocated(kept, body), attrs)
            spaces[name] = workspace
    if not lifted:
        return module

    whole: dict[Atom, Var] = {}  # result of a call before the pass -> result of the call that also returns workspace

    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        if isinstance(value, TupleGet) and value.value in whole:
            return TupleGet(whole[value.value], value.index)
        if not isinstance(value, CallTir) or value.func not in spaces:
            return None
        known = _dims_of(value, module.prim(value.func), builder)
        extra = tuple(TensorType(tuple(d.substitute(known) for d in b.shape), b.dtype) for b in spaces[value.func])
        inplace = (*value.inplace, *(None for _ in extra)) if value.inplace else ()
        call = builder.emit(CallTir(value.func, value.args, (*value.out, *extra), inplace), f"{binding.var.name}.all")
        if len(value.out) == 1:
            return TupleGet(call, 0)
        made = builder.emit(MakeTuple(tuple(builder.emit(TupleGet(call, i)) for i in range(len(value.out)))), binding.var.name)
        whole[made] = call
        return made

    return rewrite_module(module.update(lifted), replace)


def _dims_of(call: CallTir, prim: PrimFunc, builder: Builder) -> dict[DimVar, Dim]:
    """Return the values of the function's variables at this call."""
    params = prim.params[: len(prim.params) - prim.num_outputs]
    pairs = list(zip(params, (type_of(a, builder.signature) for a in call.args), strict=True))
    shaped = [(TensorType(p.shape, p.dtype), t) for p, t in pairs if isinstance(p, Buffer)]
    shaped += [(TensorType(b.shape, b.dtype), t) for b, t in zip(prim.outputs, call.out, strict=True)]
    known = unify(tuple(p for p, _ in shaped), tuple(t for _, t in shaped))
    for param, atom in zip(params, call.args, strict=True):
        if isinstance(param, DimVar) and isinstance(atom, ScalarValue) and isinstance(atom.value, Dim):
            known[param] = atom.value
    return known
