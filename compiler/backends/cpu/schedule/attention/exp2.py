"""Powers of two for attention weights, with few instructions.

The result for -127 and less is 0. The exponent must not be larger than 0, apart from rounding. Results near 2^-127 may be inexact.
"""

from __future__ import annotations

from typing import Final

from compiler.backends.cpu.schedule.folds import larger
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import bits_of, const, fma, of_bits

# Coefficients of polynomials that are near 2^x for -0.5 <= x <= 0.5, and 1 for 0.
SHORT: Final = (1.0, 0.6932829280586574, 0.24221096784198948, 0.05500893126244405)  # largest relative error: 1.0e-4
LONG: Final = (  # largest relative error: 9.1e-8
    1.0,
    0.6931469775976775,
    0.24022242083111853,
    0.05550733744471398,
    0.0096715127857727,
    0.0013264727252516961,
)
ROUNDER: Final = 1.5 * 2.0**23  # adding it leaves the nearest integer in the low bits
FRACTION_BITS: Final = 23
LEAST_EXPONENT: Final = -127.0


def exp2(x: Scalar) -> Scalar:
    return _exp2(x, LONG)


def exp2_of_weights(x: Scalar) -> Scalar:
    """Return 2^x with an error that is small beside that of rounding the result to bf16."""
    return _exp2(x, SHORT)


def _exp2(x: Scalar, coefficients: tuple[float, ...]) -> Scalar:
    """Compute 2^whole * 2^fraction. The product adds `whole` to the exponent bits of the second factor. For x = -127 this factor is 1.0,
    and the sum is 0."""
    x = larger(x, const(LEAST_EXPONENT, DType.F32))
    shifted = x + ROUNDER
    fraction = x - (shifted - ROUNDER)
    *rest, power = (const(c, DType.F32) for c in coefficients)
    total: Scalar = power
    for c in reversed(rest):
        total = fma(total, fraction, c)
    return of_bits(bits_of(total) + (bits_of(shifted) << FRACTION_BITS))
