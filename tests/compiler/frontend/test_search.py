"""The program that quantises rows of a matrix, and the formats that ask for it."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.quantized.held import MOST_PER_UNIT, Offset, Width, two_level_form
from compiler.frontend.quantized.search import ENTRY, build_search
from compiler.interpret.graph import Interpreter
from compiler.ir.numbers import Kind
from compiler.machine.target import host
from compiler.ops.tables import INTERPRET
from runtime.session import Session

RNG = np.random.default_rng(5)
LENGTH = 128
ROWS = (RNG.standard_normal((6, LENGTH)) * np.exp(RNG.standard_normal((6, LENGTH // 64)).repeat(64, 1))).astype(np.float32)
IMPORTANCE = np.exp(2 * RNG.standard_normal(LENGTH)).astype(np.float32)
TABLE = [Width(4, group, Kind.IQ4) for group in (64, 32, 16)]
WIDTHS = [Width(4, 64), Width(4, 32), Width(4, 16), Width(6, 32), *TABLE]


def decoded(found, width: Width) -> np.ndarray:
    form = two_level_form(width, LENGTH)
    q, scale, *shift = found[: len(form.numbers)]
    units = found[len(form.numbers) : len(form.parts)]
    levels = [
        INTERPRET["dequantize"](a, u, bits=8, group=form.per_unit, shifted=False, dtype="f32", kind="int")
        for a, u in zip((scale, *shift), units, strict=True)
    ]
    attrs = {"bits": width.bits, "group": width.group, "kind": str(width.kind)}
    return INTERPRET["dequantize"](q, *levels, shifted=bool(shift), dtype="f32", **attrs)


def weighted(values: np.ndarray) -> float:
    return float((IMPORTANCE * np.square(values - ROWS, dtype=np.float64)).sum())


@pytest.fixture(scope="module")
def results():
    """Return the results of machine code by (width, number of threads)."""
    found = {}
    for width in WIDTHS:
        executable = compile_module(build_search(two_level_form(width, LENGTH), LENGTH), Options(host()))
        for threads in (1, 3):
            session = Session(executable, device_threads=threads)
            found[width, threads] = session.call(ENTRY, ROWS, IMPORTANCE)
            session.close()
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_the_result_does_not_depend_on_threads_nor_on_other_rows(results, width):
    for one, several in zip(results[width, 1], results[width, 3], strict=True):
        assert one.tobytes() == several.tobytes()


@pytest.mark.parametrize("width", WIDTHS)
def test_machine_code_finds_what_numpy_finds(results, width):
    """Machine code adds terms in another order, which may decide between starting points of the search that are equally good. So the test
    compares the errors of the results."""
    module = build_search(two_level_form(width, LENGTH), LENGTH)
    expected, found = Interpreter(module).call(ENTRY, ROWS, IMPORTANCE), results[width, 1]
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(found[-1], expected[-1], rtol=0.1)
    assert np.mean(found[1] == expected[1]) > 0.9
    assert weighted(decoded(found, width)) == pytest.approx(weighted(decoded(expected, width)), rel=0.01)


def test_the_search_beats_rounding_where_it_matters(results):
    q = INTERPRET["quantize"](ROWS, bits=4, group=32, symmetric=True, dtype="f32")
    symmetric = INTERPRET["dequantize"](*q, bits=4, group=32, shifted=False, dtype="f32", kind="int")
    q = INTERPRET["quantize"](ROWS, bits=4, group=32, symmetric=False, dtype="f32")
    asymmetric = INTERPRET["dequantize"](*q, bits=4, group=32, shifted=False, dtype="f32", kind="int")
    errors = {width: weighted(decoded(results[width, 1], width)) for width in WIDTHS}
    for widths in (WIDTHS[:4], TABLE):
        assert [errors[width] for width in widths] == sorted((errors[width] for width in widths), reverse=True)  # wider numbers lose less
    assert errors[Width(4, 32)] < 0.6 * weighted(asymmetric) < weighted(symmetric)


def test_codes_of_a_table_lose_less_than_integers_of_more_bits(results):
    for table, integers in ((Width(4, 32, Kind.IQ4), Width(4, 64)), (Width(4, 16, Kind.IQ4), Width(4, 32))):
        assert weighted(decoded(results[table, 1], table)) < weighted(decoded(results[integers, 1], integers))


def test_scales_of_a_table_have_both_signs(results):
    for width in TABLE:
        scales = results[width, 1][1]
        assert (scales < 0).any() and (scales > 0).any()


@pytest.mark.parametrize(("width", "tolerance"), [(Width(4, 32), 1e-6), (Width(4, 32, Kind.IQ4), 0.01)])
def test_rows_of_zeros_are_exact_and_rows_of_one_value_almost(width, tolerance):
    executable = compile_module(build_search(two_level_form(width, LENGTH), LENGTH), Options(host()))
    session = Session(executable, device_threads=1)
    rows = np.stack([np.zeros(LENGTH), np.full(LENGTH, 0.375), np.full(LENGTH, -2.0)]).astype(np.float32)
    found = session.call(ENTRY, rows, IMPORTANCE)
    np.testing.assert_allclose(decoded(found, width), rows, atol=1e-6, rtol=tolerance)
    assert all(np.isfinite(part.astype(np.float32)).all() for part in found)
    session.close()


def test_forms_share_units_among_as_many_groups_as_allowed():
    assert two_level_form(Width(4, 32), 576).per_unit == 18 and two_level_form(Width(4, 32), 8960).per_unit == 70
    assert two_level_form(Width(6, 32), 4096).per_unit == MOST_PER_UNIT
    assert two_level_form(Width(4, 16), 64).offset is Offset.SHIFT and two_level_form(Width(6, 32), 64).offset is Offset.NONE
    assert two_level_form(Width(4, 16, Kind.IQ4), 64).offset is Offset.NONE


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
