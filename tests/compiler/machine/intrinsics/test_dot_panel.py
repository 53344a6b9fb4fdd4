"""The dot tile of bytes: its definition in NumPy, and the instruction that its inner loop uses on each target."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.backends.cpu.pipeline import pipeline
from compiler.codegen.link import link
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Const, Load
from compiler.ir.loops.statements import Allocate, For, LoopKind, Seq, Stmt, Store, Tile
from compiler.ir.numbers import TABLES, Kind
from compiler.ir.text.parser import parse
from compiler.machine.formats import PANEL4, PANEL8, TABLE_PANELS
from compiler.machine.intrinsics.dot_panel import DotPanel, DotWords
from compiler.machine.target import NAMED, Target

ROWS, COLUMNS, K = 4, 16, 64
PANELS_OF = {(4, Kind.INT): PANEL4, (8, Kind.INT): PANEL8, **{(format.bits, kind): format for kind, format in TABLE_PANELS.items()}}
AVX_VNNI = Target("avx-vnni", "x86_64", NAMED["x86-64-v3"].features | {"avxvnni"}, 256)
TARGETS = (NAMED["avx512-vnni-bf16"], AVX_VNNI, NAMED["aarch64-i8mm-bf16"], NAMED["aarch64-dotprod"])


def tiled(
    bits: int, lanes: int, rows: DType = DType.I8, height: int = ROWS, *, kind: Kind = Kind.INT, op: DotPanel | DotWords | None = None
) -> PrimFunc:
    """Return a kernel that computes c = a * b with one tile. What `op` prefetches for later begins at b."""
    op = op or op_of(bits, rows, height, kind=kind)
    columns = op.columns
    planes = 2 if isinstance(op, DotPanel) and op.capped else 1
    a, b = Buffer("a", (Dim.of(height * planes), Dim.of(K)), rows), Buffer("b", (Dim.of(K * bits // 32), Dim.of(4 * columns)), DType.U8)
    c, acc = (Buffer(n, (Dim.of(height), Dim.of(columns)), DType.I32, s) for n, s in (("c", Scope.GLOBAL), ("acc", Scope.LOCAL)))
    zero = Dim.of(0)

    def each(to: Buffer, *, clear: bool) -> Stmt:
        i, j, v = DimVar("i", upper=height - 1), DimVar("j", upper=columns // lanes - 1), DimVar("v", upper=lanes - 1)
        at = (i.dim, j * lanes + v)
        inner: Stmt = For(v, Dim.of(lanes), Store(to, at, Const(0, DType.I32) if clear else Load(acc, at)), LoopKind.VECTOR)
        inner = For(j, Dim.of(columns // lanes), inner, LoopKind.UNROLL)
        return For(i, Dim.of(height), inner, LoopKind.UNROLL)

    places = (Load(acc, (zero, zero)), Load(a, (zero, zero)), Load(b, (zero, zero)))
    places += places[-1:] * op.later
    tile = Tile(op, places, (Dim.of(K), Dim.of(K)))
    body = Seq((each(acc, clear=True), tile, each(c, clear=False)))
    return PrimFunc((a, b, c), 1, For(DimVar("once", upper=0), Dim.of(1), Allocate(acc, body), LoopKind.PARALLEL))


def op_of(bits: int, rows: DType = DType.I8, height: int = ROWS, *, kind: Kind = Kind.INT) -> DotPanel | DotWords:
    return DotWords(height, COLUMNS) if rows is DType.I16 else DotPanel(height, COLUMNS, bits, kind)


def panel_bits(target: Target) -> list[int]:
    return [bits for bits in (8, 6, 4) if op_of(bits).runs_on(target)]


def multiplies_words(target: Target) -> bool:
    return op_of(8, DType.I16).runs_on(target)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        (TARGETS[0], r"vpdpbusd\s.*%zmm"),
        (TARGETS[1], r"\{vex\}\s+vpdpbusd\s.*%ymm"),
        (TARGETS[2], r"usdot\s+v\d+\.4s"),
        (TARGETS[3], r"sdot\s+v\d+\.4s"),
    ],
)
def test_inner_loop_is_made_of_the_targets_instruction(target: Target, instruction: str, bits: int) -> None:
    code = link([emit_kernel("k", tiled(bits, target.lanes(4)), target)], target)
    assert len(re.findall(instruction, code.assembly())) >= ROWS * COLUMNS // target.lanes(4)
    assert "alloca" not in code.optimised()


@pytest.mark.parametrize(("name", "register"), [("x86-64-v3", "ymm"), ("avx512", "zmm")])
def test_where_bytes_saturate_four_bits_and_words_are_multiplied(name: str, register: str) -> None:
    target = NAMED[name]
    assert panel_bits(target) == [4] and multiplies_words(target)
    registers = ROWS * COLUMNS // target.lanes(4)
    small, words = (tiled(bits, target.lanes(4), rows) for bits, rows in ((4, DType.I8), (8, DType.I16)))
    code = link([emit_kernel("k", small, target)], target).assembly()
    found = [len(re.findall(rf"{instruction}\s.*%{register}", code)) for instruction in ("vpmaddubsw", "vpmaddwd")]
    assert found[0] >= 8 * registers and found[1] == registers, "expected eight products per sum in 16 bits"
    code = link([emit_kernel("k", words, target)], target).assembly()
    assert len(re.findall(rf"vpmaddwd\s.*%{register}", code)) >= 2 * registers


@pytest.mark.parametrize(
    ("target", "look_up"), [(TARGETS[0], r"vpshufb\s.*%zmm"), (TARGETS[1], r"vpshufb\s.*%ymm"), (TARGETS[3], r"tbl\s+v\d+\.16b")]
)
def test_floats_of_four_bits_are_looked_up_in_registers(target: Target, look_up: str) -> None:
    code = link([emit_kernel("k", tiled(4, target.lanes(4), kind=Kind.E2M1), target)], target)
    assert len(re.findall(look_up, code.assembly())) >= 2 * COLUMNS // target.lanes(4)
    assert "alloca" not in code.optimised()


@pytest.mark.parametrize("height", [1, ROWS])
@pytest.mark.parametrize("target", [t for t in (*NAMED.values(), AVX_VNNI) if 8 in panel_bits(t) and t.can_run_here], ids=lambda t: t.name)
def test_tile_of_uneven_numbers_has_its_meaning(run_native: Any, target: Target, height: int) -> None:
    """Sums are exact even if all numbers are the largest one, and all elements of a row the least one."""
    rng, op = np.random.default_rng(4), DotPanel(height, COLUMNS, 4, Kind.IQ4)
    a, b = rng.integers(-128, 128, (height, K)).astype(np.int8), rng.integers(0, 256, (K // 8, 4 * COLUMNS)).astype(np.uint8)
    a[0], b[:, :8] = -128, 0xFF
    c, wanted = np.zeros((height, COLUMNS), np.int32), np.zeros((height, COLUMNS), np.int32)
    run_native(tiled(4, target.lanes(4), height=height, op=op), [a, b, c], {}, target=target)
    op.meaning((wanted.reshape(-1), a.reshape(-1), b.reshape(-1)), (K, K))
    np.testing.assert_array_equal(c, wanted)
    assert wanted[0, 0] == -128 * (113 + 127) * K


@pytest.mark.parametrize(("height", "columns"), [(1, COLUMNS), (ROWS, COLUMNS), (2 * ROWS, 2 * COLUMNS)])
@pytest.mark.parametrize(("bits", "kind"), [(2, Kind.TERNARY), (4, Kind.INT), (4, Kind.IQ2), (8, Kind.INT)])
@pytest.mark.parametrize("target", [t for t in (*NAMED.values(), AVX_VNNI) if 4 in panel_bits(t) and t.can_run_here], ids=lambda t: t.name)
def test_upper_planes_count_256_times(run_native: Any, target: Target, bits: int, kind: Kind, height: int, columns: int) -> None:
    """With the upper plane of rows, products count 256 times. Zeros of upper planes are skipped, but not if another row has other numbers
    there."""
    if not op_of(bits, kind=kind).runs_on(target):
        pytest.skip(f"{target.name} has no exact products of {bits} bits")
    rng, op = np.random.default_rng(4), DotPanel(height, columns, bits, kind, capped=True)
    b = rng.integers(0, 256, (K * bits // 32, 4 * columns)).astype(np.uint8)
    given = [(b, np.full((height, 2, K), number, np.int8)) for number in (-127, 127)]
    given += [(np.full_like(b, 255), a) for _, a in given]  # the largest sums
    for places in ([], [0], [K - 1], [3, 4, 17], range(K)):
        a = rng.integers(-127, 128, (height, 2, K)).astype(np.int8)
        a[:, 0] = 0
        for place in places:
            a[place % height, 0, place] = (-128, 127)[place % 2]
        given.append((b, a))
    numbers = PANELS_OF[bits, kind].stored(b[None]).astype(np.int32)
    for b, a in given:
        c, wanted = np.zeros((height, columns), np.int32), np.zeros((height, columns), np.int32)
        run_native(tiled(bits, target.lanes(4), height=height, op=op), [a.reshape(2 * height, K), b, c], {}, target=target)
        op.meaning((wanted.reshape(-1), a.reshape(-1), b.reshape(-1)), (K, K))
        np.testing.assert_array_equal(c, wanted)
    wide = a.astype(np.int32)
    np.testing.assert_array_equal(wanted, (256 * wide[:, 0] + wide[:, 1]) @ numbers.T)


def test_outliers_are_looked_for_row_by_row_with_scalar_instructions() -> None:
    """A mispredicted branch costs nothing if the core finds out before it has done the products before it. Steps that add in 16 bits look
    beside a whole line with vectors, because they widen the sums of all its rows."""
    vectors = r"vptestn?m[qd]|vpcmpeqq|vptest"
    for target in (*TARGETS, NAMED["x86-64-v3"]):
        code = link([emit_kernel("k", tiled(4, target.lanes(4), op=DotPanel(ROWS, COLUMNS, 4, capped=True)), target)], target)
        assert (re.search(vectors, code.assembly()) is not None) == (target.name == "x86-64-v3")
        assert len(re.findall(r"cmpq\s+\$0, .*\(", code.assembly())) >= (ROWS if target.name == "avx512-vnni-bf16" else 0)
        assert "alloca" not in code.optimised()
    assert len(list(DotPanel(ROWS, COLUMNS, 6, capped=True).problems())) == 1


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_uneven_numbers_need_a_step_for_bytes(target: Target) -> None:
    assert DotPanel(ROWS, COLUMNS, 4, Kind.IQ4).runs_on(target)
    assert "alloca" not in link([emit_kernel("k", tiled(4, 4, op=DotPanel(ROWS, COLUMNS, 4, Kind.IQ4)), target)], target).optimised()
    assert not DotPanel(ROWS, COLUMNS, 4, Kind.IQ4).runs_on(NAMED["x86-64-v3"]), "vpmaddubsw would saturate"
    for bits, kind, said in (
        (4, "iq5", f"kind is iq5, expected int or one of {', '.join(TABLE_PANELS)}"),
        (8, Kind.IQ4, "bits are 8, expected 4 for numbers of kind iq4"),
        (4, Kind.TERNARY, "bits are 4, expected 2 for numbers of kind ternary"),
        (2, Kind.INT, "bits are 2, expected 8 or 6 or 4 for numbers of kind int"),
    ):
        assert list(DotPanel(ROWS, COLUMNS, bits, kind).problems()) == [said]


@pytest.mark.parametrize(("later", "count"), [(0, 0), (1, K // 4), (2, K // 2)])
def test_beside_a_panel_in_the_cache_other_lines_are_prefetched(later: int, count: int) -> None:
    """With a panel in L1, a product prefetches one line of each later operand per four elements along k, and nothing else."""
    target = TARGETS[0]
    for op, rows in (
        (DotPanel(ROWS, COLUMNS, 8, cached_panel=True, later=later), DType.I8),
        (DotWords(ROWS, COLUMNS, cached_panel=True, later=later), DType.I16),
    ):
        code = link([emit_kernel("k", tiled(8, target.lanes(4), rows, op=op), target)], target).optimised()
        loops = K // 4 // 4  # iterations of the loop along k, which has four steps
        assert code.count("call void @llvm.prefetch") in (count, count // loops)


@pytest.mark.parametrize("height", [1, ROWS, 2 * ROWS])
@pytest.mark.parametrize(("bits", "rows"), [(4, DType.I8), (6, DType.I8), (8, DType.I8), (8, DType.I16)])
def test_panels_in_memory_are_prefetched(bits: int, rows: DType, height: int) -> None:
    """Without prefetches, the product of a single row took longer than reading the weights from memory. For few rows, panels of fewer than
    8 bits are prefetched twice: into the second-level cache (2), and then into the first (3). For many rows, the second prefetch would only
    take time."""
    target = TARGETS[0]
    code = link([emit_kernel("k", tiled(bits, target.lanes(4), rows, height), target)], target).optimised()
    levels = re.findall(r"call void @llvm.prefetch.*i32 0, i32 ([23]), i32 1", code)
    assert set(levels) == ({"2"} if (once := bits == 8 or height > ROWS) else {"2", "3"})
    assert once or levels.count("2") == levels.count("3")


TILES = [(t, bits, DType.I8) for t in (*NAMED.values(), AVX_VNNI) for bits in panel_bits(t)]
TILES += [(t, 8, DType.I16) for t in NAMED.values() if multiplies_words(t)]


@pytest.mark.parametrize(
    ("target", "bits", "rows"), [pytest.param(*tile, id=f"{tile[0].name}-{tile[1]}-{tile[2]}") for tile in TILES if tile[0].can_run_here]
)
def test_tile_has_its_meaning(run_native: Any, target: Target, bits: int, rows: DType) -> None:
    rng, least = np.random.default_rng(bits), -128 if rows is DType.I8 else -32639
    a, b = rng.integers(least, -least, (ROWS, K)).astype(rows.numpy), rng.integers(0, 256, (K * bits // 32, 4 * COLUMNS)).astype(np.uint8)
    a[0], b[:, :8] = least, 255
    c, wanted = np.zeros((ROWS, COLUMNS), np.int32), np.zeros((ROWS, COLUMNS), np.int32)
    run_native(tiled(bits, target.lanes(4), rows), [a, b, c], {}, target=target)
    op_of(bits, rows).meaning((wanted.reshape(-1), a.reshape(-1), b.reshape(-1)), (K, K))
    np.testing.assert_array_equal(c, wanted)


@pytest.mark.parametrize("height", [1, ROWS])
@pytest.mark.parametrize("target", [t for t in (*NAMED.values(), AVX_VNNI) if 4 in panel_bits(t) and t.can_run_here], ids=lambda t: t.name)
@pytest.mark.parametrize("kind", sorted(TABLES.keys() - {Kind.IQ4}))
def test_tile_of_a_table_has_its_meaning(run_native: Any, target: Target, height: int, kind: Kind) -> None:
    """Sums are exact even if all numbers are the largest one, and all elements of a row the least one."""
    rng, numbers, bits = np.random.default_rng(4), TABLES[kind], TABLE_PANELS[kind].bits
    if not op_of(bits, kind=kind).runs_on(target):
        pytest.skip(f"{target.name} does not look numbers up")
    a, b = rng.integers(-128, 128, (height, K)).astype(np.int8), rng.integers(0, 256, (K * bits // 32, 4 * COLUMNS)).astype(np.uint8)
    a[0], b[:, :8] = -128, int(numbers.argmax()) * (0x11 if bits == 4 else 0x55)
    c, wanted = np.zeros((height, COLUMNS), np.int32), np.zeros((height, COLUMNS), np.int32)
    run_native(tiled(bits, target.lanes(4), height=height, kind=kind), [a, b, c], {}, target=target)
    op_of(bits, height=height, kind=kind).meaning((wanted.reshape(-1), a.reshape(-1), b.reshape(-1)), (K, K))
    np.testing.assert_array_equal(c, wanted)
    assert wanted[0, 0] == -128 * (int(numbers.max()) - int(numbers.min())) * K


@pytest.mark.parametrize("target", [t for t in NAMED.values() if 8 not in panel_bits(t) and not multiplies_words(t)])
def test_machines_without_such_instructions_are_not_asked(target: Target) -> None:
    text = "func main(x: f32[n, 64], q: i8[32, 64], s: f32[32, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }"
    kernels = pipeline(target).until("schedule_kernels")(parse(text)).prim_functions.values()
    assert "integer" not in [k.attrs.get("schedule") for k in kernels]
