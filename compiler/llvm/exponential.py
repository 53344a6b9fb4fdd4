"""The coefficients of exp, and code that computes exp of a number that is at most 0 with fewer instructions.

compiler/codegen/vector_math.py computes exp of any number. Both compute the same bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from compiler.llvm.ssa import Code, float_literal, multiply_add

EXP: Final = (  # compiler/codegen/fit_polynomials.py derives them; largest error of the fitted function: 3.1e-09
    0.4999999341249612,
    0.16666520107832172,
    0.04166839421192406,
    0.008368780410149143,
    0.001381446701148781,
)
LOG2_E: Final = 1.4426950408889634
LN2_HIGH: Final = 0.693145751953125  # 15 bits, so that its product with an exponent is exact
LN2_LOW: Final = 1.4286068203094173e-06
ROUND_F32: Final = 1.5 * 2.0**23  # adding it leaves the nearest integer in the low bits
LEAST: Final = -104.0  # exp of this number is 0 in f32
_MANTISSA_BITS: Final = 23
_RAISED: Final = 2.0**64  # a factor with which no power on the way to the result is denormal


def exp_at_most_one(code: Code, x: str) -> str:
    """Emit exp(x) for x <= 0. The result is undefined if x is NaN.

    exp(x) = polynomial(r) * 2^n. The coefficients are multiplied by 2^64, n is added to the exponent of the polynomial's value, and the
    result is divided by 2^64. Only the division rounds, and only if the result is denormal.
    """
    near = code.op(f"call float @llvm.maximum.f32(float {x}, float {_literal(LEAST)})")
    shifted = multiply_add(code, near, _literal(LOG2_E), _literal(ROUND_F32), "float", 1)
    whole = code.op(f"fsub float {shifted}, {_literal(ROUND_F32)}")
    r = near
    for part in (LN2_HIGH, LN2_LOW):
        r = multiply_add(code, whole, _literal(-part), r, "float", 1)
    first, *others = (_literal(float(np.float32(c)) * _RAISED) for c in reversed((1.0, 1.0, *EXP)))
    total = first
    for c in others:
        total = multiply_add(code, total, r, c, "float", 1)
    exponent = code.op(f"shl i32 {code.op(f'bitcast float {shifted} to i32')}, {_MANTISSA_BITS}")
    bits = code.op(f"add i32 {code.op(f'bitcast float {total} to i32')}, {exponent}")
    return code.op(f"fmul float {code.op(f'bitcast i32 {bits} to float')}, {_literal(1 / _RAISED)}")


def _literal(value: float) -> str:
    return float_literal(float(np.float32(value)))
