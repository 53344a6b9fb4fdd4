"""Products of quantised numbers are close to the interpreter's result, and a row of the result has the same bits in any batch, on every
machine that has tiles for integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.idioms.product import grouped_product_in
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.loops.statements import For, LoopKind, Tile
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.text.parser import parse
from compiler.machine.intrinsics.amx import AmxI8ByU8
from compiler.machine.intrinsics.amx_widening import AmxWidening
from compiler.machine.intrinsics.dot_panel import DotPanel
from compiler.machine.target import NAMED, Target, get, host
from runtime.session import Session

# CPU features with instructions that multiply integers. No other feature changes the results of these tests.
UNITS = {"avx2", "avxvnni", "avx512vnni", "amx-int8", "dotprod", "i8mm"}
PLAIN = Target("plain", "x86_64", frozenset(["fma", "f16c"]), 128)  # without instructions that multiply integers and add
HERE = list({(t.vector_bits, t.features & UNITS): t for t in (PLAIN, *NAMED.values(), host()) if t.can_run_here}.values())
FORMATS = [(8, 0), (8, 128), (4, 32), (4, 0)]
MORE_FORMATS = [(4, 64), (4, 128)]  # (bits, group): groups of 64 and 128 elements
MOST_MEANT = 16  # rows of a product that the interpreter computes, because it takes much longer than the compiled code
COARSE = ', tolerates="i8"'  # attribute of a product that allows its rows to be rounded to 8 bits
ROUNDING = ', tolerates="bf16"'  # attribute of a product that allows targets to use numbers of their own
K = 256


def plain(bits: int, group: int, n: int, k: int = K, *, more: str = "") -> str:
    form = f"bits={bits}, group={group}"
    return f"""
        func main(x: f32[m, {k}], w: f32[{n}, {k}]) -> object {{
          dataflow {{
            both = quantize(w, {form}) q = both.0 s = both.1
            d = dequantize(q, s, {form})
            y = linear(x, d{more})
          }}
          return y
        }}
    """


ELEVEN = 11 * 32  # 11 groups of 32 elements of k: a remainder follows the groups that a tile processes at once
WIDE = 11 * 32 - 5  # columns in 11 panels: a remainder follows the panels that a single row computes at once

GATED = f"""
    func main(
      x: f32[m, {ELEVEN}], g: f32[{WIDE}, {ELEVEN}], u: f32[{WIDE}, {ELEVEN}], bias: f32[{WIDE}], residual: f32[m, {WIDE}]
    ) -> object {{
      dataflow {{
        g2 = quantize(g, bits=4, group=32) gq = g2.0 gs = g2.1 gd = dequantize(gq, gs, bits=4, group=32)
        u2 = quantize(u, bits=4, group=32) uq = u2.0 us = u2.1 ud = dequantize(uq, us, bits=4, group=32)
        a = linear(x, gd) b = linear(x, ud, bias)
        s = silu(a) p = multiply(s, b) y = add(p, residual)
      }}
      return y
    }}
