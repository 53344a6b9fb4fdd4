"""Elementwise operators: arithmetic, comparisons, logic, activations and other functions. Operands broadcast as in NumPy. All tensor
operands have the same element type, except the condition of `where`. A scalar operand is converted to that type."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Const, Scalar
from compiler.ir.loops.write import (
    Kernel,
    cast,
    const,
    cos,
    equal,
    erf,
    exp,
    floor,
    log,
    maximum,
    minimum,
    not_equal,
    power,
    round_half_even,
    rsqrt,
    select,
    sin,
    sqrt,
    tanh,
)
from compiler.ir.op import REQUIRED, Deduce, OpDef
from compiler.ir.types import ObjectType, ScalarType, TensorType, Type
from compiler.ops.broadcast import broadcast_fits, broadcast_tensors, element, output
from compiler.ops.operands import dtype_attr, same_dtype, tensor_operand
from compiler.ops.tables import Nest, Operands, define

# --- annotations -------------------------------------------------------------------------------------------------------

KINDS: Mapping[str, Callable[[DType], bool]] = {
    "floats": lambda d: d.is_float,
    "integers": lambda d: d.is_int,
    "numbers": lambda d: d is not DType.BOOL,
    "bools or integers": lambda d: not d.is_float,
    "any elements": lambda _: True,
}


def _deduce(kind: str, result: DType | None = None) -> Deduce:
    """Return a deduction rule for operands that share one element type of this kind. The result has the same element type, or `result` if
    that is given."""

    def deduce(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
        dtype = _common_dtype(args)
        if dtype is not None and not KINDS[kind](dtype):
            raise AnnotationError(f"elements are {dtype}, expected {kind}; cast them first")
        return broadcast_tensors(args, result or dtype)

    return deduce


def _common_dtype(args: Sequence[Type]) -> DType | None:
    """Return the element type that the tensors share, or None if it is unknown. Raise AnnotationError if tensors have different element
    types, or if a scalar among the operands does not fit into the shared type."""
    dtype = same_dtype([a for a in args if isinstance(a, TensorType)])
    for arg in args:
        if isinstance(arg, ScalarType) and arg.dtype is not None and dtype is not None and not _takes(dtype, arg):
            raise AnnotationError(f"operand {arg} does not fit into the element type {dtype}")
    return dtype


def _takes(dtype: DType, scalar: ScalarType) -> bool:
    """Whether a scalar may be converted to an element type: a bool only to bool, a float only to floats, and an integer of known value to
    an integer type only if its value is in the range of the type."""
    if scalar.dtype is DType.BOOL or dtype is DType.BOOL:
        return scalar.dtype is dtype
    if dtype.is_float:
        return True
    if scalar.dtype is None or scalar.dtype.is_float:
        return scalar.dtype is None
    value = scalar.value
    return value is None or not value.is_const or dtype.holds(value.const)


# --- loop nests and NumPy functions ------------------------------------------------------------------------------------


def _nest(formula: Callable[..., Scalar]) -> Callable[[Operands], Nest]:
    """Return a function that legalizes an operator to a loop nest. The nest computes floats smaller than f32 in f32 and rounds once per
    operator."""

    def legalize(operands: Operands) -> Nest:
        k = Kernel()
        out = k.array(output(operands))
        dtype = next(p.dtype for p in operands.places if isinstance(p, Buffer))
        with k.nest(out.shape) as at:
            elements = [element(p, at, dtype, out.shape) for p in operands.places]
            out[at] = cast(formula(*(_widened(e, dtype.accumulator) for e in elements)), out.dtype)
        return Nest((out.buffer,), k.body(), fits=broadcast_fits(operands, out.shape))

    return legalize


def _widened(value: Scalar, dtype: DType) -> Scalar:
    """Widen an operand to `dtype`. A literal is first rounded to the element type of the tensors."""
    if isinstance(value, Const):
        return const(float(value.dtype.numpy.type(value.value)) if dtype.is_float else value.value, dtype)
    return cast(value, dtype)


def _numpy(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return the NumPy interpretation of a formula. Operands are converted to the tensors' element type, floats smaller than f32 are
    computed in f32, and the result is rounded once."""

    def interpret(*values: Any) -> Any:
        dtype = next(v.dtype for v in values if isinstance(v, np.ndarray))
        wide = DType.from_numpy(dtype).accumulator.numpy
        result = np.asarray(formula(*(np.asarray(v).astype(dtype).astype(wide) for v in values)))
        return result if result.dtype == np.bool_ else result.astype(dtype)

    return interpret


