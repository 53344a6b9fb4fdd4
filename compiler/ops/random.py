"""Uniform random numbers without a state: Philox 4x32-10 (Salmon et al., 2011) of a key and a counter.

Element `i` of a tensor (in row-major order) is made from the upper 24 bits of word 0 of the block with counter (low half of i, high half of
i, 0, 0). The two halves of the seed are the key. So an element depends only on the seed and its index, and is the same on every machine and
with any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import row_major
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, const, index
from compiler.ir.types import ObjectType, ScalarType, TensorType, Type
from compiler.ops.broadcast import element, output
from compiler.ops.manipulate import wanted_shape
from compiler.ops.tables import Nest, Operands, define
from compiler.sampling.philox import MULTIPLIERS, NUM_ROUNDS, WEYL, philox4x32

LOW = 0xFFFFFFFF

I64 = DType.I64


def _uniform_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    shape, seed = wanted_shape(args, 0), args[1]
    if not isinstance(seed, ScalarType | ObjectType) or (isinstance(seed, ScalarType) and seed.dtype not in (None, I64)):
        raise AnnotationError(f"seed is {seed}, expected a scalar of type i64")
    return TensorType(shape.dims, DType.F32, shape.ndim)


# Each word is an i64 that holds 0 .. 2^32 - 1. The product of two words may exceed 2^63 and wrap, but its bits equal those of the unsigned
# product.


def _low(x: Scalar) -> Scalar:
    return x & LOW


def _high(x: Scalar) -> Scalar:
    return _low(x >> 32)


def _philox(counter: Scalar, seed: Scalar) -> Scalar:
    """Return word 0 of the Philox block of this counter."""
    zero = const(0, I64)
    words: list[Scalar] = [_low(counter), _high(counter), zero, zero]
    keys = [_low(seed), _high(seed)]
    for number in range(NUM_ROUNDS):
        if number:
            keys = [_low(key + step) for key, step in zip(keys, WEYL, strict=True)]
        first, second = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [_high(second) ^ words[1] ^ keys[0], _low(second), _high(first) ^ words[3] ^ keys[1], _low(first)]
    return words[0]


def _uniform_nest(operands: Operands) -> Nest:
    k = Kernel()
    out, seed = k.array(output(operands)), element(operands.places[1], (), I64)
    with k.nest(out.shape) as at:
        bits = _philox(index(row_major(at, out.shape)), seed) >> 8  # 24 bits, which an f32 represents exactly
        out[at] = cast(bits, DType.F32) * 2.0**-24
    return Nest((out.buffer,), k.body())


def _uniform_numpy(shape: tuple[int, ...], seed: Any) -> Any:
    counters = np.arange(int(np.prod(shape)), dtype=np.uint64)
    words = philox4x32((counters & LOW, counters >> 32, 0, 0), (int(seed) & LOW, (int(seed) >> 32) & LOW))
    return ((words[0] >> 8).astype(np.float32) * np.float32(2.0**-24)).reshape(shape)


# Returns numbers of type f32 in [0, 1), each with 24 random bits.
UNIFORM = define("uniform", "shape, seed", _uniform_type, _uniform_numpy, _uniform_nest)
