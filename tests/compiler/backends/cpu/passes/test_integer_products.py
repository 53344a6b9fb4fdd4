"""The pass replaces products with quantised weights by products of integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.passes.integer_products import IntegerProducts
from compiler.backends.cpu.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.graph.values import Call
from compiler.ir.numbers import Kind
from compiler.ir.text.parser import parse
from compiler.ir.types import TensorType
from compiler.machine.formats import PANEL4, PANEL6, PANEL8, PANEL8_WORDS, TABLE_PANELS, WIDENED4
from compiler.machine.intrinsics.amx import AmxI8ByI8
from compiler.machine.intrinsics.dot_panel import DotPanel, DotWords
from compiler.machine.intrinsics.widen_panel import WidenPanel
from compiler.machine.products import FloatTile, ProductTile, ProductTiles, TileShape
from compiler.machine.target import get
from compiler.passes.base import Pass
from compiler.passes.number_schemes import CAP

_BYTES = tuple(ProductTile(DotPanel(rows=1, columns=4, bits=f.bits), f, depth=4) for f in (PANEL8, PANEL4))
_WIDENED = ProductTile(AmxI8ByI8(rows=1, columns=4), WIDENED4, depth=64, block=512, widen=WidenPanel(columns=4, group=32))
ONE = TileShape(1, 1)
BYTES = ProductTiles(FloatTile(ONE), ONE, _BYTES)
WIDENED = ProductTiles(FloatTile(ONE), ONE, (_WIDENED, *_BYTES))
WORDS = ProductTiles(FloatTile(ONE), ONE, (ProductTile(DotWords(rows=1, columns=4), format=PANEL8_WORDS, depth=4),))


def test_rows_are_quantised_once_for_all_products(becomes: Callable[[Pass, str, str], None]) -> None:
    """This pass quantises the rows of each product separately. A later pass merges equal quantisations."""
    before = """
        func main(x: f32[n, 64], q: i8[6, 64], s: f32[6, 1], b: f32[6]) -> f32[n, 6] {
          w = dequantize(q, s, bits=8, group=0, dtype="f32")
          y = linear(x, w, b)
          return y
        }
    """
    expected = """
        func main(x: f32[n, 64], q: i8[6, 64], s: f32[6, 1], b: f32[6]) -> f32[n, 6] {
          w = dequantize(q, s, bits=8, group=0, dtype="f32")
          rows = quantize_rows(x, bits=16, group=0)
          panels = panel_integers(q, format="panel8", columns=4)
          scales = panel_scales(s, columns=4)
          v = rows.0
          r = rows.1
          t = rows.2
          y = integer_linear(v, r, t, panels, scales, b, format="panel8", size=6, dtype="f32")
          return y
        }
    """
    becomes(IntegerProducts(BYTES), before, expected)


def test_rows_that_the_product_lets_round_take_one_plane_in_groups(becomes: Callable[[Pass, str, str], None]) -> None:
    """If the product tolerates 8-bit rows, its rows are quantised to a single plane of 8-bit integers with a scale per group of 64
    elements. The weight keeps one scale per channel."""
    before = """
        func main(x: f32[n, 128], q: i8[6, 128], s: f32[6, 1]) -> f32[n, 6] {
          w = dequantize(q, s, bits=8, group=0, dtype="f32")
          y = linear(x, w, tolerates="i8")
          return y
        }
    """
    expected = """
        func main(x: f32[n, 128], q: i8[6, 128], s: f32[6, 1]) -> f32[n, 6] {
          w = dequantize(q, s, bits=8, group=0, dtype="f32")
          rows = quantize_rows(x, bits=8, group=64)
          panels = panel_integers(q, format="panel8", columns=4)
          scales = panel_scales(s, columns=4)
          v = rows.0
          r = rows.1
          t = rows.2
          y = integer_linear(v, r, t, panels, scales, format="panel8", size=6, dtype="f32")
          return y
        }
    """
    becomes(IntegerProducts(BYTES), before, expected)


@pytest.mark.parametrize(("k", "group"), [(96, 0), (128, 64)])
@pytest.mark.parametrize("tiles", [BYTES, WORDS], ids=["bytes", "words"])
def test_other_rows_beside_eight_bits_keep_sixteen(tiles: ProductTiles, k: int, group: int) -> None:
    """Although the product tolerates 8-bit rows, its rows are quantised to 16 bits if the row length is no multiple of 64, or if weights
    have a scale per group."""
    program = f"""
        func main(x: f32[n, {k}], q: i8[6, {k}], s: f32[6, {k // (group or k)}]) -> object {{
          w = dequantize(q, s, group={group}) y = linear(x, w, tolerates="i8") return y
        }}
    """
    bindings = IntegerProducts(tiles)(parse(program)).graph("main").body.bindings
    (rows,) = [b.value for b in bindings if isinstance(b.value, Call) and b.value.op.name == "quantize_rows"]
    assert rows.attrs["bits"] == 16


@pytest.mark.parametrize(("more", "rows"), [("", {"bits": 16, "cap": CAP}), (', tolerates="i8"', {"bits": 8})])
def test_only_outliers_beside_weights_of_four_bits_take_more_than_eight(more: str, rows: dict[str, Any]) -> None:
    module = IntegerProducts(BYTES)(
        parse(f"""
        func main(x: bf16[n, 64], q: u8[6, 32], s: bf16[6, 2]) -> bf16[n, 6] {{
          w = dequantize(q, s, bits=4, group=32)
          y = linear(x, w{more})
          return y
        }}
    """)
    )
    calls = {b.value.op.name: b.value.attrs for b in module.graph("main").body.bindings if isinstance(b.value, Call)}
    assert calls["quantize_rows"] == {**rows, "group": 32, "dtype": "i8"}
    assert calls["integer_linear"] == {"format": "panel4", "size": 6, "dtype": "bf16"}


@pytest.mark.parametrize(("group", "format"), [(16, "panel6"), (24, "panel8")])
def test_weights_of_six_bits_take_six_where_a_tile_reads_whole_groups(group: int, format: str) -> None:
    program = parse(f"""
        func main(x: f32[n, 48], q: i8[6, 48], s: f32[6, {48 // group}]) -> f32[n, 6] {{
          w = dequantize(q, s, bits=6, group={group}) y = linear(x, w) return y
        }}
    """)
    six = ProductTile(DotPanel(rows=1, columns=4, bits=6), PANEL6, depth=16)
    for tiles, expected in ((BYTES, "panel8"), (replace(BYTES, tiles=(six, *BYTES.tiles)), format)):
        module = IntegerProducts(tiles)(program)
        calls = {b.value.op.name: b.value.attrs for b in module.graph("main").body.bindings if isinstance(b.value, Call)}
        assert calls["quantize_rows"] == {"bits": 16, "group": group, "dtype": "i8"}
        assert calls["integer_linear"] == {"format": expected, "size": 6, "dtype": "f32"}


def test_floats_of_four_bits_are_multiplied_as_integers_of_four_bits() -> None:
    program = parse("""
        func main(x: f32[n, 64], q: u8[6, 32], s: bf16[6, 2]) -> f32[n, 6] {
          w = dequantize(q, s, bits=4, group=32, kind="e2m1")
          y = linear(x, w)
          return y
        }
    """)
    floats = ProductTile(DotPanel(rows=1, columns=4, bits=4, kind=Kind.E2M1), TABLE_PANELS[Kind.E2M1], depth=4)
    for tiles in (BYTES, WIDENED):
        module = IntegerProducts(replace(tiles, tiles=(*tiles.tiles, floats)))(program)
        calls = {b.value.op.name: b.value.attrs for b in module.graph("main").body.bindings if isinstance(b.value, Call)}
        assert calls["quantize_rows"] == {"bits": 16, "group": 32, "dtype": "i8", "cap": CAP}
        assert calls["integer_linear"] == {"format": "panel_e2m1", "size": 6, "dtype": "f32"}
    module = IntegerProducts(WORDS)(program)  # no tile takes the floats, so their integers are stored in 8 bits
    calls = {b.value.op.name: b.value.attrs for b in module.graph("main").body.bindings if isinstance(b.value, Call)}
    assert calls["quantize_rows"] == {"bits": 16, "group": 32, "dtype": "i16", "cap": CAP}
    assert calls["integer_linear"] == {"format": "panel8_words", "size": 6, "dtype": "f32"}


def test_weights_that_are_widened_take_a_scale_per_row_and_channel(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 64], q: u8[6, 32], s: bf16[6, 2], b: f32[6]) -> f32[n, 6] {
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          y = linear(x, w, b, tolerates="bf16")
          return y
        }
    """
    expected = """
        func main(x: f32[n, 64], q: u8[6, 32], s: bf16[6, 2], b: f32[6]) -> f32[n, 6] {
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          rows = row_planes(x)
          panels = panel_integers(q, format="panel4", columns=4)
          made = panel_multipliers(s, columns=4)
          v = rows.0
          r = rows.1
          f = rows.2
          m = made.0
          c = made.1
          y = widened_linear(v, r, f, panels, m, c, b, size=6, dtype="f32")
          return y
        }
    """
    becomes(IntegerProducts(WIDENED), before, expected)
    longer = (
        before.replace("64]", "65600]").replace("32]", "32800]").replace("6, 2]", "6, 2050]")
    )  # rows so long that the i32 sum of a channel might overflow
    exact = before.replace(', tolerates="bf16"', "")
    for program, tiles in ((before, BYTES), (longer, WIDENED), (exact, WIDENED)):
        module = IntegerProducts(tiles)(parse(program))
        assert any(isinstance(b.value, Call) and b.value.op.name == "integer_linear" for b in module.graph("main").body.bindings)


def test_words_take_one_plane_in_parts_that_share_a_scale(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 896], q: i8[6, 896], s: f32[6, 1]) -> f32[n, 6] {
          w = dequantize(q, s, bits=8, group=0, dtype="f32")
          y = linear(x, w)
          return y
        }
    """
    expected = """
        func main(x: f32[n, 896], q: i8[6, 896], s: f32[6, 1]) -> f32[n, 6] {
          w = dequantize(q, s, bits=8, group=0, dtype="f32")
          rows = quantize_rows(x, bits=16, group=448, dtype="i16")
          panels = panel_integers(q, format="panel8_words", columns=4)
          shared = broadcast_to(s, shape[6, 2])
          scales = panel_scales(shared, columns=4)
          v = rows.0
          r = rows.1
          t = rows.2
          y = integer_linear(v, r, t, panels, scales, format="panel8_words", size=6, dtype="f32")
          return y
        }
    """
    becomes(IntegerProducts(WORDS), before, expected)


def test_words_keep_groups_that_are_short_and_lengths_without_parts_stay(stays: Callable[[Pass, str], None]) -> None:
    program = "func main(x: f32[n, {k}], q: i8[5, {k}], s: f32[5, {g}]) -> object "
    program += "{{ w = dequantize(q, s, group={each}) y = linear(x, w) return y }}"
    module = IntegerProducts(WORDS)(parse(program.format(k=256, g=2, each=128)))
    calls = {b.value.op.name: b.value.attrs for b in module.graph("main").body.bindings if isinstance(b.value, Call)}
    assert calls["quantize_rows"] == {"bits": 16, "group": 128, "dtype": "i16"} and "broadcast_to" not in calls
    stays(IntegerProducts(WORDS), program.format(k=4 * 1031, g=1, each=0))


@pytest.mark.parametrize("tiles", [BYTES, WORDS, WIDENED], ids=["bytes", "words", "widened"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_offsets_of_groups_are_subtracted_by_the_product(tiles: ProductTiles, bits: int, shifted: bool, dtype: str) -> None:
    """The integer product itself subtracts the terms of zero points (or shifts) of weight groups. The test has a bias and rows whose sums
    are far from 0, so that it would notice a missing term."""
    if tiles is WORDS and bits == 4:
        return  # no tile multiplies 4-bit weights by 16-bit rows
    rng, holds = np.random.default_rng(0), "i8" if bits == 8 else "u8"
    third = "f32" if shifted else holds
    module = parse(f"""
        func main(x: f32[n, 128], q: {holds}[6, {16 * bits}], s: f16[6, 2], o: {third}[6, 2], b: f32[6]) -> {dtype}[n, 6] {{
          w = dequantize(q, s, o, bits={bits}, group=64, shifted={str(shifted).lower()})
          y = linear(x, w, b, out_dtype="{dtype}")
          return y
        }}
    """)
    found = IntegerProducts(tiles)(module)
    calls = [b.value.op.name for b in found.graph("main").body.bindings if isinstance(b.value, Call)]
    assert "integer_linear" in calls and "linear" not in calls and "subtract" not in calls
    q = rng.integers(0, 1 << bits, (6, 16 * bits)).astype(np.uint8)
    given = (q.view(np.int8) if bits == 8 else q, rng.random((6, 2)).astype(np.float16))
    zero = rng.integers(1, 15, (6, 2)).astype(DType(holds).numpy)
    offset = rng.random((6, 2)).astype(np.float32) if shifted else zero
    operands = ((rng.standard_normal((5, 128)) + 2).astype(np.float32), *given, offset, rng.standard_normal(6).astype(np.float32))
    expected, actual = (Interpreter(m).call("main", *operands).astype(np.float32) for m in (module, found))
    limit = (5e-3 if bits == 4 else 5e-5) + (2.0**-8 if dtype == "bf16" else 0)
    assert np.abs(actual - expected).max() < limit * np.abs(expected).max()


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_shifts_in_units_are_decoded_by_the_products(bits: int) -> None:
    """The product itself decodes scales that are stored as small integers times a unit. If they were decoded when weights are bound, memory
    would hold 32 bits per scale instead of 8."""
    rng, holds = np.random.default_rng(0), "i8" if bits == 8 else "u8"
    module = parse(f"""
        func main(x: f32[n, 512], weight q: {holds}[64, {64 * bits}], weight s: i8[64, 16], weight su: f16[64, 2],
            weight o: i8[64, 16], weight ou: f16[64, 2]) -> f32[n, 64] {{
          dataflow {{
            scale = dequantize(s, su, group=8)
            shift = dequantize(o, ou, group=8)
            w = dequantize(q, scale, shift, bits={bits}, group=32, shifted=true)
            y = linear(x, w)
          }}
          return y
        }}
    """)
    found = IntegerProducts(BYTES)(module)
    calls = {b.value.op.name: b.value.attrs for b in found.graph("main").body.bindings if isinstance(b.value, Call)}
    assert calls["integer_linear"]["in_units"] and calls["integer_linear"]["has_offset"] and "linear" not in calls
    assert calls["integer_linear"].get("centred", True) == (bits == 8)
    numbers = rng.integers(0, 1 << bits, (64, 64 * bits)).astype(np.uint8)
    levels = [(rng.integers(0, 64, (64, 16)).astype(np.int8), rng.random((64, 2)).astype(np.float16)) for _ in range(2)]
    operands = ((rng.standard_normal((5, 512)) + 2).astype(np.float32), numbers.view(np.int8) if bits == 8 else numbers)
    expected, actual = (Interpreter(m).call("main", *operands, *levels[0], *levels[1]) for m in (module, found))
    assert np.abs(actual - expected).max() < (5e-3 if bits == 4 else 5e-5) * np.abs(expected).max()
    lifted = pipeline(get("avx512-vnni-bf16")).until("lift_weights")(module)
    prepared = [v.type for v in lifted.graph("main").weights if isinstance(v.type, TensorType)]
    assert [t.dtype for t in prepared if t.dtype is DType.F32] == []


def test_rows_that_choose_a_widened_matrix(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 64], q: u8[3, 6, 32], s: f16[3, 6, 2], e: i32[n], b: f32[3, 6]) -> f32[n, 6] {
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          y = expert_linear(x, w, e, b, tolerates="bf16")
          return y
        }
    """
    expected = """
        func main(x: f32[n, 64], q: u8[3, 6, 32], s: f16[3, 6, 2], e: i32[n], b: f32[3, 6]) -> f32[n, 6] {
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          rows = row_planes(x)
          panels = panel_integers(q, format="panel4", columns=4)
          made = panel_multipliers(s, columns=4)
          v = rows.0
          r = rows.1
          f = rows.2
          m = made.0
          c = made.1
          y = expert_widened_linear(v, r, f, panels, m, c, e, b, size=6, dtype="f32")
          return y
        }
    """
    becomes(IntegerProducts(WIDENED), before, expected)


def test_rows_of_a_small_table_are_quantised_before_they_are_looked_up(becomes: Callable[[Pass, str, str], None]) -> None:
    """If the table has fewer rows than are looked up, its rows are quantised, and the integers are looked up. The table may be the result
    of another product that the pass replaces, as here."""
    params = "x: f32[t, 64], i: i32[8*t], e: i32[8*t], q: u8[64, 32], s: f16[64, 2], p: u8[3, 6, 32], z: f16[3, 6, 2]"
    before = f"""
        func main({params}) -> f32[8*t, 6] {{
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          h = linear(x, w, tolerates="bf16")
          g = embedding(h, i)
          u = dequantize(p, z, bits=4, group=32, dtype="f32")
          y = expert_linear(g, u, e, tolerates="bf16")
          return y
        }}
    """
    expected = f"""
        func main({params}) -> f32[8*t, 6] {{
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          rows = row_planes(x)
          panels = panel_integers(q, format="panel4", columns=4)
          made = panel_multipliers(s, columns=4)
          v = rows.0
          r = rows.1
          f = rows.2
          m = made.0
          c = made.1
          h = widened_linear(v, r, f, panels, m, c, size=64, dtype="f32")
          g = embedding(h, i)
          u = dequantize(p, z, bits=4, group=32, dtype="f32")
          rows2 = row_planes(h)
          panels2 = panel_integers(p, format="panel4", columns=4)
          made2 = panel_multipliers(z, columns=4)
          v2 = rows2.0
          r2 = rows2.1
          f2 = rows2.2
          v3 = take(v2, i, axis=0)
          r3 = take(r2, i, axis=0)
          f3 = take(f2, i, axis=0)
          m2 = made2.0
          c2 = made2.1
          y = expert_widened_linear(v3, r3, f3, panels2, m2, c2, e, size=6, dtype="f32")
          return y
        }}
    """
    becomes(IntegerProducts(WIDENED), before, expected)


def test_rows_of_a_large_table_are_quantised_after_they_are_looked_up() -> None:
    """If the table has more rows than are looked up, as a vocabulary usually has, the rows are quantised after the look-up."""
    module = parse("""
        func main(x: f32[1000, 64], i: i32[t], q: u8[6, 32], s: f16[6, 2]) -> f32[t, 6] {
          g = embedding(x, i)
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          y = linear(g, w, tolerates="bf16")
          return y
        }
    """)
    names = [b.value.op.name for b in IntegerProducts(WIDENED)(module).graph("main").body.bindings if isinstance(b.value, Call)]
    assert names.index("embedding") < names.index("row_planes") and "take" not in names


@pytest.mark.parametrize("in_units", [False, True])
def test_rows_that_choose_a_matrix_with_offsets_are_integers(in_units: bool) -> None:
    """If each row chooses a matrix, the product subtracts the zero points or shifts of the chosen matrix."""
    rng = np.random.default_rng(0)
    if in_units:
        params = "s: i8[3, 6, 4], su: f16[3, 6, 1], o: i8[3, 6, 4], ou: f16[3, 6, 1]"
        weight = "s2 = dequantize(s, su, group=4) o2 = dequantize(o, ou, group=4) w = dequantize(q, s2, o2, bits=4, group=32, shifted=true)"
        given = [
            f(rng) for f in [lambda r: r.integers(0, 64, (3, 6, 4)).astype(np.int8), lambda r: r.random((3, 6, 1)).astype(np.float16)] * 2
        ]
    else:
        params, weight = "s: f16[3, 6, 4], z: u8[3, 6, 4]", "w = dequantize(q, s, z, bits=4, group=32)"
        given = [rng.random((3, 6, 4)).astype(np.float16), rng.integers(1, 15, (3, 6, 4)).astype(np.uint8)]
    module = parse(f"""
        func main(x: f32[n, 128], q: u8[3, 6, 64], {params}, e: i32[n], b: f32[3, 6]) -> f32[n, 6] {{
          {weight} y = expert_linear(x, w, e, b) return y
        }}
    """)
    found = IntegerProducts(BYTES)(module)
    calls = {b.value.op.name: b.value.attrs for b in found.graph("main").body.bindings if isinstance(b.value, Call)}
    assert calls["expert_integer_linear"]["has_offset"] and calls["expert_integer_linear"].get("in_units", False) == in_units
    x, q = (rng.standard_normal((5, 128)) + 2).astype(np.float32), rng.integers(0, 256, (3, 6, 64)).astype(np.uint8)
    operands = (x, q, *given, np.array([2, 0, 1, 2, 0], np.int32), rng.standard_normal((3, 6)).astype(np.float32))
    expected, actual = (Interpreter(m).call("main", *operands) for m in (module, found))
    assert np.abs(actual - expected).max() < 5e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    "program",
    [
        "func main(x: f32[n, 64], w: f32[6, 64]) -> object { y = linear(x, w) return y }",
        "func main(x: f32[n, 6], q: i8[5, 6], s: f32[5, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }",
        "func main(x: f32[n, 8], q: i8[m, 8], s: f32[m, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }",
    ],
)
def test_what_does_not_fit_stays(stays: Callable[[Pass, str], None], program: str) -> None:
    """The pass leaves a product unchanged if its weights are floats, if the number of columns is unknown, or if the row length is no
    multiple of four."""
    stays(IntegerProducts(BYTES), program)


