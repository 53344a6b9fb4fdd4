"""The tiles of attention on tensor cores: which sizes are accepted and refused. tests/runtime/device/cuda/test_tensor_attention.py runs
their code."""

from __future__ import annotations

import pytest

from compiler.machine.intrinsics.block_code import SHARED_BYTES
from compiler.machine.intrinsics.mma_pages import PageScores, PageValues, query_pitch, rows_for, scratch_pitch


@pytest.mark.parametrize(("size", "rows"), [(16, 32), (64, 32), (128, 32), (256, 16), (576, 8), (24, 0), (1024, 0)])
def test_rows_of_a_block_fit_the_shared_memory(size: int, rows: int) -> None:
    assert rows_for(size, size) == rows
    assert rows * (2 * query_pitch(size) + 4 * size + 4 * scratch_pitch(size)) < SHARED_BYTES


@pytest.mark.parametrize("tile", [PageScores, PageValues])
def test_a_tile_that_cannot_be_is_refused(tile: type[PageScores | PageValues]) -> None:
    assert list(tile(8, 64).problems()) == []
    assert list(tile(12, 24).problems()) == ["rows are 12, expected a multiple of 8", "size is 24, expected a multiple of 16"]
