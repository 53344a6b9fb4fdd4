from __future__ import annotations

import numpy as np
import pytest

from runtime.cache_groups import CacheGroup, HeardGroup, KVGroup, StateGroup
from runtime.device.cpu.device import CpuDevice
from runtime.errors import OutOfMemory
from runtime.kv_pool import KVPool
from runtime.memory import MemoryAccount

DEVICE = CpuDevice(1)
GROUP = KVGroup(layers=(0, 2, 3), num_kv_heads=2, head_dim=8, dtype="bf16")
LOCAL = KVGroup(layers=(1,), num_kv_heads=1, head_dim=16, dtype="bf16", window=20)


def pool_of(group: KVGroup, num_pages: int) -> KVPool:
    return KVPool([group], [num_pages], MemoryAccount(), DEVICE)


def test_bytes_of_a_page() -> None:
    assert GROUP.bytes_per_page == 3 * 2 * 2 * 16 * 8 * 2
    assert LOCAL.bytes_per_page == 1 * 2 * 1 * 16 * 16 * 2


def test_the_pool_is_accounted_for_before_it_exists() -> None:
    account = MemoryAccount(4 * GROUP.bytes_per_page + 2 * LOCAL.bytes_per_page)
    pool = KVPool([GROUP, LOCAL], [4, 2], account, DEVICE)
    assert account.parts == {"kv pool": sum(tensor.nbytes for tensor in pool.arguments)} == {"kv pool": account.limit}
    with pytest.raises(OutOfMemory, match="kv pool needs"):
        KVPool([GROUP, LOCAL], [4, 3], account, DEVICE)


def test_a_page_is_copied_in_every_layer_of_its_group_and_nothing_else_changes() -> None:
    pool = KVPool([GROUP, LOCAL], [4, 4], MemoryAccount(), DEVICE)
    for tensor in pool.arguments:
        tensor[:] = np.arange(tensor.size).reshape(tensor.shape) % 251
    before, local = (tensor.copy() for tensor in pool.arguments)
    pool.copy_page(0, 1, 3)
    data, same = pool.arguments
    assert (data[:, :, 3] == before[:, :, 1]).all()
    assert (data[:, :, :3] == before[:, :, :3]).all() and (same == local).all()


def test_rows_of_one_head_in_a_page_are_one_stream() -> None:
    (data,) = pool_of(GROUP, 2).arguments
    assert data.shape == (3, 2, 2, 2, 16 * 8)
    assert data.flags.c_contiguous and data.ctypes.data % 64 == 0


def test_errors_name_value_and_expectation() -> None:
    with pytest.raises(ValueError, match="'i4'; expected one of f32, f16, bf16, i8"):
        KVGroup((0,), 1, 8, "i4")
    with pytest.raises(ValueError, match="value_size is 9; expected 1 to 8, the size of a key"):
        KVGroup((0,), 1, 8, "f32", value_size=9)


def test_pages_without_values_take_half_the_memory() -> None:
    group, both = (KVGroup((0, 2, 3), 2, 8, "i8", value_size=size) for size in (6, None))
    assert 2 * group.bytes_per_page == both.bytes_per_page
    pages, scales = pool_of(group, 4).arguments
    assert pages.shape == (3, 1, 4, 2, 16 * 8) and scales.shape == (3, 1, 4, 2, 16)


def test_eight_bit_pages_have_scales_that_are_copied_with_them() -> None:
    group = KVGroup((0, 1), 3, 8, "i8")
    assert group.bytes_per_page == 2 * 2 * 3 * 16 * (8 + 4)
    pool = pool_of(group, 4)
    pages, scales = pool.arguments
    assert pages.shape == (2, 2, 4, 3, 16 * 8) and scales.shape == (2, 2, 4, 3, 16)
    pages[:, :, 1], scales[:, :, 1] = 5, 0.5
    pool.copy_page(0, 1, 3)
    assert (pages[:, :, 3] == 5).all() and (scales[:, :, 3] == 0.5).all() and not pages[:, :, 2].any()
    with pytest.raises(IndexError, match="page 4 does not exist; the pool has pages 0 to 3"):
        pool.copy_page(0, 0, 4)


@pytest.mark.parametrize(
    "group",
    [
        GROUP,
        KVGroup((0, 1), 3, 8, "i8"),
        KVGroup((0,), 1, 8, "f16", value_size=6),
        StateGroup((0, 2), (5, 7)),
        HeardGroup((0,), 2, 8, "bf16", 40, 512),
    ],
    ids=["keys and values", "8 bits", "latents", "states", "audio"],
)
def test_a_page_is_read_and_written_in_every_layer(group: CacheGroup) -> None:
    """The bytes of a page restore it in another pool, and no other page changes."""
    one, other = (KVPool([LOCAL, group], [2, 4], MemoryAccount(), DEVICE) for _ in range(2))
    rng = np.random.default_rng(1)
    for tensor in one.tensors[1]:
        tensor.view(np.uint8)[...] = rng.integers(0, 256, tensor.view(np.uint8).shape)
    data = one.read_page(1, 2)
    assert len(data) == group.bytes_per_page
    other.write_page(1, 3, data)
    assert other.read_page(1, 3) == data
    assert sum(tensor.view(np.uint8).astype(int).sum() for tensor in other.arguments) == sum(data)
    one.copy_page(1, 2, 1)
    assert one.read_page(1, 1) == data
    with pytest.raises(ValueError, match=f"is to have 3 bytes; expected {group.bytes_per_page}"):
        other.write_page(1, 3, b"abc")
    with pytest.raises(IndexError, match="page 4 does not exist"):
        other.read_page(1, 4)
