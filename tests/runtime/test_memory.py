from __future__ import annotations

import pytest

from runtime.device.cpu.device import CpuDevice, HostMemory
from runtime.errors import OutOfMemory
from runtime.memory import Arena, MemoryAccount

DEVICE = CpuDevice(1)


def entered(arena: Arena, num_bytes: int, *, keep_last: bool = False) -> HostMemory:
    memory = arena.enter(num_bytes, keep_last=keep_last)
    assert isinstance(memory, HostMemory)
    return memory


def test_what_exceeds_the_limit_is_refused_with_figures() -> None:
    account = MemoryAccount(1000)
    account.resize("weights", 600)
    with pytest.raises(OutOfMemory, match="arena needs 401 bytes, 400 are free of the limit of 1,000") as error:
        account.resize("arena", 401)
    assert (error.value.required, error.value.free, error.value.limit) == (401, 400, 1000)
    assert account.parts == {"weights": 600}


def test_a_part_that_grows_gives_its_old_bytes_back_first() -> None:
    account = MemoryAccount(1000)
    account.resize("arena", 700)
    account.resize("arena", 1000)
    assert account.used == 1000


def test_the_arena_grows_to_the_largest_demand_and_stays() -> None:
    account = MemoryAccount()
    arena = Arena(account, DEVICE)
    for size in (100, 5000, 200):
        for _ in range(2):
            block = entered(arena, size)
            assert block.num_bytes == size and block.data.ctypes.data == block.address and block.address % 64 == 0
            arena.leave()
        block = entered(arena, size // 2)
        assert block.num_bytes == size // 2 and block.data.ctypes.data == block.address
        arena.leave()
    assert arena.num_bytes == 5000 and account.parts == {"arena": 5000}


def test_calls_within_calls_do_not_overlap_and_the_next_outermost_finds_one_block() -> None:
    arena = Arena(MemoryAccount(), DEVICE)
    for _ in range(2):
        outer, inner, innermost = (entered(arena, size).data for size in (100, 1000, 50))
        for i, block in enumerate((outer, inner, innermost)):
            block[:] = i + 1
        assert [set(b.tolist()) for b in (outer, inner, innermost)] == [{1}, {2}, {3}]
        for _ in range(3):
            arena.leave()
    arena.enter(1)
    assert arena.num_bytes == 128 + 1024 + 50


def test_calls_above_leave_the_last_one_its_memory_also_when_the_arena_grows() -> None:
    arena = Arena(MemoryAccount(), DEVICE)
    for size in (30, 30, 5000):
        kept = entered(arena, 100).data
        arena.leave()
        kept[:] = 1
        for _ in range(2):
            block = entered(arena, size, keep_last=True)
            arena.leave()
            block.data[:] = 2
            assert block.data.ctypes.data == block.address
            assert set(kept.tolist()) == {1}
    assert arena.num_bytes == 128 + 5000


def test_the_arena_respects_the_limit_and_can_be_used_afterwards() -> None:
    arena = Arena(MemoryAccount(1000), DEVICE)
    with pytest.raises(OutOfMemory):
        arena.enter(1001)
    arena.enter(900)
    with pytest.raises(OutOfMemory):
        arena.enter(200)
    arena.enter(30)
