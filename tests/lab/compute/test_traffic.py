"""The benchmark of memory bandwidth compares each kernel with two ways to copy memory, one of which is the system's memcpy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.lab.compute import traffic
from tests.lab.timing import by_turns


def test_every_kernel_against_both_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 8), ("LENGTH", 64), ("ROUNDS", 2)):
        monkeypatch.setattr(traffic, name, value)
    monkeypatch.setattr(traffic, "KERNELS", {name: traffic.KERNELS[name] for name in ("elementwise chain", "rms norm")})
    figures = traffic.bandwidth()
    assert [f.name.split(",")[0] for f in figures] == ["elementwise chain", "rms norm"] * 2
    assert ["memcpy" in f.name for f in figures] == [True, True, False, False]
    assert all(f.value > 0 and f.at_least and "of 2 rounds" in f.note for f in figures)


def test_memory_is_copied_in_parts() -> None:
    source, to = np.arange(4096, dtype=np.float32), np.zeros(4096, np.float32)
    with ThreadPoolExecutor(2) as pool:
        traffic.memcpy(pool, to, source, 2)
    np.testing.assert_array_equal(to, source)


def test_turns_leave_out_the_first_round() -> None:
    order: list[str] = []
    times = by_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b"] * 3 and {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}
