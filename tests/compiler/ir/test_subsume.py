"""Tests whether a function of one type may be used where a function of another type is expected. The dimension variables of the two types
are independent."""

from __future__ import annotations

import pytest

from compiler.ir.subsume import Level, subsumes
from compiler.ir.text.parser import parse
from compiler.ir.types import Type


def fn(text: str, where: str = "") -> Type:
    params, _, result = text.partition(" -> ")
    return parse(f"func f{params} -> {result} {where} {{ return x }}").graph("f").type


@pytest.mark.parametrize(
    ("wanted", "given", "level"),
    [
        (fn("(x: f32[n]) -> f32[n]"), fn("(x: f32[m]) -> f32[m]"), Level.PASS),
        (fn("(x: f32[n, 2*n]) -> f32[3*n]"), fn("(x: f32[m, 2*m]) -> f32[3*m]"), Level.PASS),
        # The given type is accepted, because it is more general.
        (fn("(x: f32[n], y: f32[n]) -> f32[n]"), fn("(x: f32[a], y: f32[b]) -> f32[b]"), Level.PASS),
        # The given type demands equal extents, which the wanted type does not promise.
        (fn("(x: f32[a], y: f32[b]) -> f32[b]"), fn("(x: f32[n], y: f32[n]) -> f32[n]"), Level.SYMBOLIC),
        (fn("(x: f32[n], y: f32[m]) -> f32[n]"), fn("(x: f32[n], y: f32[m]) -> f32[m]"), Level.SYMBOLIC),
        (fn("(x: f32[8]) -> f32[8]"), fn("(x: f32[m]) -> f32[m]", "where m in 0..16"), Level.PASS),
        (fn("(x: f32[n]) -> f32[n]"), fn("(x: f32[m]) -> f32[m]", "where m in 0..16"), Level.SYMBOLIC),
        (fn("(x: f32[n]) -> f32[n]", "where n in 0..16 by 4"), fn("(x: f32[m]) -> f32[m]", "where m in 0.. by 2"), Level.PASS),
        (fn("(x: f32[n]) -> f32[n]"), fn("(x: i8[m]) -> i8[m]"), Level.DISJOINT),
    ],
)
def test_functions_are_compared_whatever_their_variables_are_called(wanted: Type, given: Type, level: Level) -> None:
    assert subsumes(wanted, given).level is level