def test_a_table_is_looked_up_in_the_panels_of_the_product(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(ids: i32[n], q: u8[6, 32], s: f16[6, 2], t: f16[6, 2]) -> f32[n, 6] {
          x = look_up(ids, q, s, t, size=6, length=64, bits=4, offset="shift")
          w = dequantize(q, s, t, bits=4, group=32, shifted=true)
          y = linear(x, w)
          return y
        }
    """
    expected = """
        func main(ids: i32[n], q: u8[6, 32], s: f16[6, 2], t: f16[6, 2]) -> f32[n, 6] {
          p = panel_integers(q, format="panel4", columns=4)
          ps = panel_scales(s, columns=4)
          pt = panel_scales(t, columns=4)
          x = look_up(ids, p, ps, pt, size=6, length=64, bits=4, offset="shift", format="panel4")
          w = dequantize(q, s, t, bits=4, group=32, shifted=true)
          rows = quantize_rows(x, bits=16, group=32, sums=true, cap=CAP)
          panels = panel_integers(q, format="panel4", columns=4)
          scales = panel_scales(s, columns=4)
          shifts = panel_scales(t, columns=4)
          v = rows.0
          r = rows.1
          total = rows.2
          sums = rows.3
          y = integer_linear(v, r, total, panels, scales, sums, shifts, format="panel4", size=6, centred=false, has_offset=true)
          return y
        }
    """.replace("CAP", str(CAP))
    becomes(IntegerProducts(BYTES), before, expected)
    becomes(IntegerProducts(WIDENED), before, expected)


def test_a_table_that_no_product_reads_stays_as_it_is(becomes: Callable[[Pass, str, str], None]) -> None:
    text = """
        func main(ids: i32[n], q: i8[6, 64], s: f32[6, 1]) -> f32[n, 64] {
          x = look_up(ids, q, s, size=6, length=64)
          return x
        }
    """
    becomes(IntegerProducts(BYTES), text, text)


@pytest.mark.parametrize(
    ("calls", "in_panels"),
    [
        ("a = look_up(ids, q, s, ROWS) b = look_up(ids, q, t, ROWS) w = dequantize(q, s) y = linear(a, w) z = linear(b, w)", [0]),
        (
            """a = look_up(ids, q, s, ROWS) b = look_up(ids, q, t, ROWS) w = dequantize(q, s) m = dequantize(q, t)
               y = linear(a, w) z = linear(a, m)""",
            [0, 1],
        ),
        (
            """a = look_up(ids, p, u, v, ROWS, bits=4, offset="shift") b = look_up(ids, p, v, u, ROWS, bits=4, offset="shift")
               w = dequantize(p, u, v, bits=4, group=32, shifted=true) y = linear(a, w) z = linear(b, w)""",
            [0],
        ),
        (
            """a = look_up(ids, p, u, v, ROWS, bits=4, offset="shift") b = look_up(ids, p, u, v, ROWS, bits=4, offset="zero")
               w = dequantize(p, u, v, bits=4, group=32, shifted=true) y = linear(a, w) z = linear(b, w)""",
            [0],
        ),
        (
            """a = look_up(ids, p, u, v, ROWS, bits=4, offset="shift") b = look_up(ids, p, u, v, ROWS, bits=4, offset="zero")
               w = dequantize(p, u, v, bits=4, group=32) y = linear(a, w) z = linear(b, w)""",
            [],
        ),
        (
            """a = look_up(ids, p, u, ROWS, bits=4) b = look_up(ids, p, u, ROWS, bits=4, kind="e2m1")
               w = dequantize(p, u, bits=4, group=32) y = linear(a, w) z = linear(b, w)""",
            [0],
        ),
    ],
    ids=["scales", "two products", "order", "zero points of a look-up", "zero points of a product", "kind"],
)
def test_a_look_up_that_reads_the_numbers_in_another_way_keeps_its_own(calls: str, in_panels: list[int]) -> None:
    """All look-ups read the numbers of the product. `in_panels` has those that also read its scales and shifts, in the same way."""
    params = "ids: i32[5], q: i8[64, 64], s: f32[64, 1], t: f32[64, 1], p: u8[64, 32], u: f32[64, 2], v: f32[64, 2]"
    text = f"func main({params}) -> object {{ {calls.replace('ROWS', 'size=64, length=64')} r = (a, b, y, z) return r }}"
    rng = np.random.default_rng(0)
    numbers, codes = rng.integers(-127, 128, (64, 64)).astype(np.int8), rng.integers(0, 256, (64, 32)).astype(np.uint8)
    s, t, u, v = (rng.uniform(0.5, 1.5, (64, groups)).astype(np.float32) for groups in (1, 1, 2, 2))
    args = np.array([0, 5, 63, 5, 1], np.int32), numbers, s, t, codes, u, v
    module = IntegerProducts(BYTES)(parse(text))
    values = [b.value for b in module.graph("main").body.bindings if isinstance(b.value, Call)]
    formats = [call.attrs.get("format", "") for call in values if call.op.name == "look_up"]
    assert [i for i, format in enumerate(formats) if format] == in_panels
    expected, given = (Interpreter(m).call("main", *args) for m in (parse(text), module))
    for number in (0, 1):
        np.testing.assert_array_equal(given[number], expected[number])
    for number in (2, 3):
        np.testing.assert_allclose(given[number], expected[number], atol=0.01 * np.abs(expected[number]).max())
