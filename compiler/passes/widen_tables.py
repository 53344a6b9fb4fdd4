"""Store numbers of IQ4 in 8 bits where the target has no product that looks up their 4 bits in a table.

Before: `dequantize(q, scale, bits=4, kind="iq4")` of a product's weight. After: `dequantize(wide, scale, bits=8)`, with
`wide = cast(dequantize(q, 1, bits=4, kind="iq4"), "i8")`, which is computed when weights are bound. No value changes.
"""

from __future__ import annotations

import numpy as np

from compiler.ir.graph.atoms import Constant
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.numbers import Kind
from compiler.ir.types import TensorType
from compiler.ops.elementwise import CAST
from compiler.ops.products.quantize import DEQUANTIZE
from compiler.passes.rewrite import rewrite_module


def widen_tables(module: IRModule) -> IRModule:
    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        if not isinstance(value, Call) or value.op is not DEQUANTIZE or value.attrs.get("kind") != Kind.IQ4:
            return None
        (q, scale), given = value.args, type_of(value.args[1])
        if not isinstance(given, TensorType) or given.shape is None or not all(dim.is_const for dim in given.shape):
            return None
        shape = (*(dim.const for dim in given.shape[:-1]), 1)
        numbers = builder.call(DEQUANTIZE, q, Constant(np.ones(shape, np.float32)), bits=4, kind=str(Kind.IQ4))
        others = {name: attr for name, attr in value.attrs.items() if name not in ("bits", "kind")}
        return Call(DEQUANTIZE, (builder.call(CAST, numbers, dtype="i8"), scale), {**others, "bits": 8})

    return rewrite_module(module, replace)
