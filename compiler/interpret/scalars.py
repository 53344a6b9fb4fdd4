"""Scalar functions in NumPy. Functions of f16 and bf16 are computed in f32 or f64, and the result of every function is rounded to its
type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.ir.fma import numpy_fma
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ops.elementwise import numpy_erf

Array = NDArray[Any]


def _wide(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function that computes `fn` in f64 and rounds once, so that the result is as accurate as the type allows."""
    return lambda x: fn(x.astype(np.float64)).astype(x.dtype)


MEANING: dict[Fn, Callable[..., Array]] = {
    Fn.ADD: np.add,
    Fn.SUB: np.subtract,
    Fn.MUL: np.multiply,
    Fn.DIV: np.divide,
    Fn.FLOORDIV: np.floor_divide,
    Fn.MOD: np.mod,
    Fn.MIN: np.minimum,
    Fn.MAX: np.maximum,
    Fn.POW: lambda a, b: np.power(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype),
    Fn.FMA: numpy_fma,
    Fn.NEG: np.negative,
    Fn.ABS: np.abs,
    Fn.EXP: _wide(np.exp),
    Fn.EXP2: _wide(np.exp2),
    Fn.LOG: _wide(np.log),
    Fn.SQRT: np.sqrt,
    Fn.RSQRT: lambda x: (x.dtype.type(1) / np.sqrt(x)).astype(x.dtype),
    Fn.TANH: _wide(np.tanh),
    Fn.ERF: _wide(numpy_erf),
    Fn.SIN: _wide(np.sin),
    Fn.COS: _wide(np.cos),
    Fn.FLOOR: np.floor,
    Fn.ROUND: np.rint,
    Fn.LT: np.less,
    Fn.LE: np.less_equal,
    Fn.EQ: np.equal,
    Fn.NE: np.not_equal,
    Fn.AND: np.bitwise_and,
    Fn.OR: np.bitwise_or,
    Fn.XOR: np.bitwise_xor,
    Fn.NOT: np.invert,
    Fn.SHL: np.left_shift,
    Fn.SHR: np.right_shift,
    Fn.BITS: lambda x: x.view(np.int32),
    Fn.OF_BITS: lambda x: x.view(np.float32),
    Fn.SELECT: np.where,
}


def fold(fn: ReduceFn, values: Array, axis: int) -> Array:
    """Reduce one axis and keep it with extent 1. ARGMAX and ARGMIN return the index of the first extreme value, as i64."""
    match fn:
        case ReduceFn.SUM:
            return np.sum(values, axis=axis, keepdims=True, dtype=values.dtype)
        case ReduceFn.PROD:
            return np.prod(values, axis=axis, keepdims=True, dtype=values.dtype)
        case ReduceFn.MAX:
            return np.max(values, axis=axis, keepdims=True)
        case ReduceFn.MIN:
            return np.min(values, axis=axis, keepdims=True)
        case ReduceFn.ANY:
            return np.any(values, axis=axis, keepdims=True)
        case ReduceFn.ALL:
            return np.all(values, axis=axis, keepdims=True)
        case ReduceFn.ARGMAX:
            return np.argmax(values, axis=axis, keepdims=True).astype(np.int64)
        case ReduceFn.ARGMIN:
            return np.argmin(values, axis=axis, keepdims=True).astype(np.int64)
