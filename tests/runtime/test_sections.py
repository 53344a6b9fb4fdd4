from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import sections
from runtime.errors import DamagedFile
from runtime.sections import SectionFile

ROOT = Path(__file__).parents[2]
CONTENT = {"one": b"first", "empty": b"", "große": bytes(range(256)) * 9}


def write(path: Path, contents: dict[str, bytes], key: bytes | None = None) -> None:
    with sections.writing(path, {name: len(content) for name, content in contents.items()}, key) as put:
        for name, content in contents.items():
            put(name, memoryview(content))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "file"
    write(path, CONTENT)
    return path


def test_round_trip(path: Path) -> None:
    file = SectionFile(path)
    assert {name: bytes(file.read(name)) for name in file.names} == CONTENT


def test_sections_are_aligned_views_of_the_file(path: Path) -> None:
    view = np.frombuffer(SectionFile(path).read("große"), np.uint8)
    assert view.ctypes.data % 64 == 0 and not view.flags.owndata


def test_equal_content_gives_equal_bytes(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "again", CONTENT)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_bytes_in_memory_are_those_of_a_file(path: Path) -> None:
    assert sections.packed(CONTENT) == path.read_bytes()
    file = SectionFile(Path("none"), content=memoryview(path.read_bytes()))
    assert {name: bytes(file.read(name)) for name in file.names} == CONTENT


def test_a_header_is_sealed_by_the_key_and_the_name(path: Path) -> None:
    """Sizes and checksums of packed weights are used only if an installation with the key wrote them."""
    write(path, CONTENT, b"key")
    SectionFile(path, b"key").verify()
    for key in (None, b"other"):
        with pytest.raises(DamagedFile, match="digest differs"):
            SectionFile(path, key)
    with pytest.raises(DamagedFile, match="digest differs"):
        SectionFile(path.rename(path.with_name("other")), b"key")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A named pipe is refused without being opened, because opening it would block until somebody writes to it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedFile, match="not a regular file"):
        SectionFile(tmp_path / "pipe")


def test_a_view_outlives_the_replacement_of_its_file(path: Path) -> None:
    view = SectionFile(path).read("one")
    write(path, {"one": b"other"})
    assert bytes(view) == b"first" and bytes(SectionFile(path).read("one")) == b"other"


def test_every_flipped_bit_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification finds every flipped bit, also in a section of several blocks, and also in the slow mode that pauses after each block."""
    monkeypatch.setattr(sections, "BLOCK_BYTES", 100)
    file, sound = SectionFile(path), path.read_bytes()
    paused: list[int] = []
    file.verify()
    file.verify_slowly(lambda: paused.append(1))
    assert len(paused) > 9 * 256 // 100
    for section in file._sections.values():
        for bit in range(0, 8 * section.size, 37):
            content = bytearray(sound)
            content[section.offset + bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            for verify in (SectionFile(path).verify, lambda: SectionFile(path).verify_slowly(lambda: None)):
                with pytest.raises(DamagedFile, match=f"section {section.name!r} is damaged: its checksum differs"):
                    verify()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    before = path.read_bytes()
    for call in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
            patched.setattr(call, fail)
            write(path, {"one": b"new"})
        assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", [n for n in CONTENT if CONTENT[n]])
def test_a_damaged_section_is_named_and_the_others_are_readable(path: Path, name: str) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(CONTENT[name])] ^= 1
    path.write_bytes(content)
    file = SectionFile(path)
    with pytest.raises(DamagedFile, match=f"section '{name}' is damaged: its checksum differs") as error:
        file.read(name)
    assert error.value.section == name
    assert [bytes(file.read(n)) for n in CONTENT if n != name] == [c for n, c in CONTENT.items() if n != name]
    assert len(file.read(name, verify=False)) == len(CONTENT[name])


def test_a_missing_section_is_named(path: Path) -> None:
    with pytest.raises(DamagedFile, match="'two' is damaged: it is missing"):
        SectionFile(path).read("two")


def read_all(path: Path) -> dict[str, bytes]:
    file = SectionFile(path)
    return {name: bytes(file.read(name)) for name in file.names}


@given(st.integers(0, 10_000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_truncated_file_is_damaged(path: Path, tmp_path: Path, length: int) -> None:
    whole = path.read_bytes()
    short = tmp_path / "short"
    short.write_bytes(whole[: length % len(whole)])
    with pytest.raises(DamagedFile):
        read_all(short)


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_flipped_bit_goes_unnoticed(path: Path, tmp_path: Path, at: int, flip: int) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= flip
    damaged = tmp_path / "damaged"
    damaged.write_bytes(content)
    with contextlib.suppress(DamagedFile):
        assert read_all(damaged) == CONTENT  # an undetected change may only be in the padding between sections


@given(st.binary(max_size=300), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_bytes_give_a_typed_error(tmp_path: Path, data: bytes, magic: bool) -> None:
    path = tmp_path / "any"
    path.write_bytes(sections.MAGIC + data if magic else data)
    with pytest.raises(DamagedFile):
        read_all(path)


def test_sections_may_come_one_by_one_in_any_order(path: Path, tmp_path: Path) -> None:
    with sections.writing(tmp_path / "parts", {name: len(content) for name, content in CONTENT.items()}) as put:
        for name in reversed(CONTENT):
            put(name, memoryview(CONTENT[name]))
    assert (tmp_path / "parts").read_bytes() == path.read_bytes()


def test_a_section_that_never_came_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="two"), sections.writing(tmp_path / "parts", {"one": 1, "two": 1}) as put:
        put("one", memoryview(b"1"))
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from runtime.sections import writing
with writing(Path(sys.argv[1]), {"a": 1 << 20}) as put:
    put("a", memoryview(bytes(1 << 20)))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_when_the_file_is_written_again(path: Path) -> None:
    """A process that is killed whenever it packs weights, such as for lack of memory, must not fill the disk with its attempts."""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, path], cwd=ROOT, check=False)
        (left,) = [file for file in path.parent.iterdir() if file != path]
        assert left.stat().st_size >= 1 << 20
    write(path, CONTENT)
    assert [*path.parent.iterdir()] == [path]


def test_what_is_being_written_stays(path: Path) -> None:
    with sections.writing(path, {"slow": 1}) as put:
        write(path, {"fast": b"f"})
        assert SectionFile(path).names == ("fast",)
        put("slow", memoryview(b"s"))
    assert SectionFile(path).names == ("slow",) and [*path.parent.iterdir()] == [path]
