"""The tiles of attention on tensor cores: which sizes are accepted and refused. tests/runtime/device/cuda/test_tensor_attention.py runs
their code."""

from __future__ import annotations

import pytest

from compiler.machine.intrinsics.block_code import SHARED_BYTES
from compiler.machine.intrinsics.mma_pages import PageScores, PageValues, query_pitch, rows_for, scratch_pitch
from compiler.machine.target import get


@pytest.mark.parametrize(
    ("size", "target", "rows"),
    [
        *((size, "sm_80", rows) for size, rows in ((16, 32), (64, 32), (128, 32), (256, 16), (576, 8), (24, 0), (1024, 0))),
        *((size, "sm_90a", rows) for size, rows in ((16, 64), (128, 64), (256, 32), (576, 16), (24, 0), (1024, 8))),
    ],
)
def test_rows_of_a_block_fit_the_shared_memory(size: int, target: str, rows: int) -> None:
    """Except on sm_80, two blocks fit in the 228 KB of shared memory of a multiprocessor. On sm_80, a block fits in SHARED_BYTES."""
    assert rows_for(size, size, get(target)) == rows
    num_bytes = rows * (2 * query_pitch(size) + 4 * size + 4 * scratch_pitch(size))
    assert num_bytes < (SHARED_BYTES if target == "sm_80" else 113 << 10)


@pytest.mark.parametrize("tile", [PageScores, PageValues])
def test_a_tile_that_cannot_be_is_refused(tile: type[PageScores | PageValues]) -> None:
    assert list(tile(8, 64).problems()) == []
    assert list(tile(12, 24).problems()) == ["rows are 12, expected a multiple of 8", "size is 24, expected a multiple of 16"]
