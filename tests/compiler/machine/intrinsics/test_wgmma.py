"""The tile of `wgmma`: its sizes, its limits and its NumPy meaning. tests/runtime/device/cuda/test_products.py runs its code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.machine.formats import BRICKS
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


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (Wgmma(136, 64), "rows are 136, expected a multiple of 8 up to 128"),
        (Wgmma(8, 32), "columns are 32, expected a multiple of 64"),
        (Wgmma(128, 128, 2), "2 sums of 128 rows and 128 columns exceed a block's 115712 bytes of shared memory"),
    ],
    ids=str,
)
def test_a_tile_that_cannot_be_is_refused(op: Wgmma, problem: str) -> None:
    assert list(op.problems()) == [problem]


def test_only_one_generation_has_the_instruction() -> None:
    assert [t.name for t in NAMED.values() if Wgmma(8, 64).runs_on(t)] == ["sm_90a"]


def test_the_meaning_repeats_the_last_row_and_the_last_panel() -> None:
    rng, op = np.random.default_rng(0), Wgmma(8, 128)
    a = rng.integers(-8, 9, (3, 64)).astype(ml_dtypes.bfloat16)
    w = rng.integers(-8, 9, (40, 64)).astype(ml_dtypes.bfloat16)
    c = np.zeros(op.shared_bytes // 4, np.float32)
    op.meaning([c, a.reshape(-1), BRICKS.packed(w).reshape(-1)], [64, 64, 3, 2])
    found = c[: op.rows * op.pitch].reshape(op.rows, op.pitch)
    np.testing.assert_array_equal(found[:3, :40], a.astype(np.float32) @ w.astype(np.float32).T)
    np.testing.assert_array_equal(found[3:, :40], np.repeat(found[2:3, :40], 5, 0))
    np.testing.assert_array_equal(found[:, 64:96], found[:, 32:64])
