"""Random numbers without a state: Philox 4x32-10 (Salmon et al., 2011) of a key and a counter.

Element `i` of a tensor (row-major) is word 0 of the block with counter (i, 0, 0, 0), and the key is the seed's two halves. So a number
depends on its seed and its place alone, on every machine and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Fn, Scalar
from compiler.ir.types import ObjectType, ScalarType, TensorType, Type
from compiler.ops.broadcast import element, output
from compiler.ops.manipulate import wanted_shape
from compiler.ops.nest import apply, cast, const, fill, index_value
from compiler.ops.tables import Nest, Operands, define

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF

I64 = DType.I64


def _uniform_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    shape, seed = wanted_shape(args, 0), args[1]
    if not isinstance(seed, ScalarType | ObjectType) or (isinstance(seed, ScalarType) and seed.dtype not in (None, I64)):
        raise AnnotationError(f"seed is {seed}, wants a scalar of type i64")
    return TensorType(shape.dims, DType.F32, shape.ndim)


# A word is an i64 that holds 0 .. 2^32 - 1. The product of two words may pass 2^63 and wrap, but its bits are those of the unsigned one.


def _low(x: Scalar) -> Scalar:
    return apply(Fn.AND, x, const(LOW, I64))


def _high(x: Scalar) -> Scalar:
    return _low(apply(Fn.SHR, x, const(32, I64)))


def _philox(counter: Scalar, seed: Scalar) -> Scalar:
    """Word 0 of a block."""
    zero = const(0, I64)
    words = [_low(counter), _high(counter), zero, zero]
    keys = [_low(seed), _high(seed)]
    for number in range(ROUNDS):
        if number:
            keys = [_low(apply(Fn.ADD, k, const(step, I64))) for k, step in zip(keys, KEY_STEPS, strict=True)]
        first, second = (apply(Fn.MUL, words[2 * i], const(m, I64)) for i, m in enumerate(MULTIPLIERS))
        words = [
            apply(Fn.XOR, apply(Fn.XOR, _high(second), words[1]), keys[0]),
            _low(second),
            apply(Fn.XOR, apply(Fn.XOR, _high(first), words[3]), keys[1]),
            _low(first),
        ]
    return words[0]


def _uniform_nest(operands: Operands) -> Nest:
    out, seed = output(operands), element(operands.places[1], (), I64)

    def value(*ijk: Dim) -> Scalar:
        place = Dim.of(0)
        for index, extent in zip(ijk, out.shape, strict=True):
            place = place * extent + index
        word = _philox(index_value(place), seed)
        top = apply(Fn.SHR, word, const(8, I64))  # 24 bits: every value is a float
        return apply(Fn.MUL, cast(top, DType.F32), const(2.0**-24, DType.F32))

    return Nest((out,), fill(out, value))


def numpy_philox(counters: Any, seed: int) -> Any:
    words = [counters & np.uint64(LOW), counters >> np.uint64(32), np.zeros_like(counters), np.zeros_like(counters)]
    keys = [seed & LOW, (seed >> 32) & LOW]
    for _ in range(ROUNDS):
        first, second = (words[2 * i] * np.uint64(m) for i, m in enumerate(MULTIPLIERS))
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ np.uint64(keys[0]),
            second & np.uint64(LOW),
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(keys[1]),
            first & np.uint64(LOW),
        ]
        keys = [(k + step) & LOW for k, step in zip(keys, KEY_STEPS, strict=True)]
    return words[0].astype(np.uint32)


def _uniform_numpy(shape: tuple[int, ...], seed: Any) -> Any:
    words = numpy_philox(np.arange(int(np.prod(shape)), dtype=np.uint64), int(seed))
    return ((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)).reshape(shape)


# f32 in [0, 1), 24 bits each.
UNIFORM = define("uniform", "shape, seed", _uniform_type, _uniform_numpy, _uniform_nest)
