"""For each target and weight format, the tile that is chosen for products, on vector units and on matrix units."""

from __future__ import annotations

import pytest

from compiler.ir.dtypes import DType
from compiler.ir.numbers import Kind
from compiler.machine.formats import TABLE_PANELS, TablePanels
from compiler.machine.products import FloatTile, TileShape, product_tiles
from compiler.machine.target import GPU, NAMED, Target

AVX_VNNI = Target("avx-vnni", "x86_64", NAMED["x86-64-v3"].features | {"avxvnni"}, 256)
TARGETS = {name: t for name, t in NAMED.items() if t.system != GPU} | {"avx-vnni": AVX_VNNI}

# target -> (name of the tile, bits of the weights, rows, columns) of each tile. Tiles for integers of 4 bits also take floats of 4 bits.
TILES = {
    "x86-64-v3": [("dot_panel", 4, 2, 16), ("dot_words", 8, 4, 16)],
    "avx-vnni": [("dot_panel", 8, 2, 16), ("dot_panel", 4, 2, 16)],
    "avx512": [("dot_panel", 4, 4, 32), ("dot_words", 8, 8, 32)],
    "avx512-vnni-bf16": [("dot_panel", 6, 4, 32), ("dot_panel", 8, 4, 32), ("dot_panel", 4, 8, 32)],
    "avx512-bf16-amd": [
        ("dot_bf16", 16, 8, 32),
        ("dot_panel", 6, 4, 32),
        ("dot_panel", 8, 4, 32),
        ("dot_panel", 4, 8, 32),
        ("dot_e4m3", 8, 8, 32),
    ],
    "amx": [
        ("amx_bf16", 16, 32, 32),
        ("amx_i8_i8", 4, 32, 32),
        ("amx_bf16", 8, 32, 32),
        ("dot_panel", 6, 4, 32),
        ("amx_i8_u8", 8, 16, 32),
        ("dot_panel", 8, 4, 32),
        ("dot_panel", 4, 8, 32),
    ],
    "aarch64-neon": [("dot_panel", 4, 2, 16), ("dot_words", 8, 4, 16)],
    "aarch64-dotprod": [("dot_panel", 8, 2, 16), ("dot_panel", 4, 2, 16)],
    "aarch64-i8mm-bf16": [("dot_panel", 8, 2, 16), ("dot_panel", 4, 2, 16)],
    "aarch64-android": [("dot_panel", 8, 2, 16), ("dot_panel", 4, 2, 16)],
    "riscv64": [("dot_panel", 4, 2, 16), ("dot_words", 8, 4, 16)],
    "riscv64-v": [("dot_panel", 4, 2, 16), ("dot_words", 8, 4, 16)],
    "wasm-simd128": [("dot_panel", 4, 2, 16), ("dot_words", 8, 4, 16)],
    "wasm-relaxed": [("dot_panel", 4, 2, 16), ("dot_words", 8, 4, 16)],
}


@pytest.mark.parametrize("name", list(TARGETS))
def test_a_target_gets_the_best_that_it_has(name: str) -> None:
    tiles = product_tiles(TARGETS[name])
    shapes = [(t.format, t.op.name, t.format.bits, t.op.rows, t.op.columns) for t in tiles.tiles]
    assert [tuple(shape) for format, *shape in shapes if not isinstance(format, TablePanels)] == TILES[name]
    small = [shape for shape in TILES[name] if shape[:2] == ("dot_panel", 4)]
    looks_up = name not in ("aarch64-neon", "riscv64", "riscv64-v")  # these multiply integers one by one, and store such numbers in 8 bits
    for kind, table in TABLE_PANELS.items():
        if kind is not Kind.IQ4:
            wanted = [(name, table.bits, *shape) for name, _, *shape in small] if looks_up or kind is Kind.TERNARY else []
            assert [tuple(shape) for format, *shape in shapes if format is table] == wanted
    multiplies_bytes = any(shape[:2] == ("dot_panel", 8) for shape in TILES[name])  # other steps are exact only for small numbers
    assert [tuple(shape) for format, *shape in shapes if format is TABLE_PANELS[Kind.IQ4]] == (small if multiplies_bytes else [])
    wide = FloatTile(TileShape(8, 2) if TARGETS[name].vector_bits == 512 else TileShape(4, 1))
    narrow = FloatTile(TileShape(rows=4, vectors=1, lanes=8), steps=2), FloatTile(TileShape(rows=2, vectors=1), steps=1)
    assert (tiles.floats, tiles.attention) == (narrow if name.startswith("wasm") else (wide, wide))
    assert tiles.on_matrix_unit == (name == "amx")


@pytest.mark.parametrize("tile", [t for target in TARGETS.values() for t in product_tiles(target).tiles], ids=lambda t: t.op.name)
def test_a_tile_is_whole(tile) -> None:
    """The shape, depth and operands of each tile are consistent: its blocks consist of whole steps, and its accumulators have the right
    type."""
    shape = tile.shape
    assert (shape.rows, shape.columns) == (tile.op.rows, tile.op.columns) and shape.rows & shape.rows - 1 == 0
    assert list(tile.op.problems()) == [] and tile.op.dims[:2] == ("k", "stride")
    assert (tile.block is not None) == tile.on_matrix_unit and (tile.block or 0) % tile.depth == 0
    assert tile.op.accumulator is (DType.F32 if tile.rows is DType.BF16 else DType.I32)


@pytest.mark.parametrize("name", list(TARGETS))
def test_rows_with_one_plane_fill_the_registers_of_rows_with_two(name: str) -> None:
    for tile in product_tiles(TARGETS[name]).integers:
        one, two = tile.shape_of(1), tile.shape_of(2)
        assert two == tile.shape and one.columns == two.columns
        assert one.rows == two.rows * (2 if tile.op.name == "dot_panel" and tile.format.bits in (6, 8) else 1)


def test_channels_are_widened_whose_groups_lie_whole_in_a_block() -> None:
    tile = product_tiles(NAMED["amx"]).widened
    assert tile is not None
    assert [tile.widens(4096, group) for group in (32, 64, 128, 512, 1024)] == [True] * 5
    assert [tile.widens(*sizes) for sizes in ((4096, 96), (4096, 16), (4096, 2048), (4000, 32), (128, 128))] == [False] * 5
    assert not any(t.widens(4096, 32) for t in product_tiles(NAMED["avx512"]).tiles)


def test_a_gpu_multiplies_on_its_tensor_cores() -> None:
    for target in (t for t in NAMED.values() if t.system == GPU):
        tiles = product_tiles(target)
        assert tiles.pairs is not None and tiles.pairs.op.runs_on(target) and not tiles.integers and not tiles.on_matrix_unit
        kinds = ["wgmma_product"] if target.name == "sm_90a" else []
        found = [(t.op.name, t.format.bits) for t in tiles.tiles]
        assert found == [*((k, b) for k in (*kinds, "mma_product") for b in (16, 8, 8, 4)), ("mma_product", 4)]
        assert [(t.format.bits, t.format.dtype) for t in tiles.scaled[:3]] == [(8, DType.I32), (8, DType.E4M3), (4, DType.I32)]
    assert not tiles.pairs.op.runs_on(NAMED["amx"])
