"""Choose the width of each matrix, so that all together have at most a number of bits per weight, and the predictions change least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.frontend.quantized.held import Form, Width, two_level_form
from compiler.ir.numbers import Kind

# Widths from the smallest to the largest; see `bits_of`. At equal bits, codes of a table lose less than integers with shifts. GPUs store
# codes of a table in 8 bits, so they get integers.
CPU_WIDTHS = (Width(4, 64, Kind.IQ4), Width(4, 32, Kind.IQ4), Width(4, 16, Kind.IQ4), Width(4, 16), Width(6, 32))
GPU_WIDTHS = (Width(4, 64), Width(4, 32), Width(4, 16), Width(6, 32))


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that read the same input, and therefore have the same width, so that one product can multiply them."""

    names: tuple[str, ...]
    length: int  # number of inputs
    num_weights: int
    costs: Mapping[Width, float]  # by width, from the smallest: the expected divergence of the predictions, in nats

    @property
    def widths(self) -> tuple[Width, ...]:
        return tuple(self.costs)


def measured_width(widths: Sequence[Width]) -> Width:
    """Return the smallest width with groups of 32 numbers. All matrices that are quantised can have it, since their rows are multiples of
    32. The matrices are first quantised in this width, to measure how much the predictions change."""
    return next(width for width in widths if width.group == 32)


def fitting(widths: Sequence[Width], length: int) -> tuple[Width, ...]:
    """Return the widths that rows of this length can have."""
    return tuple(width for width in widths if length % width.group == 0)


def bits_of(form: Form) -> float:
    """Return the bits per weight in memory, with the scales, the shifts and their units."""
    parts = 1 if len(form.numbers) == 2 else 2
    unit_bits = 8 * form.scale.num_bytes / (form.group * form.per_unit)
    return form.bits + parts * (8 / form.group + unit_bits)


def choose(units: Sequence[Unit], budget: float) -> list[Width]:
    """Return the width of each unit. Begin with the smallest widths, which may already exceed the budget. Then widen the unit that gains
    most per bit, again and again, as long as the budget has room and the predictions gain."""
    chosen = [unit.widths[0] for unit in units]
    room = budget * sum(unit.num_weights for unit in units) - sum(_size(unit, unit.widths[0]) for unit in units)
    while True:
        steps = [
            (_gain(unit, chosen[number], width), -number, width)
            for number, unit in enumerate(units)
            for width in unit.widths
            if 0 < _size(unit, width) - _size(unit, chosen[number]) <= room
        ]
        gain, number, width = max(steps, default=(0.0, 0, chosen[0]))
        if gain <= 0:
            return chosen
        room -= _size(units[-number], width) - _size(units[-number], chosen[-number])
        chosen[-number] = width


def _size(unit: Unit, width: Width) -> float:
    return bits_of(two_level_form(width, unit.length)) * unit.num_weights


def _gain(unit: Unit, old: Width, new: Width) -> float:
    """Return by how much the expected divergence falls per additional bit."""
    return (unit.costs[old] - unit.costs[new]) / (_size(unit, new) - _size(unit, old))
