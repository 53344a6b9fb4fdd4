"""Operators that compute each element of the result from the elements at the same place: arithmetic, comparison, logic, functions.
Operands broadcast as in NumPy and have one element type; a scalar operand takes the tensor's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Buffer, Const, Fn, Load, Scalar, ScalarParam, dtype_of
from compiler.ir.op import REQUIRED, Deduce, OpDef
from compiler.ir.prove import prove_eq
from compiler.ir.types import ObjectType, ScalarType, TensorType, Type
from compiler.ops.nest import accumulator, apply, cast, const, fill
from compiler.ops.tables import Nest, Operands, Place, define

# --- shapes ------------------------------------------------------------------------------------------------------------


def broadcast_dims(a: Dim, b: Dim) -> Dim | None:
    """The dimension that both broadcast to; None when it cannot be told before the values are known."""
    if prove_eq(a, b) or (b.is_const and b.const == 1):
        return a
    if a.is_const and a.const == 1:
        return b
    if a.is_const and b.is_const:
        raise AnnotationError(f"dimensions {a} and {b} do not broadcast")
    # One side is a constant other than 1: only that constant, or a 1 on the other side, can be meant.
    if a.is_const:
        return a
    if b.is_const:
        return b
    return None


def broadcast_shapes(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    rank = max(len(a), len(b))
    one = Dim.of(1)
    padded = zip((one,) * (rank - len(a)) + a, (one,) * (rank - len(b)) + b, strict=True)
    dims = [broadcast_dims(x, y) for x, y in padded]
    return tuple(d for d in dims if d is not None) if None not in dims else None


def broadcast_tensors(args: tuple[Type, ...], dtype: DType | None) -> Type:
    """The annotation of an elementwise result of this element type."""
    tensors = [a for a in args if isinstance(a, TensorType)]
    if any(isinstance(a, ObjectType) for a in args):
        return ObjectType()
    if not tensors:
        raise AnnotationError(f"wants a tensor among its operands, has {', '.join(map(str, args))}")
    if any(t.ndim is None for t in tensors):
        return TensorType(None, dtype)
    shape: tuple[Dim, ...] | None = ()
    for t in tensors:
        shape = broadcast_shapes(shape, t.shape) if shape is not None and t.shape is not None else None
    return TensorType(shape, dtype, max(t.ndim or 0 for t in tensors))


def common_dtype(args: tuple[Type, ...]) -> DType | None:
    dtypes = dict.fromkeys(a.dtype for a in args if isinstance(a, TensorType) and a.dtype is not None)
    if len(dtypes) > 1:
        raise AnnotationError(f"operands have element types {', '.join(dtypes)}; cast them to one")
    return next(iter(dtypes), None)


def _same(args: tuple[Type, ...], _: Any) -> Type:
    return broadcast_tensors(args, common_dtype(args))


def _bool(args: tuple[Type, ...], _: Any) -> Type:
    common_dtype(args)
    return broadcast_tensors(args, DType.BOOL)


def _float(args: tuple[Type, ...], _: Any) -> Type:
    dtype = common_dtype(args)
    if dtype is not None and not dtype.is_float:
        raise AnnotationError(f"wants floats, has {dtype}; cast first")
    return broadcast_tensors(args, dtype)


# --- loops -------------------------------------------------------------------------------------------------------------


def element(place: Place | None, ijk: tuple[Dim, ...], dtype: DType) -> Scalar:
    """The operand's element that broadcasting puts at `ijk` of the result; a scalar takes the type of the tensors."""
    if isinstance(place, Const):
        return const(place.value, dtype)
    if isinstance(place, ScalarParam):
        return cast(place, dtype)
    assert place is not None, "a shape has no elements"
    inner = ijk[len(ijk) - len(place.shape) :]
    return Load(place, tuple(Dim.of(0) if d.is_const and d.const == 1 else i for d, i in zip(place.shape, inner, strict=True)))


def output(operands: Operands, name: str = "out") -> Buffer:
    out = operands.out
    assert isinstance(out, TensorType) and out.shape is not None and out.dtype is not None
    return Buffer(name, out.shape, out.dtype)


def operand_dtype(operands: Operands) -> DType:
    return next(p.dtype for p in operands.places if isinstance(p, Buffer))


