"""Conversions of e4m3, the float of 8 bits: a sign, 4 bits of exponent, 3 bits of significand. There is no infinity; the largest magnitude,
0x7F, is NaN. The conversions use integer and f32 instructions, which every machine has."""

from __future__ import annotations

from typing import Final

from compiler.codegen.vector_math import Lanes

SHIFT: Final = 20  # the significand of an f32 has this many bits more than that of an e4m3
NAN: Final = 0x7F
REBIASED: Final = (127 - 7) << 23  # the difference of the exponents' biases, at the exponent's place in an f32
LEAST_NORMAL: Final = (127 - 6) << 23  # the least normal e4m3, 2^-6, as f32
TOO_LARGE: Final = 0x43E80001  # the least f32 above 464; it and larger ones become NaN. 464 is halfway from 448, the largest e4m3, to 480
QUIET: Final = 0x7FC00000  # NaN as f32


def decoded(x: Lanes) -> Lanes:
    """Convert bytes to f32, which is exact. NaN stays NaN."""
    both = (x.to("sext", "i32") << SHIFT) & (0x80000000 - 2**32 | NAN << SHIFT)  # the sign and the magnitude
    # These bits are an f32 that is too small by a factor of 2^120. It is subnormal if the e4m3 is, so the product is exact.
    finite = both.to("bitcast", "float") * 2.0**120
    is_nan = (both & NAN << SHIFT).compare("eq", NAN << SHIFT)
    return (both | QUIET).where(is_nan, finite.bits).to("bitcast", "float")


def encoded(x: Lanes) -> Lanes:
    """Round f32 to e4m3, to nearest, ties to even. Magnitudes from TOO_LARGE on, infinities too, become NaN."""
    bits = x.bits
    size, sign = bits & 0x7FFFFFFF, bits >> 24 & 0x80
    odd = (size >> SHIFT) & 1
    normal = (size - REBIASED + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    # In an f32 from 2^14 to 2^15, the last bit is worth 2^-9, as in a subnormal e4m3. So adding 2^14 rounds to a subnormal e4m3, and
    # subtracting the bits of 2^14 leaves its significand.
    small = (size.to("bitcast", "float") + 2.0**14).bits - ((127 + 14) << 23)
    found = size.const(NAN).where(size.compare("uge", TOO_LARGE), small.where(size.compare("ult", LEAST_NORMAL), normal))
    return (found | sign).to("trunc", "i8")
