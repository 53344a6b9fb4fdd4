"""Choose whether the products of a program may round their operands to bf16, to multiply them by a machine's own units.

Such units differ in how they add: BF16 instructions of AMD, AMX, tensor cores. Without them, products are of integers, or of f32 in one
order, and have the same bits on all machines that multiply and add with one rounding.
"""

from __future__ import annotations

from enum import StrEnum


class Numerics(StrEnum):
    AUTO = "auto"  # portable if the program has products of integers, otherwise fast
    PORTABLE = "portable"
    FAST = "fast"

    def rounds(self, *, is_quantised: bool) -> bool:
        """Return whether operands may be rounded to bf16."""
        return self is Numerics.FAST or (self is Numerics.AUTO and not is_quantised)
