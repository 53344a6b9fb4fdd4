"""The choice of widths under a budget."""

from __future__ import annotations

import pytest

from compiler.frontend.quantized.held import Width, two_level_form
from compiler.ir.numbers import Kind
from deploy.quantizing.mix import CPU_WIDTHS, GPU_WIDTHS, Unit, bits_of, choose, fitting, measured_width
from deploy.quantizing.sensitivity import kind_of

LENGTH = 512


def unit(name: str, cost: float, num_weights: int = 1000) -> Unit:
    return Unit((name,), LENGTH, num_weights, {width: cost * 2.0 ** -(2 * number) for number, width in enumerate(CPU_WIDTHS)})


def mean_bits(units: list[Unit], chosen: list[Width]) -> float:
    total = sum(bits_of(two_level_form(width, LENGTH)) * u.num_weights for u, width in zip(units, chosen, strict=True))
    return total / sum(u.num_weights for u in units)


def test_bits_count_scales_shifts_and_units():
    assert bits_of(two_level_form(Width(4, 32), 1024)) == 4 + 2 * (8 / 32 + 32 / 1024)
    assert bits_of(two_level_form(Width(4, 16, Kind.IQ4), 1024)) == 4 + 8 / 16 + 32 / 1024
    assert bits_of(two_level_form(Width(6, 32), 1024)) == 6 + 8 / 32 + 32 / 1024


@pytest.mark.parametrize("widths", [CPU_WIDTHS, GPU_WIDTHS])
def test_widths_are_in_the_order_of_their_bits(widths):
    bits = [bits_of(two_level_form(width, LENGTH)) for width in widths]
    assert bits == sorted(bits) and bits[0] < 4.4 < bits[-1]
    assert measured_width(widths) in fitting(widths, 32)  # every matrix that is quantised can have the measured width


@pytest.mark.parametrize("budget", [4.4, 4.6, 4.75, 5.0, 5.5, 6.5])
def test_the_budget_is_kept_and_used(budget):
    units = [unit(f"m{i}", 1.0 + i % 7, 500 + 100 * (i % 3)) for i in range(40)]
    chosen = choose(units, budget)
    assert mean_bits(units, chosen) <= budget
    assert mean_bits(units, chosen) > min(budget, bits_of(two_level_form(CPU_WIDTHS[-1], LENGTH))) - 0.1


def test_what_matters_most_is_widest():
    units = [unit("little", 0.01), unit("much", 1.0), unit("some", 0.1)]
    little, much, some = (CPU_WIDTHS.index(width) for width in choose(units, 4.9))
    assert little <= some <= much and little < much


def test_a_larger_budget_narrows_nothing_that_gains():
    units = [unit(f"m{i}", 1.0 + i) for i in range(5)]
    costs = [sum(u.costs[width] for u, width in zip(units, choose(units, budget), strict=True)) for budget in (4.4, 4.8, 5.2, 6.0)]
    assert costs == sorted(costs, reverse=True)


def test_rows_that_large_groups_do_not_divide_have_smaller_ones():
    assert fitting(GPU_WIDTHS, 96) == (Width(4, 32), Width(4, 16), Width(6, 32)) and fitting(CPU_WIDTHS, 128) == CPU_WIDTHS


def test_kinds_are_names_and_parts_of_the_depth():
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(6)]
    assert [kind_of([name], 6) for name in names] == [("model.layers.mlp.up_proj.weight", part) for part in (0, 0, 1, 1, 2, 2)]
    assert kind_of(["model.per_layer.weight"], 6) == ("model.per_layer.weight", 0)
