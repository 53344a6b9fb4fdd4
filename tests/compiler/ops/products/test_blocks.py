"""Blocks of GGUF, taken apart by compiled code. tests/compiler/frontend/gguf compares the NumPy definition with the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.ir.blocks import BLOCKS, PARTS, Half
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.numbers import Kind
from compiler.ir.types import tensor
from compiler.machine.formats import PANELS, TablePanels
from compiler.ops.products.blocks import PANEL_BLOCKS, UNPACK_BLOCKS
from compiler.ops.products.integer import PANEL_INTEGERS

CASES = [(name, part) for name, format in BLOCKS.items() for part in PARTS if format.part(part) is not None]

PACKED = [
    (b.name, p.name)
    for b in BLOCKS.values()
    for p in PANELS.values()
    if (b.bits == p.held_bits or (b.bits == 6 and p.bits == 8)) and b.kind is (p.kind if isinstance(p, TablePanels) else Kind.INT)
]


@pytest.mark.parametrize(("format", "part"), CASES)
def test_compiled_code_takes_every_part_of_every_format_apart(run, rng, format, part):
    """`run` compares the compiled program with NumPy."""
    blocks = rng.integers(0, 256, (3, 5 * BLOCKS[format].num_bytes)).astype(np.uint8)
    blocks[blocks & 0x7C == 0x7C] = 1  # no upper byte of a float that is no number
    run(UNPACK_BLOCKS, blocks, format=format, part=part, compiled=True)


@pytest.mark.parametrize(("of", "format"), PACKED)
@pytest.mark.parametrize("size", [32, 33])
def test_blocks_are_packed_as_their_numbers_are(run, meaning, rng, of, format, size):
    blocks = rng.integers(0, 256, (size, 3 * BLOCKS[of].num_bytes)).astype(np.uint8)
    found = run(PANEL_BLOCKS, blocks, of=of, format=format, columns=16, shapes=f"{size} {blocks.shape[1]}", compiled=True)
    numbers = meaning(UNPACK_BLOCKS, blocks, format=of, part="numbers")
    np.testing.assert_array_equal(found, meaning(PANEL_INTEGERS, numbers, format=format, columns=16))


def test_every_float_of_16_bits_is_read_exactly(run):
    """This includes denormal and infinite floats; NaN is left out."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[~np.isnan(halves.view(np.float16))]
    blocks = np.zeros((len(halves), 18), np.uint8)
    blocks[:, :2] = halves[:, None].view(np.uint8)
    found = run(UNPACK_BLOCKS, blocks, format="q4_0", part="scale", compiled=True)
    np.testing.assert_array_equal(found[:, 0].view(np.uint16), halves)


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01])
def test_blocks_with_infinite_scales_are_found(half):
    for format in BLOCKS.values():
        blocks = np.zeros((2, 3 * format.num_bytes), np.uint8)
        assert format.is_finite(blocks)
        for level in (format.scale, format.shift, format.scale_unit, format.shift_unit):
            if isinstance(level, Half):
                damaged = blocks.copy()
                damaged[1, format.num_bytes + level.byte : format.num_bytes + level.byte + 2] = np.frombuffer(
                    np.uint16(half).tobytes(), np.uint8
                )
                assert not format.is_finite(damaged)


@pytest.mark.parametrize(
    ("type_", "attrs", "text"),
    [
        (tensor((2, 19), DType.U8), {}, "the last dimension of blocks is 19, expected a multiple of 18, a block of q4_0"),
        (tensor((2, 18), DType.I8), {}, "blocks holds i8, expected u8"),
        (tensor((), DType.U8), {}, "blocks has rank 0, expected at least 1"),
        (tensor((2, 18), DType.U8), {"format": "q9"}, "attribute format is 'q9', expected one of q4_0"),
        (tensor((2, 18), DType.U8), {"part": "shift"}, "attribute part is 'shift', expected one of numbers, scale$"),
    ],
)
def test_what_is_no_row_of_blocks_is_refused(deduced, type_, attrs, text):
    with pytest.raises(AnnotationError, match=text):
        deduced(UNPACK_BLOCKS, type_, **{"format": "q4_0", "part": "scale", **attrs})
