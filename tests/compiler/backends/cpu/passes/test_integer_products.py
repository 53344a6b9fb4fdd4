"""Products of quantised weights become products of integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.backends.cpu.passes.integer_products import IntegerProducts
from compiler.ir.graph.values import Call
from compiler.ir.text.parser import parse
from compiler.machine.formats import PANEL4, PANEL8, PANEL8_WORDS, WIDENED4
from compiler.machine.intrinsics.amx import AmxI8ByI8
from compiler.machine.intrinsics.dot_panel import DotPanel, DotWords
from compiler.machine.intrinsics.widen_panel import WidenPanel
from compiler.machine.products import FloatTile, ProductTile, ProductTiles, TileShape
from compiler.passes.base import Pass

_BYTES = tuple(ProductTile(DotPanel(rows=1, columns=4, bits=f.bits), f, depth=4) for f in (PANEL8, PANEL4))
_WIDENED = ProductTile(AmxI8ByI8(rows=1, columns=4), WIDENED4, depth=64, block=512, widen=WidenPanel(columns=4, group=32))
ONE = TileShape(1, 1)
BYTES = ProductTiles(FloatTile(ONE), ONE, _BYTES)
WIDENED = ProductTiles(FloatTile(ONE), ONE, (_WIDENED, *_BYTES))
WORDS = ProductTiles(FloatTile(ONE), ONE, (ProductTile(DotWords(rows=1, columns=4), format=PANEL8_WORDS, depth=4),))


def test_rows_are_quantised_once_for_all_products(becomes: Callable[[Pass, str, str], None]) -> None:
    """What is written twice here is shared by a later pass."""
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


def test_weights_of_four_bits_take_rows_of_eight_in_their_groups() -> None:
    module = IntegerProducts(BYTES)(
        parse("""
        func main(x: bf16[n, 64], q: u8[6, 32], s: bf16[6, 2]) -> bf16[n, 6] {
          w = dequantize(q, s, bits=4, group=32)
          y = linear(x, w)
          return y
        }
    """)
    )
    calls = {b.value.op.name: b.value.attrs for b in module.graph("main").body.bindings if isinstance(b.value, Call)}
    assert calls["quantize_rows"] == {"bits": 8, "group": 32, "dtype": "i8"}
    assert calls["integer_linear"] == {"format": "panel4", "size": 6, "dtype": "bf16"}


def test_weights_that_are_widened_take_a_scale_per_row_and_channel(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 64], q: u8[6, 32], s: bf16[6, 2], b: f32[6]) -> f32[n, 6] {
          w = dequantize(q, s, bits=4, group=32, dtype="f32")
          y = linear(x, w, b)
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
    )  # i32 might not hold the sum of a channel
    for program, tiles in ((before, BYTES), (longer, WIDENED)):
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


@pytest.mark.parametrize(
    "program",
    [
        "func main(x: f32[n, 64], w: f32[6, 64]) -> object { y = linear(x, w) return y }",
        "func main(x: f32[n, 6], q: i8[5, 6], s: f32[5, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }",
        "func main(x: f32[n, 8], q: i8[5, 8], s: f32[5, 1], z: i8[5, 1]) -> object { w = dequantize(q, s, z) y = linear(x, w) return y }",
        "func main(x: f32[n, 8], q: i8[m, 8], s: f32[m, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }",
    ],
)
def test_what_does_not_fit_stays(stays: Callable[[Pass, str], None], program: str) -> None:
    """Floats, a length that is no multiple of four, numbers with a zero of their own, extents that are not known."""
    stays(IntegerProducts(BYTES), program)
