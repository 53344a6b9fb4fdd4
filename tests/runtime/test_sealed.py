"""Sealed files: who may write to the cache, and that code without the seal of the installation's key is not used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime import flags, sealed
from runtime.errors import DamagedFile, UnsafeCache

CODE = b"machine code" * 100


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    place = tmp_path / "cache" / "code"
    sealed.store(place, CODE)
    assert sealed.load(place) == CODE
    assert [path.stat().st_mode & 0o777 for path in (place.parent, place, place.parent / ".key")] == [0o700, 0o600, 0o600]


@pytest.mark.parametrize("position", [0, 600, -40, -32, -1])
def test_a_changed_byte_breaks_the_seal(position: int, tmp_path: Path) -> None:
    place = tmp_path / "code"
    sealed.store(place, CODE)
    content = bytearray(place.read_bytes())
    content[position] ^= 1
    place.write_bytes(content)
    with pytest.raises(DamagedFile, match="seal"):
        sealed.load(place)


@pytest.mark.parametrize("length", [0, 31, 32, 500])
def test_a_cut_file_has_no_seal(length: int, tmp_path: Path) -> None:
    place = tmp_path / "code"
    sealed.store(place, CODE)
    os.truncate(place, length)
    with pytest.raises(DamagedFile, match="seal"):
        sealed.load(place)


def test_a_file_cannot_take_the_place_of_another(tmp_path: Path) -> None:
    sealed.store(tmp_path / "one", CODE)
    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(DamagedFile, match="seal"):
        sealed.load(tmp_path / "two")


def test_another_key_makes_another_seal(tmp_path: Path) -> None:
    sealed.store(tmp_path / "code", CODE)
    (tmp_path / ".key").unlink()
    with pytest.raises(DamagedFile, match="another key"):
        sealed.load(tmp_path / "code")


@pytest.mark.parametrize(("mode", "is_refused"), [(0o755, False), (0o700, False), (0o757, True), (0o777, True), (0o1777, False)])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, is_refused: bool, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    if not is_refused:
        sealed.require_private(tmp_path)
        return
    with pytest.raises(UnsafeCache, match=rf"{tmp_path} can be written by others \(owner {os.geteuid()}, .* mode {mode:04o}.*chmod go-w"):
        sealed.require_private(tmp_path)


def test_the_group_counts_unless_the_user_is_alone_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o2775)
    monkeypatch.setattr(sealed, "_is_private", lambda gid: False)
    with pytest.raises(UnsafeCache, match="can be written by others"):
        sealed.require_private(tmp_path)
    monkeypatch.setattr(sealed, "_is_private", lambda gid: True)
    sealed.require_private(tmp_path)


def test_another_user_s_folder_and_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed.store(tmp_path / "code", CODE)
    if os.geteuid() == 0:
        for path in (tmp_path, tmp_path / "code"):
            os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnsafeCache, match="belongs to another user"):
        sealed.require_private(tmp_path)
    with pytest.raises(UnsafeCache, match="belongs to another user"):
        sealed.load(tmp_path / "code")


def test_a_file_that_others_can_write_to_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    sealed.store(tmp_path / "code", CODE)
    (tmp_path / "code").chmod(0o666)
    with pytest.raises(UnsafeCache, match="mode 0666"):
        sealed.load(tmp_path / "code")


def test_a_link_and_a_pipe_are_not_opened(tmp_path: Path) -> None:
    sealed.store(tmp_path / "one", CODE)
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError):
        sealed.load(tmp_path / "two")
    os.mkfifo(tmp_path / "three")
    with pytest.raises(DamagedFile, match="regular"):
        sealed.load(tmp_path / "three")


@pytest.mark.parametrize("mode", [0o604, 0o602])
def test_a_key_that_others_can_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    sealed.store(tmp_path / "code", CODE)
    (tmp_path / ".key").chmod(mode)
    with pytest.raises(UnsafeCache, match=r"\.key"):
        sealed.load(tmp_path / "code")


def test_a_wide_umask_opens_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        sealed.store(tmp_path / "a" / "b" / "code", CODE)
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        sealed.require_private(path)
    assert sealed.load(tmp_path / "a" / "b" / "code") == CODE


def test_a_file_waits_for_no_disk_and_shows_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the key must be whole after a power failure, because nothing shows that it is not."""
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    sealed.key_of(tmp_path)
    assert len(synced) == 2 and synced[1] == str(tmp_path)  # the file and its folder
    for number in range(3):
        sealed.store(tmp_path / f"code{number}", CODE)
    assert len(synced) == 2
    (tmp_path / "code0").write_bytes(bytes((tmp_path / "code0").stat().st_size))
    os.truncate(tmp_path / "code1", 10)
    os.truncate(tmp_path / "code2", 0)
    for number in range(3):
        with pytest.raises(DamagedFile):
            sealed.load(tmp_path / f"code{number}")


# --- a key that replicas share ---------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 64)
    path.chmod(0o440)
    return path


def test_replicas_with_one_key_file_share_a_volume(key_file: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with flags.scope(cache_key_file=key_file):
        sealed.store(volume / "code", CODE)
        assert not (volume / ".key").exists()
        if os.geteuid() == 0:  # written by a replica with another user
            os.chown(volume / "code", 12345, 12345)
        assert sealed.load(volume / "code") == CODE
    with pytest.raises((DamagedFile, UnsafeCache)):
        sealed.load(volume / "code")


def test_whoever_lacks_the_shared_key_places_no_code(key_file: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    sealed.store(volume / "code", b"hostile")  # sealed with a key of the writer's own, which may even lie in the folder
    with flags.scope(cache_key_file=key_file), pytest.raises(DamagedFile, match="another key"):
        sealed.load(volume / "code")


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"k" * 64, 0o444, "open to others"),
        (b"k" * 64, 0o460, "open to others"),
        (b"k" * 8, 0o400, "8 bytes"),
        (b"k" * 5000, 0o400, "bytes"),
    ],
)
def test_a_poor_key_file_is_refused(content: bytes, mode: int, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with flags.scope(cache_key_file=path), pytest.raises(UnsafeCache, match=f"RELAXSERVE_CACHE_KEY_FILE .*{problem}"):
        sealed.key_of(tmp_path)


def test_the_time_of_the_last_use_is_recorded_if_the_folder_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cache prune` removes the files that were not used for long."""
    place = tmp_path / "code"
    assert sealed.recall(place) is None
    sealed.store(place, CODE)
    os.utime(place, (0, 0))
    assert sealed.recall(place) == CODE and place.stat().st_mtime > 0

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refuse)
        assert sealed.recall(place) == CODE
    place.write_bytes(CODE)
    assert sealed.recall(place) is None