"""


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.fixture
def computed(session_of: Callable[[str, Target, int], Session]) -> Callable[..., Any]:
    """`computed(program, *args)` returns the result of `main`. Some of its rows are close to the interpreter's, or all have the bits of
    `known`. All targets give the same bits, with 1 and 3 threads."""

    def call(program: str, *args: Any, known: Any = None) -> Any:
        found = [session_of(program, target, num_threads).call("main", *args) for target in HERE for num_threads in (1, 3)]
        if known is None:
            num_rows = len(args[0])
            # Rows with the largest numbers are among them: outliers are computed by other instructions.
            largest = np.argsort(np.nan_to_num(np.abs(args[0]), nan=np.inf).max(axis=1))[-2:]
            some = np.unique([*np.linspace(0, num_rows - 1, MOST_MEANT).astype(int), *largest])
            few = [arg[some] if len(arg) == num_rows else arg for arg in args]
            meant = Interpreter(pipeline(HERE[0]).until("legalize")(parse(program))).call("main", *few)
            np.testing.assert_allclose(found[0][some], meant, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(meant), initial=0))
        for other in found if known is not None else found[1:]:
            np.testing.assert_array_equal(other, found[0] if known is None else known)
        return found[0]

    return call


@pytest.mark.parametrize(
    ("bits", "group", "more"),
    [
        *((bits, group, "") for bits, group in FORMATS),
        (8, 0, COARSE),
        *(pytest.param(bits, group, "", marks=pytest.mark.slow) for bits, group in MORE_FORMATS),
    ],
)
def test_a_row_has_the_same_bits_in_any_batch(computed: Callable[..., Any], bits: int, group: int, more: str) -> None:
    program, x, w = plain(bits, group, 100, more=more), f32(33, K), f32(100, K)
    whole = computed(program, x, w)
    for rows in (slice(0, 1), slice(3, 18), slice(5, 22)):
        computed(program, x[rows].copy(), w, known=whole[rows])
    error = np.abs(whole - x @ w.T).max() / np.abs(whole).max()
    assert error < (0.2 if bits == 4 else 0.02)


@pytest.mark.parametrize("group", [32, 64, 0])
def test_outliers_of_a_row_beside_weights_of_four_bits_leave_other_rows_alone(computed: Callable[..., Any], group: int) -> None:
    """Tiles compute upper planes only where a row has an outlier. Rows without one have the same bits in such a tile as elsewhere."""
    program, x, w = plain(4, group, 100), np.random.default_rng(0).choice([-1.0, 1.0], (33, K)).astype(np.float32), f32(100, K)
    without = computed(program, x, w)
    outlying = x.copy()
    outlying[3, 17], outlying[20, [0, K - 1]] = 300, -300
    whole = computed(program, outlying, w)
    others = [i for i in range(33) if i not in (3, 20)]
    np.testing.assert_array_equal(whole[others], without[others])
    for rows in (slice(0, 1), slice(3, 4), slice(2, 5), slice(13, 29)):
        computed(program, outlying[rows].copy(), w, known=whole[rows])
    exact = Interpreter(parse(program)).call("main", outlying, w)
    np.testing.assert_allclose(whole, exact, atol=2e-3 * np.abs(exact).max())
    outlying[3, 17] = np.nan
    damaged = computed(program, outlying, w)
    assert np.isnan(damaged[3]).all()
    np.testing.assert_array_equal(damaged[others], without[others])


@pytest.mark.parametrize(
    ("kind", "group", "dtype"),
    [
        ("e2m1", 32, DType.BF16),
        ("e2m1", 16, DType.F32),
        ("iq4", 32, DType.F16),
        ("iq4", 32, DType.F32),
        ("iq2", 16, DType.F32),
        ("ternary", K, DType.F16),
    ],
    ids=["mxfp4", "nvfp4", "iq4_nl", "iq4_xs", "iq2_xs", "tq2_0"],
)
def test_a_row_beside_numbers_of_a_table_has_the_same_bits_in_any_batch(
    computed: Callable[..., Any], kind: str, group: int, dtype: DType
) -> None:
    program = f"""
        func main(x: f32[m, {K}], q: u8[100, {K // 2}], s: {dtype}[100, {K // group}]) -> object {{
          dataflow {{ w = dequantize(q, s, bits=4, group={group}, kind="{kind}") y = linear(x, w) }}
          return y
        }}
    """
    random, x = np.random.default_rng(0), f32(33, K)
    q, scale = random.integers(0, 256, (100, K // 2)).astype(np.uint8), np.ldexp(1.0, random.integers(-8, 3, (100, K // group)))
    whole = computed(program, x, q, scale.astype(dtype.numpy))
    for rows in (slice(0, 1), slice(3, 18), slice(5, 22)):
        computed(program, x[rows].copy(), q, scale.astype(dtype.numpy), known=whole[rows])


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (8, 128), (4, 32)])
def test_a_row_beside_weights_with_offsets_has_the_same_bits_in_any_batch(computed: Callable[..., Any], bits: int, group: int) -> None:
    """The terms of zero points are added in the same order by every tile, also by a matrix unit that keeps exact sums in memory."""
    holds, each = "i8" if bits == 8 else "u8", K // (group or K)
    program = f"""
        func main(x: f32[m, {K}], q: {holds}[100, {K * bits // 8}], s: f32[100, {each}], z: {holds}[100, {each}]) -> object {{
          dataflow {{ w = dequantize(q, s, z, bits={bits}, group={group}) y = linear(x, w) }}
          return y
        }}
    """
    random, x = np.random.default_rng(0), f32(33, K) + 1
    q = random.integers(0, 256, (100, K * bits // 8)).astype(np.uint8)
    given = (q.view(np.int8) if bits == 8 else q, random.random((100, each)).astype(np.float32))
    zero = random.integers(1, 15, (100, each)).astype(DType(holds).numpy)
    whole = computed(program, x, *given, zero)
    for rows in (slice(0, 1), slice(3, 18), slice(5, 22)):
        computed(program, x[rows].copy(), *given, zero, known=whole[rows])


def test_a_row_beside_weights_with_shifts_in_units_has_the_same_bits_in_any_batch(computed: Callable[..., Any]) -> None:
    program = f"""
        func main(x: f32[m, {K}], q: u8[100, {K // 2}], s: i8[100, {K // 32}], su: f16[100, 1], o: i8[100, {K // 32}], ou: f16[100, 1])
            -> object {{
          dataflow {{
            scale = dequantize(s, su, group={K // 32}) shift = dequantize(o, ou, group={K // 32})
            w = dequantize(q, scale, shift, bits=4, group=32, shifted=true) y = linear(x, w)
          }}
          return y
        }}
    """
    random, x = np.random.default_rng(0), f32(33, K) + 1
    q, levels = random.integers(0, 256, (100, K // 2)).astype(np.uint8), random.integers(0, 64, (2, 100, K // 32)).astype(np.int8)
    units = random.random((2, 100, 1)).astype(np.float16)
    given = (q, levels[0], units[0], levels[1], units[1])
    whole = computed(program, x, *given)
    for rows in (slice(0, 1), slice(3, 18), slice(5, 22)):
        computed(program, x[rows].copy(), *given, known=whole[rows])


@pytest.mark.parametrize(("bits", "group", "more"), [(8, 0, ""), (8, 0, COARSE), (4, 32, "")])
@pytest.mark.parametrize("n", [1, pytest.param(31, marks=pytest.mark.slow), 33, pytest.param(4003, marks=pytest.mark.slow)])
def test_columns_that_fill_no_panel(computed: Callable[..., Any], bits: int, group: int, more: str, n: int) -> None:
    computed(plain(bits, group, n, 128, more=more), f32(9, 128), f32(n, 128))


@pytest.mark.parametrize("more", ["", COARSE])
def test_long_sums_and_many_rows(computed: Callable[..., Any], more: str) -> None:
    computed(plain(8, 0, 32, 11264, more=more), f32(257, 11264), f32(32, 11264))


def test_coarse_rows_err_little_more_than_eight_bits_do(computed: Callable[..., Any]) -> None:
    x, w = f32(33, 1024), f32(100, 1024)
    fine, coarse = (computed(plain(8, 0, 100, 1024, more=more), x, w) for more in ("", COARSE))
    errors = [np.sqrt(np.square(y - x @ w.T).mean() / np.square(x @ w.T).mean()) for y in (fine, coarse)]
    assert errors[0] < 0.01 and errors[1] < 0.015


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 64)])
def test_blocks_of_long_rows_have_several_panels(computed: Callable[..., Any], bits: int, group: int) -> None:
    """Rows that fill a quarter of the second-level cache are a block, which several panels read. There are as many claims as with one panel
    and BLOCK_ROWS rows. The bits of a row are those of the row alone."""
    k = 8192
    program, x, w = plain(bits, group, 100, k), f32(70, k), f32(100, k)
    x[5, 17], x[40, 8000] = 90, -90
    whole = computed(program, x, w)
    for rows in (slice(0, 1), slice(31, 41), slice(65, 70)):
        computed(program, x[rows].copy(), w, known=whole[rows])
    prims = pipeline(NAMED["avx512-vnni-bf16"]).until("schedule_kernels")(parse(plain(bits, group, 3200, k))).prim_functions.values()
    (kernel,) = [p for p in prims if p.attrs.get("schedule") == "integer"]
    (claims,) = [s.extent for s in walk_stmts(kernel.body) if isinstance(s, For) and s.kind is LoopKind.PARALLEL]
    (rows,) = claims.vars()
    counts = [claims.evaluate({rows: count}) for count in (1, 32, 64, 256, 512)]
    assert counts == [100, 100, 100, 104, 208]  # one panel and 256 rows would be 100 and 200


def test_the_last_row_of_a_long_block_computes_all_panels_of_its_claim(computed: Callable[..., Any]) -> None:
    """A single row computes four panels of gate and up together. A claim may have eight."""
    k, n = 4096, 9 * 32
    program = f"""
        func main(x: f32[m, {k}], g: f32[{n}, {k}], u: f32[{n}, {k}]) -> object {{
          dataflow {{
            g2 = quantize(g, bits=4, group=128) gq = g2.0 gs = g2.1 gd = dequantize(gq, gs, bits=4, group=128)
            u2 = quantize(u, bits=4, group=128) uq = u2.0 us = u2.1 ud = dequantize(uq, us, bits=4, group=128)
            a = linear(x, gd) b = linear(x, ud) s = silu(a) y = multiply(s, b)
          }}
          return y
        }}
    """
    x, weights = f32(257, k), (f32(n, k), f32(n, k) * 0.5)
    whole = computed(program, x, *weights)
    for rows in (slice(255, 257), slice(256, 257)):
        computed(program, x[rows].copy(), *weights, known=whole[rows])


@pytest.mark.parametrize("largest", [-2.0, 2.0])
def test_extremes_do_not_saturate(computed: Callable[..., Any], largest: float) -> None:
    x, w = np.full((2, 4096), 3.0, np.float32), np.full((32, 4096), largest, np.float32)
    np.testing.assert_allclose(computed(plain(8, 0, 32, 4096), x, w), 3.0 * largest * 4096, rtol=1e-4)


def test_gate_and_up_with_their_epilogue_are_one_kernel(computed: Callable[..., Any]) -> None:
    x, weights, residual = f32(17, ELEVEN), (f32(WIDE, ELEVEN), f32(WIDE, ELEVEN) * 0.5, f32(WIDE)), f32(17, WIDE)
    whole = computed(GATED, x, *weights, residual)
    for rows in (slice(3, 4), slice(5, 12)):
        computed(GATED, x[rows].copy(), *weights, residual[rows].copy(), known=whole[rows])
    prims = pipeline(HERE[0]).until("schedule_kernels")(parse(GATED)).prim_functions.values()
    (kernel,) = [p for p in prims if p.attrs.get("schedule") == "integer"]
    assert len({s.operands[2].buffer for s in walk_stmts(kernel.body) if isinstance(s, Tile)}) == 2


@pytest.mark.parametrize("name", ["aarch64-neon", "riscv64", "wasm-simd128"])
def test_machines_without_integer_units_multiply_integers_too(name: str) -> None:
    for bits, group in FORMATS:
        prims = pipeline(get(name)).until("schedule_kernels")(parse(plain(bits, group, 64))).prim_functions.values()
        schedules = [p.attrs.get("schedule") for p in prims]
        assert "integer" in schedules and "matmul" not in schedules


@pytest.mark.parametrize(
    ("bits", "group", "more", "tile"),
    [
        (8, 0, "", AmxI8ByU8),
        (8, 0, COARSE, AmxI8ByU8),
        (8, 128, "", AmxI8ByU8),
        (8, 32, "", DotPanel),
        (4, 32, "", DotPanel),
        (4, 32, ROUNDING, AmxWidening),
    ],
)
def test_matrix_units_take_bytes_whose_groups_fill_them(bits: int, group: int, more: str, tile: str) -> None:
    """Matrix units multiply bytes if a group of weights fills the depth of a tile. They widen weights of 4 bits only if the program lets
    them round. The interpreter runs the scheduled kernel, because this machine may lack the unit."""
    program, x, w = plain(bits, group, 40, more=more), f32(19, K), f32(40, K)
    scheduled = pipeline(get("amx")).until("schedule_kernels")(parse(program))
    tiles = {type(s.op) for p in scheduled.prim_functions.values() for s in walk_stmts(p.body) if isinstance(s, Tile)}
    assert tile in tiles
    meant = Interpreter(pipeline(get("amx")).until("legalize")(parse(program))).call("main", x, w)
    found = Interpreter(scheduled).call("main", x, w)
    np.testing.assert_allclose(found, meant, rtol=1e-5, atol=1e-5 * np.abs(meant).max())


DOT = "contract(r in 8) cast(i32, q[i, {plane}, 8*g + r]) by stored(panel8, 8*g + r, P[j // 4, (8*g + r) // 4, {place}])"
PLACE = "4*(j % 4) + (8*g + r) % 4"


@pytest.mark.parametrize(
    ("planes", "place", "taken"),
    [((0, 1), PLACE, True), ((1, 0), PLACE, False), ((0, 0), PLACE, False), ((0,), PLACE, False), ((0, 1), "j + 4*((8*g + r) % 4)", False)],
)
def test_tiles_take_planes_in_order_beside_elements_where_their_format_has_them(planes: tuple[int, ...], place: str, taken: bool) -> None:
    """A loop nest is computed by a tile only if the nest reads planes and elements in the order of the tile's format. Other nests run as
    they are written."""
    dots = ", ".join(DOT.format(plane=plane, place=place) for plane in planes)
    value = f"contract_groups(g in 2) [{dots}] by s[i, g]"
    params = "q: i8[n, 2, 16], P: u8[1, 4, 16], s: f32[n, 2], out y: f32[n, 4]"
    prim = parse(f"prim f({params}) {{ for i in n, j in 4 {{ y[i, j] = {value} }} }}").prim("f")
    assert (grouped_product_in(prim) is not None) is taken


def test_a_product_that_no_tile_takes_adds_first_the_terms_then_the_products(compiled_once: Callable[..., Any]) -> None:
    """Code for tiles adds in this order, too, so a product has the same bits whether a tile takes it or not."""
    dot = "contract(r in 2) cast(i32, q[i, 2*g + r]) by cast(i32, w[j, 2*g + r])"
    program = f"""
        prim f(q: i8[n, 32], w: i8[4, 32], s: f32[n, 16], o: f32[4, 16], out y: f32[n, 4]) {{
          for i in n, j in 4 {{ y[i, j] = contract_groups(g in 16) [{dot}] by s[i, g] beside o[j, g] }}
        }}
        func main(q: i8[n, 32], w: i8[4, 32], s: f32[n, 16], o: f32[4, 16]) -> f32[n, 4] {{
          dataflow {{ y = call_tir @f(q, w, s, o) -> f32[n, 4] }}
          return y
        }}
    """
    rng = np.random.default_rng(0)
    q, w = (rng.integers(-128, 128, (rows, 32)).astype(np.int8) for rows in (5, 4))
    s, o = (rng.standard_normal((rows, 16)).astype(np.float32) for rows in (5, 4))
    expected = np.zeros((5, 4), np.float32)
    for g in range(16):
        expected += o[:, g]
    for g in range(16):
        part = slice(2 * g, 2 * g + 2)
        expected += (q[:, part].astype(np.int32) @ w[:, part].astype(np.int32).T).astype(np.float32) * s[:, g, None]
    session = Session(compiled_once(parse(program)))
    np.testing.assert_array_equal(session.call("main", q, w, s, o), expected)
    session.close()
    np.testing.assert_allclose(Interpreter(parse(program)).call("main", q, w, s, o), expected, rtol=1e-5, atol=1e-3)
