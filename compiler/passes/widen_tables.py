"""Replace weights of 4-bit codes, which are indices of a table, by the 8-bit integers of that table. This pass is for targets that have no
product that looks up codes.

Before: a weight is `dequantize(q, scale, bits=4, kind="iq4")`. After: the weight is `dequantize(wide, scale, bits=8)`, with `wide =
cast(dequantize(q, 1, bits=4, kind="iq4"), "i8")`, which is computed when weights are bound. No value changes. Floats of 4 bits (e2m1) stay,
and so do weights whose scales have a shape that is unknown or not constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiler.ir.graph.atoms import Atom, Constant, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.numbers import TABLES, Kind
from compiler.ir.types import TensorType
from compiler.ops.elementwise import CAST
from compiler.ops.products.quantize import DEQUANTIZE
from compiler.passes.rewrite import rewrite_module

WIDENED = TABLES.keys() - {Kind.E2M1}  # floats are multiplied as they are


def widen_tables(module: IRModule) -> IRModule:
    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        if not isinstance(value, Call) or value.op is not DEQUANTIZE or value.attrs.get("kind") not in WIDENED:
            return None
        (q, scale), given = value.args, type_of(value.args[1])
        if not isinstance(given, TensorType) or given.shape is None or not all(dim.is_const for dim in given.shape):
            return None
        others = {name: attr for name, attr in value.attrs.items() if name not in ("bits", "kind")}
        wide = in_bytes(builder, q, Kind(value.attrs["kind"]), [dim.const for dim in given.shape[:-1]])
        return Call(DEQUANTIZE, (wide, scale), {**others, "bits": 8})

    return rewrite_module(module, replace)


def in_bytes(builder: Builder, q: Atom, kind: Kind, rows: Sequence[int]) -> Var:
    """Return the 8-bit integers for which the 4-bit codes in `q` stand. `rows` are the extents of all axes of `q` but the last."""
    ones = Constant(np.ones((*rows, 1), np.float32))
    return builder.call(CAST, builder.call(DEQUANTIZE, q, ones, bits=4, kind=str(kind)), dtype="i8")
