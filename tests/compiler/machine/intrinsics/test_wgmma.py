"""The tile of `wgmma`: its sizes and the machines that have it. tests/runtime/device/cuda/test_products.py runs its code."""

from __future__ import annotations

import pytest

from compiler.machine.intrinsics.wgmma import MOST_BYTES, MOST_SUMS, Wgmma
from compiler.machine.target import NAMED

OPS = [Wgmma(8, 64), Wgmma(32, 64), Wgmma(128, 64, 2), Wgmma(128, 128), Wgmma(8, 64, bits=4), Wgmma(128, 128, bits=8)]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_two_blocks_fit_a_multiprocessor(op: Wgmma) -> None:
    """Two blocks fit the 228 KB of shared memory of a multiprocessor, which reserves 1 KB for each. The mbarriers lie behind all else."""
    assert list(op.problems()) == []
    assert op.stages >= 3 and op.stages * op.stage_bytes <= op.barriers_at and op.result_bytes <= op.barriers_at
    assert op.barriers_at + 8 * op.stages <= op.shared_bytes <= MOST_BYTES and 2 * (op.shared_bytes + 1024) <= 228 << 10


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("sums", [1, 2])
def test_accumulators_fit_the_registers_of_a_thread(sums: int, in_groups: bool) -> None:
    op = Wgmma(8, 64, sums)
    most = op.heights(in_groups=in_groups)[-1]
    kinds = 2 if in_groups else 1
    assert kinds * sums * most * op.widest(in_groups=in_groups) // op.threads <= MOST_SUMS


def test_only_one_generation_has_the_instruction() -> None:
    assert [t.name for t in NAMED.values() if Wgmma(8, 64).runs_on(t)] == ["sm_90a"]
