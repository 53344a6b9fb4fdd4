"""Choose whether the products of a program may round their operands to bf16, so that a machine can multiply them with its units for bf16.

Such units (AMD's instructions for bf16, AMX, tensor cores) sum products in orders that differ from unit to unit. Products that do not use
such units multiply integers, or sum f32 in one order, and have the same bits on all machines with fused multiply-add.

A GPU's tensor cores always round in their own way, so programs for a GPU are built with `fast`. With `fast`, attention uses tensor cores
even if the weights of the model are quantised.
"""

from __future__ import annotations

from enum import StrEnum

from compiler.machine.target import GPU, Target


class Numerics(StrEnum):
    """Whether products may round their operands to bf16. With PORTABLE they may not, with FAST they may."""

    AUTO = "auto"  # portable if weights are quantised, except to floats of 8 bits; otherwise fast
    PORTABLE = "portable"
    FAST = "fast"

    @staticmethod
    def on(target: Target) -> Numerics:
        """Return the default numerics of programs for a target."""
        return Numerics.FAST if target.system == GPU else Numerics.AUTO

    def rounds(self, *, is_quantised: bool) -> bool:
        """Return whether operands may be rounded to bf16."""
        return self is Numerics.FAST or (self is Numerics.AUTO and not is_quantised)
