"""The tensor-core tile: its sizes and how halves of its columns lie. tests/runtime/device/cuda/test_products.py runs its code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.machine.formats import FRAGMENTS
from compiler.machine.intrinsics.block_code import SHARED_BYTES
from compiler.machine.intrinsics.mma import Mma


@pytest.mark.parametrize("op", [Mma(8, 64), Mma(16, 64), Mma(64, 64, 2), Mma(64, 128), Mma(8, 64, bits=4)], ids=str)
def test_what_is_copied_ahead_fits_the_shared_memory(op: Mma) -> None:
    assert list(op.problems()) == []
    assert op.stages >= 3 and op.stages * op.stage_bytes <= op.shared_bytes <= SHARED_BYTES


def test_halves_of_the_columns_may_lie_apart() -> None:
    rng, op = np.random.default_rng(1), Mma(8, 64, apart=4)
    a, w = (rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16) for shape in ((8, 64), (128, 64)))
    c = np.zeros(op.shared_bytes // 4, np.float32)
    op.meaning([c, a.reshape(-1), FRAGMENTS.packed(w).reshape(-1)], [64, 64, 8, 8])
    columns = np.r_[0:32, 64:96]
    expected = a.astype(np.float32) @ w[columns].astype(np.float32).T
    np.testing.assert_array_equal(c[: op.rows * op.pitch].reshape(op.rows, op.pitch)[:, :64], expected)
