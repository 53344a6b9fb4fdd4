from __future__ import annotations

import numpy as np
import pytest

from runtime.device.cpu.device import CpuDevice
from runtime.errors import OutOfMemory
from runtime.kv_pool import KVLayout, KVPool
from runtime.memory import MemoryAccount

DEVICE = CpuDevice(1)
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bf16")


def test_bytes_and_pages() -> None:
    assert LAYOUT.bytes_per_page == 3 * 2 * 2 * 16 * 8 * 2
    assert LAYOUT.pages_for(10 * LAYOUT.bytes_per_page - 1) == 9
    assert LAYOUT.pages_for(-5) == 0


def test_the_pool_is_accounted_for_before_it_exists() -> None:
    account = MemoryAccount(4 * LAYOUT.bytes_per_page)
    pool = KVPool(LAYOUT, 4, account, DEVICE)
    assert account.parts == {"kv pool": pool.data.nbytes} == {"kv pool": account.limit}
    with pytest.raises(OutOfMemory, match="kv pool needs"):
        KVPool(LAYOUT, 5, account, DEVICE)


def test_a_page_is_copied_in_every_layer_and_nothing_else_changes() -> None:
    pool = KVPool(LAYOUT, 4, MemoryAccount(), DEVICE)
    pool.data[:] = np.arange(pool.data.size).reshape(pool.data.shape) % 251
    before = pool.data.copy()
    pool.copy_page(1, 3)
    assert (pool.data[:, :, 3] == before[:, :, 1]).all()
    assert (pool.data[:, :, :3] == before[:, :, :3]).all()


def test_rows_of_one_head_in_a_page_are_one_stream() -> None:
    data = KVPool(LAYOUT, 2, MemoryAccount(), DEVICE).data
    assert data[0, 0, 1, 1].flags.c_contiguous and data[0].flags.c_contiguous and data.ctypes.data % 64 == 0


def test_errors_name_value_and_expectation() -> None:
    with pytest.raises(ValueError, match="'i4': expected one of f32, f16, bf16, i8"):
        KVLayout(1, 1, 8, "i4")


def test_eight_bit_pages_have_scales_that_are_copied_with_them() -> None:
    layout = KVLayout(2, 3, 8, "i8")
    assert layout.bytes_per_page == 2 * 2 * 3 * 16 * (8 + 4)
    pool = KVPool(layout, 4, MemoryAccount(), DEVICE)
    pages, scales = pool.arguments
    assert pages.shape == (2, 2, 4, 3, 16 * 8) and scales.shape == (2, 2, 4, 3, 16)
    pages[:, :, 1], scales[:, :, 1] = 5, 0.5
    pool.copy_page(1, 3)
    assert (pages[:, :, 3] == 5).all() and (scales[:, :, 3] == 0.5).all() and not pages[:, :, 2].any()
    with pytest.raises(IndexError, match="page 4: the pool has pages 0 to 3"):
        KVPool(LAYOUT, 4, MemoryAccount(), DEVICE).copy_page(0, 4)
