"""Weights that lie in a file, where a machine has one memory node and where it has several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from compiler.bind import _placed
from runtime.device.cpu import available_cores
from runtime.device.numa import Placement


def test_what_is_mapped_is_copied_only_between_nodes() -> None:
    core = available_cores()[0]
    mapped = {"w": np.arange(1000, dtype=np.float32)}
    near: Any = SimpleNamespace(placement=Placement((core, core), (0, 0)))
    apart: Any = SimpleNamespace(placement=Placement((core, core), (0, 1)))
    assert _placed(mapped, near) is mapped
    copies = _placed(mapped, apart)
    np.testing.assert_array_equal(copies["w"], mapped["w"])
    assert not np.shares_memory(copies["w"], mapped["w"])
