"""Round columns before ranks (the GPUs that run a program together) gather them, and rows of a table before experts look them up, if a cast
reads the result.

Before: ranks gather columns of f32, or experts look up rows of f32, and only casts to smaller types read the result. After: the operands
are cast, and the results are gathered or looked up. The values are the same, in fewer bytes. The cast is fused into the kernel that
computes the columns, or into the look-up. A table is rounded only if it provably has at most as many rows as are looked up.
"""

from __future__ import annotations

from collections import Counter

from compiler.ir.dims import product_of
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.prove import prove_le
from compiler.ir.types import TensorType
from compiler.ops.elementwise import CAST
from compiler.ops.embedding import EMBEDDING
from compiler.ops.ranks import ALL_GATHER
from compiler.passes.rewrite import count_uses, rewrite_module


def gather_rounded(module: IRModule) -> IRModule:
    """Replace casts, to smaller types, of gathered columns and of looked-up rows by gatherings and look-ups of cast operands. Do not change
    values that other operators than casts read, or gathered columns that are read more than once."""
    uses = {var: count for func in module.graph_functions.values() for var, count in count_uses(func.body).items()}
    bindings = [b for func in module.graph_functions.values() for block in func.body.blocks for b in block.bindings]
    casts = Counter(b.value.args[0] for b in bindings if isinstance(b.value, Call) and b.value.op is CAST)
    gathered: dict[Atom, Call] = {}  # gatherings with one use, and look-ups that only casts use

    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        """Return the gathering or look-up of cast operands, for a cast to a smaller type of what is gathered or looked up. Return None for
        any other binding, and where `_looked_up` returns None."""
        if not isinstance(value, Call) or not isinstance(binding.value, Call):
            return None
        num_uses = uses.get(binding.var, 0)
        if (value.op is ALL_GATHER and num_uses == 1) or (value.op is EMBEDDING and num_uses == casts[binding.var]):
            gathered[binding.var] = value
        if value.op is not CAST or (source := gathered.get(binding.value.args[0])) is None:
            return None
        dtype, wide = DType(value.attrs["dtype"]), type_of(source.args[0], builder.signature)
        if not isinstance(wide, TensorType) or wide.dtype is None or wide.dtype.num_bytes <= dtype.num_bytes:
            return None
        if source.op is EMBEDDING:
            return _looked_up(builder, source, wide, str(dtype))
        parts = {arg: builder.call(CAST, arg, dtype=str(dtype)) for arg in dict.fromkeys(source.args)}
        return Call(ALL_GATHER, tuple(parts[arg] for arg in source.args), source.attrs)

    return rewrite_module(module, replace)


def _looked_up(builder: Builder, source: Call, table: TensorType, dtype: str) -> Call | None:
    """Look up rows of the rounded table. Return None unless the table provably has at most as many rows as are looked up."""
    rows, numbers = source.args
    indices = type_of(numbers, builder.signature)
    if table.shape is None or not isinstance(indices, TensorType) or indices.shape is None:
        return None
    if not prove_le(table.shape[0], product_of(indices.shape)):
        return None
    return Call(EMBEDDING, (builder.call(CAST, rows, dtype=dtype), numbers), source.attrs)
