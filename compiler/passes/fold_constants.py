"""Evaluate values that depend only on constants, with the interpreter.

Before: all operands of some pure operators and loop nests are constants, at least one of them a tensor. After: their results are constants,
too. A call stays if an attribute contains a dimension, if its annotation has variables, or if its result is no tensor. It also stays if its
result is larger than `most_bytes` and larger than all its operands together, so folding does not bloat the program. A call with only
numbers as operands, such as one that fills a tensor with a number, is not folded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from compiler.interpret.graph import Interpreter
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Constant, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Block, Body, Function, Value
from compiler.ir.graph.values import Call, CallTir
from compiler.ir.graph.visit import attr_dims
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType, vars_of
from compiler.passes.eliminate_dead_code import has_effect
from compiler.passes.rewrite import rewrite_module


@dataclass(frozen=True, slots=True)
class FoldConstants:
    most_bytes: int = 1 << 20  # a result of at most this size is always folded

    def __call__(self, module: IRModule) -> IRModule:
        def replace(_: Builder, binding: Binding, value: Value) -> Value | None:
            if not isinstance(value, Call | CallTir) or has_effect(value, module) or not isinstance(binding.var.type, TensorType):
                return None
            if not _constant(value) or vars_of(binding.var.type):
                return None
            most = max(self.most_bytes, sum(a.data.nbytes for a in value.args if isinstance(a, Constant)))
            if _least_bytes(binding.var.type) > most:
                return None
            result = evaluate(module, value, binding.var)
            return Constant(result) if result.nbytes <= most else None

        return rewrite_module(module, replace)


def _least_bytes(type_: TensorType) -> int:
    """Return the number of bytes of a tensor, or 0 if its annotation has no shape or no element type."""
    if type_.shape is None or type_.dtype is None:
        return 0
    return prod(d.const for d in type_.shape) * type_.dtype.num_bytes


def _constant(value: Call | CallTir) -> bool:
    """Whether all operands are constants, at least one of them is a tensor, and no attribute contains a dimension."""

    def known(atom: object) -> bool:
        match atom:
            case Constant():
                return True
            case ShapeValue(dims=dims):
                return all(d.is_const for d in dims)
            case ScalarValue(value=value):
                return not isinstance(value, Dim) or value.is_const
            case _:
                return False

    symbolic = any(True for _ in attr_dims(value)) if isinstance(value, Call) else False
    return not symbolic and any(isinstance(a, Constant) for a in value.args) and all(map(known, value.args))


def evaluate(module: IRModule, value: Value, var: Var) -> np.ndarray:
    """Evaluate a value by interpreting it as a separate program. `var` is the variable of its binding."""
    body = Body((Block((Binding(var, value),)),), var)
    program = module.update({"": Function((), body, var.type)})
    return np.asarray(Interpreter(program).call(""))
