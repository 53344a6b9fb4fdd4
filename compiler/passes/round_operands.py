"""Round rows to bf16 before products that tolerate it.

Before: `linear(x, w, tolerates="bf16")` over weights of bf16, on a machine that multiplies bf16 faster than f32. After:
`linear(cast(x), w)`, with a result of the type that it had. The cast fuses into what makes x; products over the same x share it.
"""

from __future__ import annotations

from compiler.ir.dtypes import DType
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.ops.elementwise import CAST
from compiler.ops.products.matmul import LINEAR
from compiler.passes.rewrite import rewrite_module


def round_operands(module: IRModule) -> IRModule:
    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        if not isinstance(value, Call) or value.op is not LINEAR or value.attrs.get("tolerates") != str(DType.BF16):
            return None
        (x, w, *bias), types = value.args, [type_of(a) for a in value.args[:2]]
        dtypes = [t.dtype if isinstance(t, TensorType) else None for t in types]
        if dtypes != [DType.F32, DType.BF16]:
            return None
        dtype = value.attrs.get("out_dtype") or str(DType.F32)
        return Call(LINEAR, (builder.call(CAST, x, dtype=str(DType.BF16)), w, *bias), {"out_dtype": dtype})

    return rewrite_module(module, replace)
