"""Compute products of quantised weights on the integer units.

Before: `linear(x, dequantize(q, scale))`. After, where the machine multiplies bytes fast: the rows of x are quantised, to 16 bits beside
weights of 8 and to 8 bits beside weights of 4, and `integer_linear` multiplies integers; q and its scales are laid out in panels, which
for weights is work of load time. This is the one pass that changes what a program computes, within the errors that docs/decisions states;
products over the same rows share what it quantises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler.ir.builder import Builder
from compiler.ir.deduce import type_of
from compiler.ir.graph import Atom, Binding, Call, TupleGet, Value, Var
from compiler.ir.module import IRModule
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType
from compiler.ops.integer import FOUR, INTEGER_LINEAR, PANEL_INTEGERS, PANEL_SCALES, QUANTIZE_ROWS
from compiler.passes.rewrite import rewrite_module

ACTIVATION_BITS: Final = {8: 16, 4: 8}  # by bits of the weight
LONGEST: Final = 1 << 16  # a group whose sum i32 holds for certain


@dataclass(frozen=True, slots=True)
class IntegerProducts:
    columns: int  # of one panel
    bits: tuple[int, ...] = (8, 4)  # of the weights that are multiplied so

    def __call__(self, module: IRModule) -> IRModule:
        values = {b.var: b.value for f in module.graph_functions.values() for b in f.body.bindings}

        def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
            if not isinstance(value, Call) or value.op.name != "linear":
                return None
            weight = _quantised(value, values)
            return None if weight is None or weight.bits not in self.bits else self._integer(builder, value, weight)

        return rewrite_module(module, replace)

    def _integer(self, builder: Builder, linear: Call, weight: _Weight) -> Value:
        x, *rest = linear.args
        rows = builder.call(QUANTIZE_ROWS, x, bits=ACTIVATION_BITS[weight.bits], group=weight.group)
        panels = builder.call(PANEL_INTEGERS, weight.q, bits=weight.bits, columns=self.columns)
        scales = builder.call(PANEL_SCALES, weight.scale, columns=self.columns)
        parts = [builder.emit(TupleGet(rows, i)) for i in range(3)]
        attrs = {"bits": weight.bits, "size": weight.size, "dtype": weight.out_dtype}
        return Call(INTEGER_LINEAR, (*parts, panels, scales, *rest[1:]), attrs)


@dataclass(frozen=True, slots=True)
class _Weight:
    q: Atom
    scale: Atom
    bits: int
    group: int
    size: int  # columns of the product
    out_dtype: str


def _quantised(linear: Call, values: Mapping[Var, Value]) -> _Weight | None:
    """The weight of a product, where it is symmetric and its groups are whole numbers of fours."""
    weight, x = linear.args[1], type_of(linear.args[0])
    made = values.get(weight) if isinstance(weight, Var) else None
    if not isinstance(made, Call) or made.op.name != "dequantize" or len(made.args) != 2:
        return None
    given = type_of(weight)
    if not isinstance(given, TensorType) or given.shape is None or not all(d.is_const for d in given.shape):
        return None
    if not isinstance(x, TensorType) or x.shape is None or x.dtype is None:
        return None
    size, length = (d.const for d in given.shape)
    attrs = {**made.op.attributes, **made.attrs}
    bits, group = attrs["bits"], attrs["group"]
    if not prove_divisible(group or length, FOUR * 8 // bits) or (group or length) > LONGEST:
        return None
    return _Weight(made.args[0], made.args[1], bits, group, size, str(linear.attrs.get("out_dtype") or x.dtype))