def _nest(formula: Callable[..., Scalar]) -> Callable[[Operands], Nest]:
    """One loop nest; floats smaller than f32 are computed in f32 and rounded once per operator."""

    def legalize(operands: Operands) -> Nest:
        out, dtype = output(operands), operand_dtype(operands)
        wide = accumulator(dtype)

        def value(*ijk: Dim) -> Scalar:
            return cast(formula(*(cast(element(p, ijk, dtype), wide) for p in operands.places)), out.dtype)

        return Nest((out,), fill(out, value))

    return legalize


def _numpy(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The same in NumPy: operands take the tensors' element type, small floats are widened, the result is rounded once."""

    def interpret(*values: Any, **_: Any) -> Any:
        dtype = next(v.dtype for v in values if isinstance(v, np.ndarray))
        wide = accumulator(DType.from_numpy(dtype)).numpy
        result = np.asarray(formula(*(np.asarray(v).astype(dtype).astype(wide) for v in values)))
        return result if result.dtype == np.bool_ else result.astype(dtype)

    return interpret


# --- formulas ----------------------------------------------------------------------------------------------------------


def like(x: Scalar, value: float) -> Const:
    """A constant of the other operand's type."""
    return const(value, dtype_of(x))


def sigmoid(x: Scalar) -> Scalar:
    return apply(Fn.DIV, like(x, 1.0), apply(Fn.ADD, like(x, 1.0), apply(Fn.EXP, apply(Fn.NEG, x))))


def silu(x: Scalar) -> Scalar:
    return apply(Fn.DIV, x, apply(Fn.ADD, like(x, 1.0), apply(Fn.EXP, apply(Fn.NEG, x))))


def gelu(x: Scalar) -> Scalar:
    """x * (1 + erf(x / sqrt 2)) / 2"""
    inner = apply(Fn.ERF, apply(Fn.MUL, x, like(x, 0.5**0.5)))
    return apply(Fn.MUL, apply(Fn.MUL, x, like(x, 0.5)), apply(Fn.ADD, like(x, 1.0), inner))


def gelu_tanh(x: Scalar) -> Scalar:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2"""
    cube = apply(Fn.MUL, apply(Fn.MUL, apply(Fn.MUL, x, x), x), like(x, 0.044715))
    inner = apply(Fn.TANH, apply(Fn.MUL, apply(Fn.ADD, x, cube), like(x, (2.0 / np.pi) ** 0.5)))
    return apply(Fn.MUL, apply(Fn.MUL, x, like(x, 0.5)), apply(Fn.ADD, like(x, 1.0), inner))


def clip(x: Scalar, low: Scalar, high: Scalar) -> Scalar:
    return apply(Fn.MIN, apply(Fn.MAX, x, low), high)


def numpy_erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def numpy_sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def numpy_gelu(x: Any) -> Any:
    return x * 0.5 * (1 + numpy_erf(x * 0.5**0.5))


def numpy_gelu_tanh(x: Any) -> Any:
    return x * 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


# --- the table ---------------------------------------------------------------------------------------------------------


def _binary(name: str, fn: Fn, numpy: Callable[..., Any], deduce: Deduce = _same) -> OpDef:
    return define(name, deduce, _numpy(numpy), _nest(lambda a, b: apply(fn, a, b)))


def _unary(name: str, formula: Callable[[Scalar], Scalar], numpy: Callable[..., Any], deduce: Deduce = _float) -> OpDef:
    return define(name, deduce, _numpy(numpy), _nest(formula))


def _by(fn: Fn) -> Callable[[Scalar], Scalar]:
    return lambda x: apply(fn, x)


ADD = _binary("add", Fn.ADD, np.add)
SUBTRACT = _binary("subtract", Fn.SUB, np.subtract)
MULTIPLY = _binary("multiply", Fn.MUL, np.multiply)
DIVIDE = _binary("divide", Fn.DIV, np.divide, _float)
FLOOR_DIVIDE = _binary("floor_divide", Fn.FLOORDIV, np.floor_divide)
MODULO = _binary("modulo", Fn.MOD, np.mod)
POWER = _binary("power", Fn.POW, np.power, _float)
MINIMUM = _binary("minimum", Fn.MIN, np.minimum)
MAXIMUM = _binary("maximum", Fn.MAX, np.maximum)

LESS = _binary("less", Fn.LT, np.less, _bool)
LESS_EQUAL = _binary("less_equal", Fn.LE, np.less_equal, _bool)
EQUAL = _binary("equal", Fn.EQ, np.equal, _bool)
NOT_EQUAL = _binary("not_equal", Fn.NE, np.not_equal, _bool)
GREATER = define("greater", _bool, _numpy(np.greater), _nest(lambda a, b: apply(Fn.LT, b, a)))
GREATER_EQUAL = define("greater_equal", _bool, _numpy(np.greater_equal), _nest(lambda a, b: apply(Fn.LE, b, a)))
LOGICAL_AND = _binary("logical_and", Fn.AND, np.bitwise_and)  # bitwise on integers
LOGICAL_OR = _binary("logical_or", Fn.OR, np.bitwise_or)
LOGICAL_XOR = _binary("logical_xor", Fn.XOR, np.bitwise_xor)
LOGICAL_NOT = _unary("logical_not", _by(Fn.NOT), np.invert, _same)

NEGATIVE = _unary("negative", _by(Fn.NEG), np.negative, _same)
ABS = _unary("abs", _by(Fn.ABS), np.abs, _same)
EXP = _unary("exp", _by(Fn.EXP), np.exp)
LOG = _unary("log", _by(Fn.LOG), np.log)
SQRT = _unary("sqrt", _by(Fn.SQRT), np.sqrt)
RSQRT = _unary("rsqrt", _by(Fn.RSQRT), lambda x: 1 / np.sqrt(x))
TANH = _unary("tanh", _by(Fn.TANH), np.tanh)
ERF = _unary("erf", _by(Fn.ERF), numpy_erf)
SIN = _unary("sin", _by(Fn.SIN), np.sin)
COS = _unary("cos", _by(Fn.COS), np.cos)
FLOOR = _unary("floor", _by(Fn.FLOOR), np.floor)
ROUND = _unary("round", _by(Fn.ROUND), np.rint)
SIGMOID = _unary("sigmoid", sigmoid, numpy_sigmoid)
SILU = _unary("silu", silu, lambda x: x * numpy_sigmoid(x))
RELU = _unary("relu", lambda x: apply(Fn.MAX, x, like(x, 0)), lambda x: np.maximum(x, 0), _same)
GELU = _unary("gelu", gelu, numpy_gelu)
GELU_TANH = _unary("gelu_tanh", gelu_tanh, numpy_gelu_tanh)
CLIP = define("clip", _same, _numpy(lambda x, low, high: np.minimum(np.maximum(x, low), high)), _nest(clip))


# --- where and cast: operands of different types -----------------------------------------------------------------------


def _where_type(args: tuple[Type, ...], _: Any) -> Type:
    cond, a, b = args
    if isinstance(cond, TensorType) and cond.dtype not in (None, DType.BOOL):
        raise AnnotationError(f"the condition is {cond.dtype}, wants bool")
    return broadcast_tensors(args, common_dtype((a, b)))


def _where_nest(operands: Operands) -> Nest:
    out = output(operands)
    cond, a, b = operands.places
    return Nest(
        (out,),
        fill(
            out,
            lambda *ijk: apply(Fn.SELECT, element(cond, ijk, DType.BOOL), element(a, ijk, out.dtype), element(b, ijk, out.dtype)),
        ),
    )


def _where_numpy(cond: Any, a: Any, b: Any) -> Any:
    dtype = next(v.dtype for v in (a, b) if isinstance(v, np.ndarray))
    return np.where(cond, np.asarray(a).astype(dtype), np.asarray(b).astype(dtype))


WHERE = define("where", _where_type, _where_numpy, _where_nest)


def _cast_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    dtype = DType(attrs["dtype"])
    match args[0]:
        case TensorType(shape=shape, ndim=ndim):
            return TensorType(shape, dtype, ndim)
        case ScalarType():
            return ScalarType(dtype)
        case _:
            return TensorType(None, dtype)


def numpy_cast(value: Any, dtype: DType) -> Any:
    """Floats go to integers toward zero and saturate; NaN becomes 0."""
    value = np.asarray(value)
    if dtype.is_int and DType.from_numpy(value.dtype).is_float:
        info = np.iinfo(dtype.numpy)
        wide = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        inside = (wide > info.min) & (wide < info.max)
        ends = np.where(wide >= info.max, np.int64(info.max), np.int64(info.min))
        return np.where(inside, np.where(inside, wide, 0).astype(np.int64), ends).astype(dtype.numpy)
    return value.astype(dtype.numpy)


def _cast_nest(operands: Operands) -> Nest:
    out, source = output(operands), operands.buffer(0)
    return Nest((out,), fill(out, lambda *ijk: cast(Load(source, ijk), out.dtype)))


CAST = define("cast", _cast_type, lambda x, dtype: numpy_cast(x, DType(dtype)), _cast_nest, {"dtype": REQUIRED})
