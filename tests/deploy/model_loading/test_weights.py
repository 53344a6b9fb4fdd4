"""The prepared weights of all programs of a model are stored: those of its step, and those of the program that hears."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compiler import bind
from deploy import use
from deploy.cache import Kept, Part
from deploy.model_loading import weights
from deploy.model_loading.known import silent
from deploy.model_loading.load import load_model
from runtime.sealed import key_of
from runtime.sections import SectionFile
from server.messages import Load
from tests.deploy.flushing import join_flush

WHISPER = Path(__file__).parents[2] / "golden" / "whisper"
LOAD = Load("test", str(WHISPER), quantize="f32", max_batch=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    return tmp_path


def stored(cache: Path) -> list[Path]:
    return sorted(item.paths[0] for item in Kept(cache).items() if item.part is Part.WEIGHTS)


def test_a_second_start_prepares_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(LOAD, silent)
    before = [(path, path.stat().st_ino) for path in stored(cache)]
    assert len(before) == 2

    def refused(*_: object) -> None:
        raise AssertionError("weights are prepared again")

    monkeypatch.setattr(bind, "_results", refused)
    load_model(LOAD, silent)
    assert [(path, path.stat().st_ino) for path in stored(cache)] == before


def inode(path: Path) -> int:
    return path.stat().st_ino


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Record the inodes of the files for which a thread waited until the disk had them."""
    found = set[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.add(os.fstat(descriptor).st_ino))
    return found


def test_the_disk_has_packed_weights_before_the_process_ends(cache: Path, flushed: set[int]) -> None:
    """A worker that waits for the disk at its end is killed, and the next start would verify all weights."""
    load_model(LOAD, silent)
    join_flush()
    assert len(stored(cache)) == 2 and {*map(inode, stored(cache))} <= flushed


def test_weights_that_cannot_be_marked_are_on_disk_before_they_are_used(
    cache: Path, flushed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk there may be no marker, and after a power failure nothing would show that a file is incomplete."""
    monkeypatch.setattr(weights, "flush", lambda _: None)
    load_model(LOAD, silent)
    marked = stored(cache)
    assert not {*map(inode, marked)} & flushed, "a start need not wait for the disk"
    for path in marked:
        path.unlink()
        for marker in use.markers_of(path):
            marker.unlink()

    def refuse(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(use, "Use", refuse)
    load_model(LOAD, silent)
    assert stored(cache) == marked and {*map(inode, marked)} <= flushed


def test_damage_is_found_in_each_file(cache: Path) -> None:
    load_model(LOAD, silent)
    for path in stored(cache):
        again = load_model(LOAD, silent)
        assert again.damage is not None and again.damage() == ""
        content = bytearray(path.read_bytes())
        largest = max(SectionFile(path, key_of(path.parent))._sections.values(), key=lambda section: section.size)
        content[largest.offset + largest.size // 2] ^= 64
        path.unlink()  # do not overwrite the file, because the loads have mapped it
        path.write_bytes(content)
        assert path.name in again.damage() and not path.exists()
