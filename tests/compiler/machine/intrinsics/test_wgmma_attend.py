"""The tile of attention by `wgmma`: its sizes, and the machines that have it. tests/runtime/device/cuda/test_warpgroup_attention.py runs
its code."""

from __future__ import annotations

import pytest

from compiler.machine.intrinsics.wgmma_attend import LINE_BYTES, PART, WgmmaAttend, attends
from compiler.machine.target import NAMED, get


@pytest.mark.parametrize(
    ("size", "value_size"), [*((size, 0) for size in (*range(16, 144, 16), 192, 256)), (128, 128), (320, 256), (576, 512)]
)
def test_the_parts_of_shared_memory_do_not_overlap(size: int, value_size: int) -> None:
    """The queries lie behind the stages, and the mbarriers behind both. Stages begin at multiples of the alignment of their swizzle."""
    op = WgmmaAttend(size, 4, False, 0.25, value_size)
    assert list(op.problems()) == []
    assert op.stages * op.parts >= 2, "something is copied while something else is multiplied"
    assert op.stages * op.stage_bytes <= op.queries_at and op.queries_at + 2 * op.block_rows * size <= op.barriers_at
    assert op.half_bytes % op.shared_alignment == 0 and 2 * size % op.width == 0
    assert op.parts == 1 or (op.width == LINE_BYTES and op.parts * PART == size)
    assert op.shared_bytes <= 220 << 10, "a block may have 227 KB of shared memory, with what its schedule needs"


def test_a_tile_that_cannot_be_is_refused() -> None:
    assert list(WgmmaAttend(24, 0, False, 1.0).problems()) == [
        "size is 24, expected a multiple of 16 up to 256",
        "heads are 0, expected 1 to 128",
    ]
    assert list(WgmmaAttend(144, 1, False, 1.0).problems()) == ["size is 144, expected a multiple of 64 up to 256"]
    assert list(WgmmaAttend(640, 65, False, 1.0, 576).problems()) == [
        "value_size is 576, expected a multiple of 128 up to 512",
        "size is 640, expected a multiple of 64 up to 576",
        "heads are 65, expected 1 to 64",
    ]


def test_one_generation_has_the_tile() -> None:
    assert [name for name in NAMED if attends(64, get(name))] == ["sm_90a"]
    assert attends(256, get("sm_90a")) and not attends(512, get("sm_90a"))
    assert attends(576, get("sm_90a"), 512) and not attends(576, get("sm_90a"), 576)
