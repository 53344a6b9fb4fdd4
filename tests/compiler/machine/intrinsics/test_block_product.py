"""The tiles with which a block multiplies matrices: their limits and their definition in NumPy. tests/runtime/device/cuda/test_products.py
runs their code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.machine.intrinsics.block_product import BlockProduct
from compiler.machine.intrinsics.mma import Mma
from compiler.machine.intrinsics.wgmma import Wgmma


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (Mma(12, 64), "rows are 12, expected a multiple of 8 up to 64"),
        (Wgmma(136, 64), "rows are 136, expected a multiple of 8 up to 128"),
        (Mma(8, 80), "columns are 80, expected a multiple of 64"),
        (Wgmma(8, 32), "columns are 32, expected a multiple of 64, or 8 rows whose groups are summed in turns, or deep stages"),
        (
            Wgmma(16, 32, bits=4, fold=16, turns=2),
            "columns are 32, expected a multiple of 64, or 8 rows whose groups are summed in turns, or deep stages",
        ),
        (Mma(8, 64, bits=4, kind="e4m3"), "bits are 4 (e4m3), expected 16, 8, 8 (e4m3), 4, 4 (e2m1)"),
        (Mma(8, 64, bits=2), "bits are 2, expected 16, 8, 8 (e4m3), 4, 4 (e2m1)"),
        (Mma(64, 128, 3), "3 sums of 64 rows and 128 columns exceed a block's 49152 bytes of shared memory"),
        (Wgmma(128, 64, 3), "3 sums of 128 rows and 64 columns exceed a block's 115712 bytes of shared memory"),
        (Wgmma(128, 256, 2), "2 sums of 128 rows and 256 columns exceed a block's 232448 bytes of shared memory"),
    ],
    ids=str,
)
def test_a_tile_that_cannot_be_is_refused(op: BlockProduct, problem: str) -> None:
    assert list(op.problems()) == [problem]


@pytest.mark.parametrize(("op", "num_columns"), [(Mma(8, 64), 20), (Wgmma(8, 128), 40)], ids=str)
def test_the_meaning_repeats_the_last_row_and_the_last_panel(op: BlockProduct, num_columns: int) -> None:
    """If the operands have fewer rows or panels than the tile, the tile repeats the last ones. Here they have three rows and two panels,
    the second of which is partly filled."""
    rng, panel = np.random.default_rng(0), op.panel_columns
    a, w = (rng.integers(-8, 9, (count, 64)).astype(ml_dtypes.bfloat16) for count in (3, num_columns))
    c = np.zeros(op.shared_bytes // 4, np.float32)
    op.meaning([c, a.reshape(-1), op.format.packed(w).reshape(-1)], [64, 64, 3, 2])
    found = c[: op.rows * op.pitch].reshape(op.rows, op.pitch)
    np.testing.assert_array_equal(found[:3, :num_columns], a.astype(np.float32) @ w.astype(np.float32).T)
    np.testing.assert_array_equal(found[3:, :num_columns], np.repeat(found[2:3, :num_columns], 5, 0))
    np.testing.assert_array_equal(found[:, 2 * panel : 3 * panel], found[:, panel : 2 * panel])
