"""The program that quantises rows of a matrix, and the formats that ask for it."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.quantized.held import MOST_PER_UNIT, Offset, two_level_form
from compiler.frontend.quantized.search import ENTRY, build_search
from compiler.interpret.graph import Interpreter
from compiler.machine.target import host
from compiler.ops.tables import INTERPRET
from runtime.session import Session

RNG = np.random.default_rng(5)
LENGTH = 128
ROWS = (RNG.standard_normal((6, LENGTH)) * np.exp(RNG.standard_normal((6, LENGTH // 64)).repeat(64, 1))).astype(np.float32)
IMPORTANCE = np.exp(2 * RNG.standard_normal(LENGTH)).astype(np.float32)
WIDTHS = [(4, 64), (4, 32), (4, 16), (6, 32)]


def decoded(found, bits: int, group: int) -> np.ndarray:
    form = two_level_form(bits, group, LENGTH)
    q, scale, *shift = found[: len(form.numbers)]
    units = found[len(form.numbers) : len(form.parts)]
    plain = {"dtype": "f32", "kind": "int"}
    levels = [
        INTERPRET["dequantize"](a, u, bits=8, group=form.per_unit, shifted=False, **plain)
        for a, u in zip((scale, *shift), units, strict=True)
    ]
    return INTERPRET["dequantize"](q, *levels, bits=bits, group=group, shifted=bool(shift), **plain)


def weighted(values: np.ndarray) -> float:
    return float((IMPORTANCE * np.square(values - ROWS, dtype=np.float64)).sum())


@pytest.fixture(scope="module")
def results():
    """Machine code's results by width, with one thread and with several."""
    found = {}
    for bits, group in WIDTHS:
        executable = compile_module(build_search(two_level_form(bits, group, LENGTH), LENGTH), Options(host()))
        for threads in (1, 3):
            session = Session(executable, device_threads=threads)
            found[bits, group, threads] = session.call(ENTRY, ROWS, IMPORTANCE)
            session.close()
    return found


@pytest.mark.parametrize(("bits", "group"), WIDTHS)
def test_the_result_does_not_depend_on_threads_nor_on_other_rows(results, bits, group):
    for one, several in zip(results[bits, group, 1], results[bits, group, 3], strict=True):
        assert one.tobytes() == several.tobytes()


@pytest.mark.parametrize(("bits", "group"), WIDTHS)
def test_machine_code_finds_what_numpy_finds(results, bits, group):
    """Sums are added in another order, which decides between starts that are equally good, so the errors are compared."""
    module = build_search(two_level_form(bits, group, LENGTH), LENGTH)
    expected, found = Interpreter(module).call(ENTRY, ROWS, IMPORTANCE), results[bits, group, 1]
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(found[-1], expected[-1], rtol=0.1)
    assert np.mean(found[1] == expected[1]) > 0.9
    assert weighted(decoded(found, bits, group)) == pytest.approx(weighted(decoded(expected, bits, group)), rel=0.01)


def test_the_search_beats_rounding_where_it_matters(results):
    q = INTERPRET["quantize"](ROWS, bits=4, group=32, symmetric=True, dtype="f32")
    symmetric = INTERPRET["dequantize"](*q, bits=4, group=32, shifted=False, dtype="f32", kind="int")
    q = INTERPRET["quantize"](ROWS, bits=4, group=32, symmetric=False, dtype="f32")
    asymmetric = INTERPRET["dequantize"](*q, bits=4, group=32, shifted=False, dtype="f32", kind="int")
    errors = [weighted(decoded(results[*width, 1], *width)) for width in WIDTHS]
    assert errors == sorted(errors, reverse=True)  # wider numbers lose less
    assert errors[1] < 0.6 * weighted(asymmetric) < weighted(symmetric)


def test_rows_of_zeros_and_of_one_value_are_exact():
    executable = compile_module(build_search(two_level_form(4, 32, LENGTH), LENGTH), Options(host()))
    session = Session(executable, device_threads=1)
    rows = np.stack([np.zeros(LENGTH), np.full(LENGTH, 0.375), np.full(LENGTH, -2.0)]).astype(np.float32)
    found = session.call(ENTRY, rows, IMPORTANCE)
    np.testing.assert_allclose(decoded(found, 4, 32), rows, atol=1e-6)
    assert all(np.isfinite(part.astype(np.float32)).all() for part in found)
    session.close()


def test_forms_share_units_among_as_many_groups_as_allowed():
    assert two_level_form(4, 32, 576).per_unit == 18 and two_level_form(4, 32, 1536).per_unit == 24
    assert two_level_form(6, 32, 4096).per_unit == MOST_PER_UNIT
    assert two_level_form(4, 16, 64).offset is Offset.SHIFT and two_level_form(6, 32, 64).offset is Offset.NONE


def test_formats_name_bits_per_weight():
    assert WeightFormat.parse("4bit").budget == 4.75 < WeightFormat.parse("5bit").budget < WeightFormat.parse("6bit").budget
    assert WeightFormat.parse("4.6").budget == 4.6 and WeightFormat.parse("4.6").as_stored
    assert WeightFormat.parse("int4-32").budget == 0 == WeightFormat.parse("auto").budget


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("int4", "choose 4bit, or int4-32 for plain rounding"),
        ("3bit", "4bit, 5bit, 6bit, a number of bits per weight from 4.4 to 6.5"),
        ("3.5", "at least 4.4 and at most 6.5 bits"),
        ("nan", "at least 4.4"),
        ("16", "at most 6.5"),
    ],
)
def test_other_formats_are_refused_with_a_remedy(text, remedy):
    with pytest.raises(ConfigError, match=remedy):
        WeightFormat.parse(text)