# --- formulas ----------------------------------------------------------------------------------------------------------


def sigmoid(x: Scalar) -> Scalar:
    return 1.0 / (1.0 + exp(-x))


def silu(x: Scalar) -> Scalar:
    return x / (1.0 + exp(-x))


def gelu(x: Scalar) -> Scalar:
    """x * (1 + erf(x / sqrt 2)) / 2"""
    return x * 0.5 * (1.0 + erf(x * 0.5**0.5))


def gelu_tanh(x: Scalar) -> Scalar:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2"""
    return x * 0.5 * (1.0 + tanh((x + x * x * x * 0.044715) * (2.0 / np.pi) ** 0.5))


def numpy_erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def numpy_sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def numpy_gelu(x: Any) -> Any:
    return x * 0.5 * (1 + numpy_erf(x * 0.5**0.5))


def numpy_gelu_tanh(x: Any) -> Any:
    return x * 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


# --- the operators -----------------------------------------------------------------------------------------------------


def _binary(name: str, formula: Callable[..., Scalar], numpy: Callable[..., Any], kind: str = "numbers") -> OpDef:
    return define(name, "a, b", _deduce(kind), _numpy(numpy), _nest(formula))


def _unary(name: str, formula: Callable[[Scalar], Scalar], numpy: Callable[..., Any], kind: str = "floats") -> OpDef:
    return define(name, "x", _deduce(kind), _numpy(numpy), _nest(formula))


def _comparison(name: str, formula: Callable[..., Scalar], numpy: Callable[..., Any], kind: str = "numbers") -> OpDef:
    return define(name, "a, b", _deduce(kind, DType.BOOL), _numpy(numpy), _nest(formula))


ADD = _binary("add", operator.add, np.add)
SUBTRACT = _binary("subtract", operator.sub, np.subtract)
MULTIPLY = _binary("multiply", operator.mul, np.multiply)
DIVIDE = _binary("divide", operator.truediv, np.divide, "floats")
FLOOR_DIVIDE = _binary("floor_divide", operator.floordiv, np.floor_divide, "integers")
MODULO = _binary("modulo", operator.mod, np.mod, "integers")
POWER = _binary("power", power, np.power, "floats")
MINIMUM = _binary("minimum", minimum, np.minimum)
MAXIMUM = _binary("maximum", maximum, np.maximum)

LESS = _comparison("less", operator.lt, np.less)
LESS_EQUAL = _comparison("less_equal", operator.le, np.less_equal)
GREATER = _comparison("greater", operator.gt, np.greater)
GREATER_EQUAL = _comparison("greater_equal", operator.ge, np.greater_equal)
EQUAL = _comparison("equal", equal, np.equal, "any elements")
NOT_EQUAL = _comparison("not_equal", not_equal, np.not_equal, "any elements")

LOGICAL_AND = _binary("logical_and", operator.and_, np.bitwise_and, "bools or integers")  # bitwise on integers
LOGICAL_OR = _binary("logical_or", operator.or_, np.bitwise_or, "bools or integers")
LOGICAL_XOR = _binary("logical_xor", operator.xor, np.bitwise_xor, "bools or integers")
LOGICAL_NOT = _unary("logical_not", operator.invert, np.invert, "bools or integers")

NEGATIVE = _unary("negative", operator.neg, np.negative, "numbers")
ABS = _unary("abs", abs, np.abs, "numbers")
EXP = _unary("exp", exp, np.exp)
LOG = _unary("log", log, np.log)
SQRT = _unary("sqrt", sqrt, np.sqrt)
RSQRT = _unary("rsqrt", rsqrt, lambda x: 1 / np.sqrt(x))
TANH = _unary("tanh", tanh, np.tanh)
ERF = _unary("erf", erf, numpy_erf)
SIN = _unary("sin", sin, np.sin)
COS = _unary("cos", cos, np.cos)
FLOOR = _unary("floor", floor, np.floor)
ROUND = _unary("round", round_half_even, np.rint)
SIGMOID = _unary("sigmoid", sigmoid, numpy_sigmoid)
SILU = _unary("silu", silu, lambda x: x * numpy_sigmoid(x))
RELU = _unary("relu", lambda x: maximum(x, 0), lambda x: np.maximum(x, 0), "numbers")
GELU = _unary("gelu", gelu, numpy_gelu)
GELU_TANH = _unary("gelu_tanh", gelu_tanh, numpy_gelu_tanh)
CLIP = define(
    "clip",
    "x, low, high",
    _deduce("numbers"),
    _numpy(lambda x, low, high: np.minimum(np.maximum(x, low), high)),
    _nest(lambda x, low, high: minimum(maximum(x, low), high)),
)


# --- where and cast: operands of different types -----------------------------------------------------------------------


def _where_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    cond, a, b = args
    if not isinstance(cond, TensorType | ScalarType | ObjectType) or getattr(cond, "dtype", None) not in (None, DType.BOOL):
        raise AnnotationError(f"the condition is {cond}, expected bool")
    if not any(isinstance(x, TensorType | ObjectType) for x in (a, b)):
        raise AnnotationError(f"the two values are {a} and {b}, expected at least one tensor, which gives the element type")
    return broadcast_tensors(args, _common_dtype((a, b)))


def _where_nest(operands: Operands) -> Nest:
    k = Kernel()
    out = k.array(output(operands))
    cond, a, b = operands.places
    with k.nest(out.shape) as at:
        taken = element(cond, at, DType.BOOL, out.shape)
        out[at] = select(taken, element(a, at, out.dtype, out.shape), element(b, at, out.dtype, out.shape))
    return Nest((out.buffer,), k.body(), fits=broadcast_fits(operands, out.shape))


def _where_numpy(cond: Any, a: Any, b: Any) -> Any:
    dtype = next(v.dtype for v in (a, b) if isinstance(v, np.ndarray))
    return np.where(cond, np.asarray(a).astype(dtype), np.asarray(b).astype(dtype))


WHERE = define("where", "cond, a, b", _where_type, _where_numpy, _where_nest)


def _cast_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    dtype = dtype_attr(attrs)
    x = tensor_operand(args, 0, "x")
    return TensorType(x.shape, dtype, x.ndim)


def numpy_cast(value: Any, dtype: DType) -> Any:
    """Cast as the compiled code does. A float becomes an integer by truncation. A number beyond the range of the integer type becomes the
    nearest end of the range, and NaN becomes 0."""
    if not (dtype.is_int and value.dtype.kind in "fV"):  # V: floats of types that NumPy itself lacks, such as bf16
        return value.astype(dtype.numpy)
    ends = np.iinfo(dtype.numpy)
    wide = np.trunc(np.nan_to_num(value.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
    inside = (wide > ends.min) & (wide < ends.max)
    outside = np.where(wide >= ends.max, np.int64(ends.max), np.int64(ends.min))
    return np.where(inside, np.where(inside, wide, 0).astype(np.int64), outside).astype(dtype.numpy)


def _cast_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, x = k.arrays(output(operands), operands.buffer(0))
    with k.nest(out.shape) as at:
        out[at] = cast(x[at], out.dtype)
    return Nest((out.buffer,), k.body())


CAST = define("cast", "x", _cast_type, lambda x, dtype: numpy_cast(x, DType(dtype)), _cast_nest, {"dtype": REQUIRED})
