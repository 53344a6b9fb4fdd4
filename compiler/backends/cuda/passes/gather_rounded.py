"""Gather columns that are rounded already, where they are rounded anyway.

Before: ranks gather columns of f32, and only a cast to a smaller type reads them. After: each rank casts its own columns, and ranks gather
the results: the same values, and fewer bytes from other ranks. The cast fuses into what computes the columns.
"""

from __future__ import annotations

from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.ops.elementwise import CAST
from compiler.ops.ranks import ALL_GATHER
from compiler.passes.rewrite import count_uses, rewrite_module


def gather_rounded(module: IRModule) -> IRModule:
    uses = {var: count for func in module.graph_functions.values() for var, count in count_uses(func.body).items()}
    gathered: dict[Atom, Call] = {}  # gatherings whose result is read once

    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        if not isinstance(value, Call) or not isinstance(binding.value, Call):
            return None
        if value.op is ALL_GATHER and uses.get(binding.var) == 1:
            gathered[binding.var] = value
        if value.op is not CAST or (source := gathered.get(binding.value.args[0])) is None:
            return None
        dtype, wide = DType(value.attrs["dtype"]), type_of(source.args[0], builder.signature)
        if not isinstance(wide, TensorType) or wide.dtype is None or wide.dtype.num_bytes <= dtype.num_bytes:
            return None
        parts = {arg: builder.call(CAST, arg, dtype=str(dtype)) for arg in dict.fromkeys(source.args)}
        return Call(ALL_GATHER, tuple(parts[arg] for arg in source.args), source.attrs)

    return rewrite_module(module, replace)
