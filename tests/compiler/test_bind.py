"""Where weights lie: in a file, in one block, on several memory nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from compiler.bind import _placed, _side_by_side
from runtime.device.cpu.cores import available_cores
from runtime.device.cpu.device import CpuDevice
from runtime.device.cpu.numa import Placement


def test_what_is_mapped_is_copied_only_between_nodes() -> None:
    core = available_cores()[0]
    mapped = {"w": np.arange(1000, dtype=np.float32)}
    near: Any = SimpleNamespace(placement=Placement((core, core), (0, 0)))
    apart: Any = SimpleNamespace(placement=Placement((core, core), (0, 1)))
    assert _placed(mapped, near) is mapped
    copies = _placed(mapped, apart)
    np.testing.assert_array_equal(copies["w"], mapped["w"])
    assert not np.shares_memory(copies["w"], mapped["w"])


def test_what_is_kept_in_no_file_lies_in_one_block() -> None:
    """Each array at a cache line's boundary; what it was made from may be written again."""
    made = [[("a", np.arange(7, dtype=np.uint8)), ("b", np.full((2, 3), 0.5, np.float32))], [("c", np.zeros((0, 4), np.int32))]]
    kept = _side_by_side(CpuDevice(1), made, 128)
    for name, value in (pair for group in made for pair in group):
        np.testing.assert_array_equal(kept[name], value)
        assert kept[name].dtype == value.dtype and not np.shares_memory(kept[name], value)
    assert kept["b"].ctypes.data - kept["a"].ctypes.data == 64 and kept["a"].ctypes.data % 64 == 0
