"""The tile of `wgmma`: its sizes, how warpgroups share it, and the machines that have it. tests/runtime/device/cuda/test_products.py runs
its code."""

from __future__ import annotations

import pytest

from compiler.machine.intrinsics.wgmma import MOST_BYTES, MOST_SUMS, MOST_WIDE_BYTES, WARPGROUPS, Sharing, Wgmma
from compiler.machine.target import NAMED

NARROW_OPS = [Wgmma(8, 64), Wgmma(32, 64), Wgmma(128, 64, 2), Wgmma(8, 64, bits=4)]
TURNS_OP = Wgmma(32, 64, 2, bits=4).deepened(4096, 128)
THIN_OP, THIN_BF16 = Wgmma(8, 64, bits=4).thin(4096, 128), Wgmma(8, 64).thin(4096, 4096)
WIDE_OPS = [
    *(Wgmma(128, 256), Wgmma(128, 128, 2), Wgmma(128, 128, bits=8), Wgmma(64, 128, 2, bits=8)),
    *(op.deepened(4096, 128) for op in (Wgmma(64, 256, bits=4), Wgmma(64, 128, 2, bits=4), Wgmma(64, 256, bits=8))),
]


@pytest.mark.parametrize("op", [*NARROW_OPS, TURNS_OP, THIN_OP, THIN_BF16, *WIDE_OPS], ids=str)
def test_parts_of_shared_memory_do_not_overlap(op: Wgmma) -> None:
    """The result overwrites the stages. Behind both lie the sums that warpgroups pass to each other, and then the mbarriers."""
    assert list(op.problems()) == []
    assert op.stages >= 3 and op.stages * op.stage_bytes <= op.passed_at and op.result_bytes <= op.passed_at
    assert op.passed_at + op.passed_bytes <= op.barriers_at and op.barriers_at + 8 * op.cluster * op.stages <= op.shared_bytes


@pytest.mark.parametrize("op", NARROW_OPS, ids=str)
def test_two_blocks_with_narrow_tiles_fit_the_shared_memory_of_a_multiprocessor(op: Wgmma) -> None:
    """A multiprocessor has 228 KB of shared memory, and reserves 1 KB for each block."""
    assert op.shared_bytes <= MOST_BYTES and 2 * (op.shared_bytes + 1024) <= 228 << 10


@pytest.mark.parametrize("op", [TURNS_OP, THIN_OP], ids=str)
def test_a_block_whose_parts_take_turns_fits_the_shared_memory_of_a_multiprocessor(op: Wgmma) -> None:
    """The registers of such a block leave room for one block only, so it may have more shared memory than others."""
    assert op.turns and op.shared_bytes <= MOST_WIDE_BYTES and op.shared_bytes + 1024 <= 228 << 10


@pytest.mark.parametrize("op", WIDE_OPS, ids=str)
def test_a_block_with_a_wide_tile_fits_the_shared_memory_of_a_multiprocessor(op: Wgmma) -> None:
    assert op.shared_bytes <= MOST_WIDE_BYTES and op.shared_bytes + 1024 <= 228 << 10
    assert op.copied_bytes < op.stage_bytes, "the other block of the cluster copies a part of the weights"


@pytest.mark.parametrize(("bits", "in_groups"), [(16, False), (8, False), (4, True)])
@pytest.mark.parametrize("sums", [1, 2])
def test_accumulators_fit_the_registers_of_a_thread(sums: int, bits: int, in_groups: bool) -> None:
    op = Wgmma(8, 64, sums, bits=bits)
    kinds, (rows, columns) = 2 if in_groups else 1, op.widest(in_groups=in_groups)
    assert kinds * sums * rows * columns // op.writers <= MOST_SUMS
    assert all(kinds * sums * height * 64 // op.writers <= MOST_SUMS for height in op.heights(in_groups=in_groups))


@pytest.mark.parametrize(
    ("op", "sharing"),
    [
        (Wgmma(8, 64), Sharing.NOTHING),
        (Wgmma(32, 64), Sharing.ROWS),
        (Wgmma(128, 256), Sharing.COLUMNS),
        (Wgmma(8, 64, bits=4).deepened(4096, 128), Sharing.TURNS),
        (Wgmma(8, 64, bits=4).deepened(4096, 4096), Sharing.NOTHING),
        (Wgmma(8, 64, bits=4).deepened(128, 64), Sharing.TURNS),
        (Wgmma(8, 64, bits=4).deepened(128, 128), Sharing.NOTHING),
        (Wgmma(64, 64, bits=4).deepened(4096, 128), Sharing.ROWS),
        (THIN_OP, Sharing.HALF_TURNS),
    ],
    ids=str,
)
def test_warpgroups_share_a_tile(op: Wgmma, sharing: Sharing) -> None:
    """Warpgroups take turns if a stage holds a group of weights for each of them. Together, they compute all columns, rows and steps."""
    assert op.sharing is sharing
    parts = op.per_warp * 64 * op.warp_rows * op.warp_folds
    assert parts * (1 if sharing is Sharing.NOTHING else WARPGROUPS) == op.columns * op.rows * op.fold


@pytest.mark.parametrize(("length", "group"), [(4096, 4096), (384, 128)])
def test_a_tile_is_thin_only_if_its_parts_can_take_turns(length: int, group: int) -> None:
    """Warpgroups cannot take turns if there is one group of weights, or if no stage holds a group for each of them."""
    assert Wgmma(8, 64, bits=4).thin(length, group) is None


@pytest.mark.parametrize(("length", "fold"), [(4096, 8), (8960, 4), (2240, None), (896, None)])
def test_an_instruction_of_a_thin_tile_reads_no_further_than_its_stage(length: int, fold: int | None) -> None:
    """An instruction reads 64 columns of bf16, of which a thin tile has 32. Behind the last weights of a stage, it reads rows of the same
    stage."""
    op = Wgmma(8, 64).thin(length, length)
    assert (None if op is None else op.fold) == fold
    if op is not None:
        assert (op.fold + 1) * op.panel_bytes <= op.stage_bytes and op.sharing is Sharing.NOTHING and op.multiplied_rows == 8


@pytest.mark.parametrize(("op", "threads"), [(THIN_BF16, 128), (Wgmma(8, 64, bits=8), 128), (Wgmma(32, 64), 256), (THIN_OP, 256)], ids=str)
def test_no_product_is_computed_twice(op: Wgmma, threads: int) -> None:
    assert op.multipliers == threads


def test_only_one_generation_has_the_instruction() -> None:
    assert [t.name for t in NAMED.values() if Wgmma(8, 64).runs_on(t)] == ["sm_90a"]
