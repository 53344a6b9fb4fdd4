"""Let attention write the element type that the next product reads.

Before: attention writes f32, and only a cast to bf16 or f16 reads the result or its reshape. After: attention writes the type of the cast,
and the cast disappears. The values are rounded as before. The pass saves a launch, and a write and a read of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compiler.idioms.nest import perfect_nest
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call, CallTir
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Cast, Load
from compiler.ir.loops.visit import fresh_prim
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.ops.manipulate import RESHAPE
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import count_uses, rewrite_module

SHORT = (DType.BF16, DType.F16)


def round_attention(module: IRModule) -> IRModule:
    """Let attention write the type of a cast if only this cast reads its result, directly or reshaped."""
    rounded: dict[Var, DType] = {}  # results of attention and their reshapes, with the type to which attention rounds them
    casts: set[Var] = set()  # results of the casts that disappear
    for func in module.graph_functions.values():
        uses, values = count_uses(func.body), {b.var: b.value for b in func.body.bindings}
        for binding in func.body.bindings:
            dtype = _cast_to(module, binding.value)
            chain = [] if dtype is None else _chain(module, binding.value, values)
            if dtype is not None and chain and all(uses[var] == 1 for var in chain):
                rounded |= dict.fromkeys(chain, dtype)
                casts.add(binding.var)
    if not casts:
        return module
    outliners: list[Outliner] = []

    def rewritten(builder: Builder, binding: Binding, value: Value) -> Value | None:
        """Replace a cast by its operand, and a call of attention by one that rounds. Return None for any other binding."""
        if not outliners:
            outliners.append(Outliner(builder, module))
        if binding.var in casts:
            assert isinstance(value, CallTir)
            return value.args[0]
        if binding.var not in rounded or not isinstance(value, CallTir):
            return None
        name = outliners[0].add(f"{value.func}_rounded", _rounding(module.prim(value.func), rounded[binding.var]))
        (out,) = value.out
        assert isinstance(out, TensorType)
        return replace(value, func=name, out=(replace(out, dtype=rounded[binding.var]),))

    return rewrite_module(module, rewritten)


def _cast_to(module: IRModule, value: Value) -> DType | None:
    """Return the type of SHORT to which a call casts its operand. Return None for any other value."""
    nest = perfect_nest(module.prim(value.func).body) if isinstance(value, CallTir) and len(value.args) == 1 else None
    if nest is None or nest.store.indices != tuple(map(Dim.of, nest.vars)):
        return None
    match nest.store.value:
        case Cast(value=Load(indices=indices), dtype=dtype) if indices == nest.store.indices and dtype in SHORT:
            return dtype
        case _:
            return None


def _chain(module: IRModule, value: Value, values: Mapping[Var, Value]) -> list[Var]:
    """Return the result of attention, in f32, that a cast reads, with the reshapes in between. Return an empty list if the cast reads
    something else."""
    found: list[Var] = []
    while isinstance(value, CallTir) or (isinstance(value, Call) and value.op is RESHAPE):
        source: Atom = value.args[0]
        if not isinstance(source, Var) or source not in values:
            return []
        found.append(source)
        value = values[source]
        if isinstance(value, CallTir):
            body = module.prim(value.func).body
            return found if isinstance(body, Attention) and body.out.dtype is DType.F32 else []
    return []


def _rounding(prim: PrimFunc, dtype: DType) -> PrimFunc:
    """Return the function of attention with a result of another type."""
    assert isinstance(prim.body, Attention)
    out = replace(prim.body.out, dtype=dtype)
    params = tuple(out if p is prim.body.out else p for p in prim.params)
    return fresh_prim(PrimFunc(params, prim.num_outputs, replace(prim.body, out=out), prim.attrs))
