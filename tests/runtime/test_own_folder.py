"""Folders that belong to one process, and what other processes may remove."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import own_folder
from runtime.own_folder import OwnFolder

KILLED = """
import os, signal, sys
from pathlib import Path
from runtime.own_folder import OwnFolder
folder = OwnFolder(Path(sys.argv[1]), "a[1]-")
(folder.path / "file").write_text("content")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_removed_with_its_content_once(tmp_path: Path) -> None:
    parent = tmp_path / "new"
    with OwnFolder(parent, "a-") as folder:
        assert folder.path.parent == parent and folder.path.name.startswith("a-") and folder.path.is_dir()
        (folder.path / "file").write_text("content")
    assert list(parent.iterdir()) == []
    folder.remove()


def test_folders_of_killed_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    [left] = tmp_path.iterdir()
    (tmp_path / "b-").mkdir()
    (tmp_path / "a1-").mkdir()  # the prefix is no pattern
    with OwnFolder(tmp_path, "a[1]-") as first, OwnFolder(tmp_path, "a[1]-") as second:
        assert not left.exists() and first.path.exists() and second.path.exists()
        assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("a[1]-")) == ["a1-", "b-"]


def test_a_folder_that_was_renamed_stays(tmp_path: Path) -> None:
    with OwnFolder(tmp_path) as folder:
        folder.path.rename(tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_folder_that_others_remove_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    flock = fcntl.flock

    def late(lock: Any, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            [path] = tmp_path.iterdir()
            path.rmdir()
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with OwnFolder(tmp_path) as folder:
        assert calls == [fcntl.LOCK_SH] * 2 and [*tmp_path.iterdir()] == [folder.path]


def test_folders_of_other_machines_count_as_left_only_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their locks may not be seen here."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(own_folder, "machine", lambda: "another")
        other = OwnFolder(tmp_path, "a-")
    os.close(other._lock or 0)  # pyright: ignore[reportPrivateUsage]
    with OwnFolder(tmp_path, "a-"):
        assert other.path.exists()
    os.utime(other.path, (0, 0))
    with OwnFolder(tmp_path, "a-"):
        assert not other.path.exists()


def test_without_locks_nothing_of_others_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_lock: Any, _operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "other").mkdir()
    with OwnFolder(tmp_path) as folder:
        assert sorted(tmp_path.iterdir()) == sorted((tmp_path / "other", folder.path))
