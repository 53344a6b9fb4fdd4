"""The tile of attention by `wgmma`: its sizes, and the machines that have it. tests/runtime/device/cuda/test_warpgroup_attention.py runs
its code."""

from __future__ import annotations

import pytest

from compiler.machine.intrinsics.wgmma_attend import ROWS, WgmmaAttend, attends
from compiler.machine.target import NAMED, get


@pytest.mark.parametrize("size", range(16, 144, 16))
def test_the_parts_of_shared_memory_do_not_overlap(size: int) -> None:
    """The queries lie behind the stages, and the mbarriers behind both. Stages begin where the swizzle does."""
    op = WgmmaAttend(size, 4, False, 0.25)
    assert list(op.problems()) == []
    assert op.stages >= 2 and op.stages * op.stage_bytes <= op.queries_at and op.queries_at + 2 * ROWS * size <= op.barriers_at
    assert op.half_bytes % op.shared_alignment == 0 and 2 * size % op.width == 0
    assert op.shared_bytes <= 200 << 10, "a multiprocessor has 228 KB of shared memory"


def test_a_tile_that_cannot_be_is_refused() -> None:
    assert list(WgmmaAttend(24, 0, False, 1.0).problems()) == [
        "size is 24, expected a multiple of 16 up to 128",
        "heads are 0, expected 1 to 128",
    ]


def test_one_generation_has_the_tile() -> None:
    assert [name for name in NAMED if attends(64, get(name))] == ["sm_90a"]
    assert not attends(256, get("sm_90a"))
