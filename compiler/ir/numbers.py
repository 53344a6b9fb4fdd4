"""The kinds of numbers that quantised weights consist of. The process that serves HTTP imports this module to read GGUF files, so the
module imports little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dtypes import DType


class Kind(StrEnum):
    """The meaning of the bits of a stored number. A code is an integer of 4 bits that is the index of a number in a table (`TABLES`)."""

    INT = "int"  # integers of 4, 6 or 8 bits
    E2M1 = "e2m1"  # floats of 4 bits: a sign, two bits of exponent and one bit of mantissa
    E4M3 = "e4m3"  # floats of 8 bits
    IQ4 = "iq4"  # codes of GGUF's IQ4_NL and IQ4_XS
    # Codes of GGUF's smaller formats (compiler/ir/coded_blocks.py): the index of a magnitude in three bits, and a sign. In IQ1, the fourth
    # bit chooses an offset instead of a sign.
    IQ3_S = "iq3_s"
    IQ3_XXS = "iq3_xxs"
    IQ2 = "iq2"
    IQ1 = "iq1"
    TERNARY = "ternary"  # codes of GGUF's TQ1_0 and TQ2_0: the number plus 1; panels store a code in 2 bits
    # Codes of bitsandbytes, which stand for floats. A float is split into two integers (see `Split`): the table of NF4 or FP4 has the first
    # integer of each code, and the table of NF4_REST or FP4_REST has the second one.
    NF4 = "nf4"
    FP4 = "fp4"
    NF4_REST = "nf4_rest"
    FP4_REST = "fp4_rest"


def stored_as(bits: int, kind: Kind) -> DType:
    """Return the element type that stores these numbers. A `u8` stores two numbers of 4 bits. An `i8` stores one integer of 6 or 8 bits,
    and `e4m3` stores one float of 8 bits."""
    if kind is Kind.E4M3:
        return DType.E4M3
    return DType.U8 if bits == 4 else DType.I8


def num_per_byte(bits: int) -> int:
    """Return how many numbers of `bits` bits an element of the type `stored_as` holds."""
    return 2 if bits == 4 else 1


# The values of 4-bit floats (e2m1), indexed by their bits. The values are doubled, which makes them integers.
DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
# The numbers for which the codes of IQ4_NL and IQ4_XS stand.
UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _with_signs(*magnitudes: int) -> NDArray[np.int8]:
    """Return the table of codes whose lower three bits are the index of a magnitude, and whose upper bit is a sign. Codes without a
    magnitude stand for 0."""
    positive = np.array([*magnitudes, *[0] * (8 - len(magnitudes))], np.int8)
    return np.concatenate([positive, -positive])


# The floats for which codes of bitsandbytes stand. NF4: the quantiles of a normal distribution. FP4: floats with a sign, two bits of
# exponent and one bit of mantissa, scaled so that the largest is 1.
FLOATS_OF_CODES: Mapping[Kind, NDArray[np.float32]] = {
    Kind.NF4: np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        np.float32,
    ),
    Kind.FP4: np.array([sign * n / 192 for sign in (1, -1) for n in (0, 1, 128, 192, 64, 96, 32, 48)], np.float32),
}
SPLIT_STEP = 128


@dataclass(frozen=True, slots=True)
class Split:
    """How the float of a code is split into two integers of 8 bits: round(float * steps) = SPLIT_STEP * a + b. The table of the kind has
    `a`, and the table of the kind `rest` has `b`."""

    steps: int
    rest: Kind

    def integers(self, kind: Kind) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Return `a` and `b` for each code of this kind."""
        whole = np.rint(FLOATS_OF_CODES[kind].astype(np.float64) * self.steps).astype(np.int32)
        high = (whole + SPLIT_STEP // 2) // SPLIT_STEP
        return high.astype(np.int8), (whole - high * SPLIT_STEP).astype(np.int8)


# With 8005 steps, the floats of NF4 are rounded by at most 3.9e-5, which is the least that is possible with `a` of at most 63. The floats
# of FP4 are exact.
SPLIT: Mapping[Kind, Split] = {Kind.NF4: Split(8005, Kind.NF4_REST), Kind.FP4: Split(42 * 192, Kind.FP4_REST)}

# The numbers for which the 16 codes of 4 bits stand, for each kind that has codes. The numbers of E2M1 are doubled.
TABLES: Mapping[Kind, NDArray[np.int8]] = {
    Kind.E2M1: DOUBLED_E2M1,
    Kind.IQ4: UNEVEN,
    Kind.IQ3_S: _with_signs(*range(1, 16, 2)),
    Kind.IQ3_XXS: _with_signs(4, 12, 20, 28, 36, 44, 52, 62),
    Kind.IQ2: _with_signs(8, 25, 43),
    Kind.TERNARY: np.array([-1, 0, 1, 2, *[0] * 12], np.int8),
    # Codes of IQ1 stand for 8 * n + 1, where n is -1, 0 or 1, or for 8 * n - 1 if the upper bit of the code is set.
    Kind.IQ1: np.array([-7, 1, 9, *[0] * 5, -9, -1, 7, *[0] * 5], np.int8),
    **{table: numbers for kind, split in SPLIT.items() for table, numbers in zip((kind, split.rest), split.integers(kind), strict=True)},
}
