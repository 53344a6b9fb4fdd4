"""Readers see the old file or the complete new one. Errors leave nothing, and what killed processes leave is removed."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path

import pytest

from runtime import whole_files
from runtime.whole_files import ORDINARY, PRIVATE

CODE = b"\x0f\x0b machine code"


@pytest.mark.parametrize(("mode", "found"), [(PRIVATE, 0o600), (ORDINARY, 0o640)])
def test_a_new_file_has_the_mode_that_the_umask_allows(mode: int, found: int, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_files.replacing(tmp_path / "file", mode) as file:
            file.write(CODE)
    finally:
        os.umask(before)
    assert (tmp_path / "file").read_bytes() == CODE and (tmp_path / "file").stat().st_mode & 0o777 == found


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CODE)
    with pytest.raises(KeyboardInterrupt), whole_files.replacing(tmp_path / "file") as file:
        file.write(b"a part")
        raise KeyboardInterrupt
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [CODE]


def test_a_disk_that_is_full_when_the_file_is_closed_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS and FUSE report only at the end that the disk has no room for what was written."""

    class Late(io.BufferedWriter):
        def close(self) -> None:
            if not self.closed:
                super().close()
                raise OSError(errno.ENOSPC, "No space left on device")

    (place := tmp_path / "code").write_bytes(CODE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", lambda descriptor, mode: Late(io.FileIO(descriptor, mode)))
        with pytest.raises(OSError, match="No space"), whole_files.replacing(place) as file:
            file.write(b"cut")
    assert place.read_bytes() == CODE
    assert {path.name for path in tmp_path.iterdir()} == {"code"}


def test_a_file_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, replace = tmp_path / "code", os.replace

    def late(fresh: str, path: Path) -> None:
        whole_files.remove_abandoned(path)  # as another process that writes the same file
        replace(fresh, path)

    monkeypatch.setattr(os, "replace", late)
    with whole_files.replacing(place) as file:
        file.write(CODE)
    assert place.read_bytes() == CODE


def test_files_of_other_machines_count_as_abandoned_only_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a volume may not see each other's locks."""
    with monkeypatch.context() as patched:
        patched.setattr(whole_files, "machine", lambda: "0a" * 4)
        descriptor, name = whole_files.locked_file(tmp_path / "code")
        os.close(descriptor)  # a lock that this machine does not see
    left = Path(name)
    whole_files.remove_abandoned(tmp_path / "code")
    assert left.exists()
    os.utime(left, (then := time.time() - 2 * whole_files.ABANDONED_S, then))
    whole_files.remove_abandoned(tmp_path / "code")
    assert not left.exists()


@pytest.mark.parametrize("name", ["state.json", "s" * 255, "\u00e4" * 127])
def test_what_a_killed_writer_left_is_removed_whatever_the_length_of_the_name(name: str, tmp_path: Path) -> None:
    (place := tmp_path / name).write_bytes(b"old")
    descriptor, left = whole_files.locked_file(place)
    whole_files.remove_abandoned(place)
    assert Path(left).exists(), "its writer lives"
    os.close(descriptor)  # as the kernel does when the writer ends
    whole_files.remove_abandoned(tmp_path / "another")
    assert Path(left).exists()
    whole_files.remove_abandoned(place)
    with whole_files.replacing(place) as file:
        file.write(CODE)
    assert [path.name for path in tmp_path.iterdir()] == [name] and place.read_bytes() == CODE


def test_all_leftovers_of_a_folder_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        os.close(whole_files.locked_file(tmp_path / name)[0])
    kept = {"one.json", ".one.json.swp", ".hidden"}  # an editor writes such a .swp
    for name in kept:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    os.mkfifo(tmp_path / f".pipe.{whole_files.machine()}.{12 * '0'}")
    (tmp_path / f".link.{whole_files.machine()}.{12 * '0'}").symlink_to(tmp_path / "one.json")
    whole_files.remove_abandoned(tmp_path / "one.json")
    whole_files.remove_all_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith((".pipe", ".link"))} == kept
