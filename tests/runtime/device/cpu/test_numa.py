"""NUMA placement on a fictitious machine: the node of each thread, and the cores that first write a copy of the weights."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from runtime.device.cpu import numa
from runtime.device.cpu.numa import Placement


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Return a sysfs folder that describes three nodes; the first node has no cores."""
    for number, cores in enumerate(["", "0-1,8-9", "4,6-7"]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    (tmp_path / "online").write_text("0-2\n")
    return tmp_path


def test_nodes_are_numbered_as_the_cores_come(system: Path) -> None:
    assert Placement.of((6, 0, 7, 8, 9), system) == Placement((6, 0, 7, 8, 9), (0, 1, 0, 1, 1))
    assert Placement.of((0, 1, 4), system).has_several_nodes
    assert not Placement.of((4, 6), system).has_several_nodes


def test_without_nodes_all_is_near(tmp_path: Path) -> None:
    assert Placement.of((0, 1), tmp_path / "absent") == Placement((0, 1), (0, 0))
    assert not Placement().has_several_nodes


def test_threads_stay_on_the_cores_of_their_node(system: Path) -> None:
    several = Placement.of((0, 1, 4, 8), system)
    assert several.limits(pinned=False) == [{0, 1, 8}, {0, 1, 8}, {4}, {0, 1, 8}]
    assert several.limits(pinned=True) == [{0}, {1}, {4}, {8}]
    assert Placement.of((4, 6), system).limits(pinned=False) == []
    assert Placement().limits(pinned=False) == []


def test_a_copy_is_written_from_the_cores_whose_threads_read_it(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.update({threading.get_ident(): cores}), raising=False)
    written: list[tuple[int, set[int]]] = []
    copy_from = numa._copy_from

    def noted(cores: set[int], to: np.ndarray, source: np.ndarray) -> None:
        copy_from(cores, to, source)
        written.append((source.nbytes, pinned[threading.get_ident()]))

    monkeypatch.setattr(numa, "_copy_from", noted)
    array = np.arange(4000, dtype=np.float32).reshape(40, 100)
    copy = np.zeros((40, 50), np.float32)
    Placement.of((0, 4, 6, 7), system).copy(copy, array[:, ::2])
    np.testing.assert_array_equal(copy, array[:, ::2])
    assert sorted(written, key=str) == [(2000, {0}), (6000, {4, 6, 7})]
