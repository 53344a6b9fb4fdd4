"""Matrix products in which each row chooses its matrix among the matrices of several experts. Only chosen matrices are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, contract
from compiler.ir.op import REQUIRED
from compiler.ir.types import TensorType, Type
from compiler.ops.broadcast import output
from compiler.ops.index import clamped_index
from compiler.ops.indices import Extent, clamped
from compiler.ops.operands import agree, dtype_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.products.integer import integer_nest, integer_numpy, integer_relations, integer_type
from compiler.ops.products.widened import widened_nest, widened_numpy, widened_relations, widened_type
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32
OF_WEIGHT, OF_PANELS = ({"experts": clamped(Extent(name))} for name in ("weight", "panels"))

# --- expert_linear -----------------------------------------------------------------------------------------------------


def _linear_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    """Deduce the annotation of the result, [rows, out]."""
    x = wants_float(tensor_operand(args, 0, "x", ndim=2, layout="[rows, in]"), "x")
    w = tensor_operand(args, 1, "weight", ndim=3, layout="[experts, out, in]")
    experts = wants_int(tensor_operand(args, 2, "experts", ndim=1, layout="[rows]"), "experts")
    dtype = x.dtype if attrs["out_dtype"] is None else dtype_attr(attrs, "out_dtype")
    if len(args) > 3:
        bias = tensor_operand(args, 3, "bias", ndim=2, layout="[experts, out]")
        for d, (wanted, given) in enumerate(zip((w.shape or ())[:2], bias.shape or (), strict=False)):
            agree(wanted, given, f"dimension {d} of bias")
    if x.shape is not None and experts.shape is not None:
        agree(x.shape[0], experts.shape[0], "the length of experts")
    if w.shape is None or x.shape is None:
        return TensorType(None, dtype, 2)
    agree(w.shape[2], x.shape[1], "the last dimension of x")
    return TensorType((x.shape[0], w.shape[1]), dtype)


def _linear_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x, w, experts = k.arrays(output(operands), *(operands.buffer(i) for i in range(3)))
    bias = k.array(operands.buffer(3)) if operands.has(3) else None
    with k.nest(out.shape[:1]) as (j,):
        e = clamped_index(k, "expert", experts[j], w.shape[0])
        with k.nest(out.shape[1:]) as (n,):

            def column(r: Dim) -> Scalar:
                return cast(w[e, n, r], F32)

            y: Scalar = contract(x.shape[1], lambda r: cast(x[j, r], F32), column)
            out[j, n] = cast(y if bias is None else y + cast(bias[e, n], F32), out.dtype)
    wanted = {1: (*w.shape[:2], x.shape[1]), 2: x.shape[:1]} | ({} if bias is None else {3: w.shape[:2]})
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted))


def _linear_numpy(x: Any, w: Any, experts: Any, bias: Any = None, *, out_dtype: str | None, tolerates: str | None) -> Any:
    out = np.empty((len(x), w.shape[1]), np.float32)
    for e in np.unique(experts):
        out[experts == e] = x[experts == e].astype(np.float32) @ w[e].astype(np.float32).T
    if bias is not None:
        out += bias[experts].astype(np.float32)
    return out.astype(x.dtype if out_dtype is None else DType(out_dtype).numpy)


# out[j] = x[j] @ weight[experts[j]].T + bias[experts[j]]. Attributes mean the same as for `linear`.
EXPERT_LINEAR = define(
    "expert_linear",
    "x, weight, experts, bias?",
    _linear_type,
    _linear_numpy,
    _linear_nest,
    {"out_dtype": None, "tolerates": None},
    indices=OF_WEIGHT,
)


def _by_expert(experts: Any, size: int, dtype: str, of_expert: Callable[[int, Any], Any]) -> Any:
    """Return the result, [rows, size]. `of_expert(e, mask)` computes the rows of the result that chose expert `e`, which `mask` selects."""
    out = np.empty((len(experts), size), DType(dtype).numpy)
    for e in np.unique(experts):
        out[experts == e] = of_expert(e, experts == e)
    return out


# --- expert_integer_linear ---------------------------------------------------------------------------------------------


def _integer_numpy(q: Any, scale: Any, total: Any, panels: Any, weight_scale: Any, experts: Any, *others: Any, **attrs: Any) -> Any:
    def of_expert(e: int, of: Any) -> Any:
        own = [other[e] for other in others]
        if attrs["has_offset"]:  # the operand `sum` has an entry per row, not per expert
            sums = 1 if attrs["in_units"] else 0
            own[sums] = others[sums][of]
        return integer_numpy(q[of], scale[of], total[of], panels[e], weight_scale[e], *own, **attrs)

    return _by_expert(experts, attrs["size"], attrs["dtype"], of_expert)


# Like `integer_linear`, but with panels [experts, panels, ...]: each row multiplies the panels of its expert.
EXPERT_INTEGER_LINEAR = define(
    "expert_integer_linear",
    "q, scale, total, panels, weight_scale, experts, unit?, sum?, offset?, offset_unit?, bias?",
    partial(integer_type, chooses=True),
    _integer_numpy,
    partial(integer_nest, chooses=True),
    {"format": "panel8", "size": REQUIRED, "dtype": "f32", "centred": True, "in_units": False, "has_offset": False},
    relations=integer_relations,
    indices=OF_PANELS,
)


# --- expert_widened_linear ---------------------------------------------------------------------------------------------


def _widened_numpy(*args: Any, size: int, dtype: str) -> Any:
    of_rows, of_experts, (experts, *bias) = args[:3], args[3:6], args[6:]

    def of_expert(e: int, of: Any) -> Any:
        return widened_numpy(*(x[of] for x in of_rows), *(x[e] for x in (*of_experts, *bias)), size=size, dtype=dtype)

    return _by_expert(experts, size, dtype, of_expert)


# Like `widened_linear`, but with panels [experts, panels, ...]: each row multiplies the panels of its expert.
EXPERT_WIDENED_LINEAR = define(
    "expert_widened_linear",
    "planes, scale, two_planes, panels, multipliers, channel_scale, experts, bias?",
    partial(widened_type, chooses=True),
    _widened_numpy,
    partial(widened_nest, chooses=True),
    {"size": REQUIRED, "dtype": "f32"},
    relations=widened_relations,
    indices=OF_PANELS,
)
