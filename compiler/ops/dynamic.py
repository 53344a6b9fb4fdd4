"""Operators whose result size depends on data. These operators are host routines. The annotation of a result has no extents; a match_cast
of the result names the extents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiler.ir.dtypes import DType
from compiler.ir.op import OpDef
from compiler.ir.types import TensorType, Type
from compiler.ops.operands import tensor_operand
from compiler.ops.tables import Library, define
from runtime.library import routine

Attrs = Mapping[str, Any]


def _host(name: str, deduce: Callable[[tuple[Type, ...], Attrs], Type]) -> OpDef:
    return define(name, "x", deduce, lambda x: routine(name).compute(x)[0], lambda _: Library(name))


def _unique_type(args: tuple[Type, ...], _: Attrs) -> Type:
    return TensorType(None, tensor_operand(args, 0, "x").dtype, 1)


def _nonzero_type(args: tuple[Type, ...], _: Attrs) -> Type:
    """Deduce the annotation of an i64 tensor [rank, count]. Only the count is unknown, but an annotation has all extents or none, so this
    annotation has none."""
    tensor_operand(args, 0, "x")
    return TensorType(None, DType.I64, 2)


UNIQUE = _host("unique", _unique_type)  # the distinct elements, in ascending order
NONZERO = _host("nonzero", _nonzero_type)  # the indices of the elements that are not zero, in row-major order
