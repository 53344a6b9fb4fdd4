"""Products of quantised weights become products of integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.backends.cpu.passes.integer_products import IntegerProducts
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
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


@pytest.mark.parametrize("tiles", [BYTES, WORDS, WIDENED], ids=["bytes", "words", "widened"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_offsets_of_groups_are_subtracted_behind_the_product(tiles: ProductTiles, bits: int, shifted: bool, dtype: str) -> None:
    """With a bias; rows with a sum far from 0, so that a missing offset would show."""
    if tiles is WORDS and bits == 4:
        return  # has no tile of 4 bits
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
    assert "integer_linear" in calls and calls.count("linear") == 1
    q = rng.integers(0, 1 << bits, (6, 16 * bits)).astype(np.uint8)
    given = (q.view(np.int8) if bits == 8 else q, rng.random((6, 2)).astype(np.float16))
    zero = rng.integers(1, 15, (6, 2)).astype(DType(holds).numpy)
    offset = rng.random((6, 2)).astype(np.float32) if shifted else zero
    operands = ((rng.standard_normal((5, 128)) + 2).astype(np.float32), *given, offset, rng.standard_normal(6).astype(np.float32))
    expected, actual = (Interpreter(m).call("main", *operands).astype(np.float32) for m in (module, found))
    limit = (5e-3 if bits == 4 else 5e-5) + (2.0**-8 if dtype == "bf16" else 0)
    assert np.abs(actual - expected).max() < limit * np.abs(expected).max()


def test_rows_that_choose_a_matrix_with_offsets_stay(stays: Callable[[Pass, str], None]) -> None:
    program = "func main(x: f32[n, 8], q: i8[3, 5, 8], s: f32[3, 5, 1], z: i8[3, 5, 1], e: i32[n]) -> object "
    stays(IntegerProducts(BYTES), program + "{ w = dequantize(q, s, z) y = expert_linear(x, w, e) return y }")


@pytest.mark.parametrize(
    "program",
    [
        "func main(x: f32[n, 64], w: f32[6, 64]) -> object { y = linear(x, w) return y }",
        "func main(x: f32[n, 6], q: i8[5, 6], s: f32[5, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }",
        "func main(x: f32[n, 8], q: i8[m, 8], s: f32[m, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }",
    ],
)
def test_what_does_not_fit_stays(stays: Callable[[Pass, str], None], program: str) -> None:
    """Floats, a length that is no multiple of four, extents that are not known."""
    stays(IntegerProducts(BYTES), program)
