"""Stateless random numbers: Philox 4x32-10 (Salmon et al., 2011) of a key and a counter.

Element `i` of a tensor (row-major) is word 0 of the block with counter (i, 0, 0, 0); the two halves of the seed are the key. So a number
depends on nothing but the seed and its index: it is the same on every machine and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Scalar
from compiler.ir.types import ObjectType, ScalarType, TensorType, Type
from compiler.ir.write import Kernel, cast, const, index
from compiler.ops.broadcast import element, output
from compiler.ops.manipulate import wanted_shape
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
    return x & LOW


def _high(x: Scalar) -> Scalar:
    return _low(x >> 32)


def _philox(counter: Scalar, seed: Scalar) -> Scalar:
    """Word 0 of a block."""
    zero = const(0, I64)
    words: list[Scalar] = [_low(counter), _high(counter), zero, zero]
    keys = [_low(seed), _high(seed)]
    for number in range(ROUNDS):
        if number:
            keys = [_low(key + step) for key, step in zip(keys, KEY_STEPS, strict=True)]
        first, second = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [_high(second) ^ words[1] ^ keys[0], _low(second), _high(first) ^ words[3] ^ keys[1], _low(first)]
    return words[0]


def _uniform_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, seed = k.array(output(operands)), element(operands.places[1], (), I64)
    with k.nest(out.shape) as at:
        counter = Dim.of(0)
        for i, extent in zip(at, out.shape, strict=True):
            counter = counter * extent + i
        bits = _philox(index(counter), seed) >> 8  # 24 of them, which an f32 holds exactly
        out[at] = cast(bits, DType.F32) * 2.0**-24
    return Nest((out.buffer,), k.body())


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
