"""Choose whether the products of a program may round their operands to bf16, so that a machine can multiply them by its units for bf16.

Such units (AMD's instructions for bf16, AMX, tensor cores) add in different orders. Without them, products are of integers, or of f32 in
one order, and have the same bits on all machines that multiply and add with one rounding.
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
