"""Round rows of f32 to bf16 before products that tolerate it, and on some machines before all products with quantised integers that have
no zero points or shifts.

Before: `linear(x, w, tolerates="bf16")` over weights of bf16, on a machine that multiplies bf16 faster than f32. After:
`linear(cast(x), w)`, with a result of the same type. The cast fuses into the producer of x; products over the same x share it.
If a machine multiplies quantised integers, or floats of 8 or 4 bits, as bf16 (`beside`), rows that are multiplied by such weights are
rounded, too: for floats if the product tolerates it, for integers always. On a CPU, products with experts have tiles for bf16 only if
their weights are floats of 8 bits. On a GPU, a product with experts has a tile if its depth, and each group of weights that shares a
scale, are multiples of the length of a step of the tile. The rows of products with experts that have no tile stay f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.numbers import Kind
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType
from compiler.ops.elementwise import CAST
from compiler.ops.products.experts import EXPERT_LINEAR
from compiler.ops.products.matmul import LINEAR
from compiler.ops.products.quantize import DEQUANTIZE
from compiler.passes.rewrite import rewrite_module


@dataclass(frozen=True, slots=True)
class RoundOperands:
    beside: frozenset[Kind] = frozenset()  # kinds of quantised weights that the machine multiplies as bf16
    # For products with experts: number of elements along k that one step of a tile multiplies. 0: only floats of 8 bits have tiles.
    of_experts: int = 0

    def __call__(self, module: IRModule) -> IRModule:
        values = {b.var: b.value for f in module.graph_functions.values() for b in f.body.bindings} if self.beside else {}

        def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
            if not isinstance(value, Call) or value.op not in (LINEAR, EXPERT_LINEAR):
                return None
            (x, w, *others), (row, weight) = value.args, [type_of(a) for a in value.args[:2]]
            if not isinstance(row, TensorType) or row.dtype is not DType.F32 or not isinstance(weight, TensorType):
                return None
            scaled = _scaled(values.get(w)) if isinstance(w, Var) else None
            tolerates, kind = value.attrs.get("tolerates") == str(DType.BF16), None if scaled is None else Kind(scaled["kind"])
            if value.op is EXPERT_LINEAR and not self._takes_experts(row.shape, scaled):
                return None
            is_rounded = kind in self.beside and (tolerates or kind is Kind.INT)
            if not is_rounded and not (tolerates and weight.dtype is DType.BF16):
                return None
            dtype = value.attrs.get("out_dtype") or str(DType.F32)
            return Call(value.op, (builder.call(CAST, x, dtype=str(DType.BF16)), w, *others), {"out_dtype": dtype})

        return rewrite_module(module, replace)

    def _takes_experts(self, rows: tuple[Dim, ...] | None, scaled: Mapping[str, Any] | None) -> bool:
        """Return whether a tile multiplies rows of this shape by matrices of experts. `scaled` has the attributes of the matrices'
        dequantisation, or is None as `_scaled` returns it."""
        if not self.of_experts:
            return scaled is not None and scaled["kind"] == Kind.E4M3
        group = 0 if scaled is None else scaled["group"]  # 0: the whole row is a group
        return rows is not None and prove_divisible(rows[-1], self.of_experts) and group % self.of_experts == 0


def _scaled(weight: Value | None) -> Mapping[str, Any] | None:
    """Return the attributes of the dequantisation of a weight that is numbers times scales, without zero points and shifts. Return None for
    any other weight."""
    if not isinstance(weight, Call) or weight.op is not DEQUANTIZE or len(weight.args) != 2:
        return None
    return {**weight.op.attributes, **weight.attrs}
