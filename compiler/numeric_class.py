"""Name the numeric class of a program on a target. On all targets where a program has the same class, it computes the same bits from the
same weights.

portable      products multiply integers, or sum f32 in one fixed order, on machines that multiply and add with one rounding.
unfused       As `portable`, but a multiply-add rounds twice: on WebAssembly without relaxed SIMD.
bf16          Some products round rows to bf16, and instructions of AMD's CPUs for bf16 multiply these rows.
amx           As `bf16`, but on AMX, Intel's matrix unit, where products of integers also divide their sums into other groups.
sm_90a, ...   A generation of GPUs: their tensor cores compute the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.ir.dtypes import DType
from compiler.ir.graph.values import Call
from compiler.ir.graph.visit import walk_values
from compiler.ir.module import IRModule
from compiler.machine.target import GPU, Target
from compiler.ops.attention.paged import PAGED_ATTENTION
from compiler.ops.products.experts import EXPERT_LINEAR
from compiler.ops.products.matmul import LINEAR

PORTABLE, UNFUSED = "portable", "unfused"


def numeric_class(module: IRModule, target: Target) -> str:
    """Return the class of a program on a target, by its name in the table above."""
    if target.system == GPU:
        return target.name
    if not target.has_fma:
        return UNFUSED
    return (target.bf16_unit if tolerates_rounding(module) else None) or PORTABLE


def tolerates_rounding(module: IRModule) -> bool:
    """Return whether some product or attention of the program may round its operands to bf16."""
    return any(isinstance(value, Call) and _tolerates(value) for f in module.graph_functions.values() for value in walk_values(f.body))


def _tolerates(call: Call) -> bool:
    attrs: Mapping[str, Any] = call.attrs
    if call.op is PAGED_ATTENTION:
        return not attrs.get("exact", False)
    return call.op in (LINEAR, EXPERT_LINEAR) and attrs.get("tolerates") == str(DType.BF16)
