"""Only regular files are opened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from runtime.files import digest_of_sources, regular
from tests.unreadable import make_unreadable


def test_a_file_and_a_link_to_one_may_be_opened(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    (link := tmp_path / "link").symlink_to(file)
    assert regular(file) == file and regular(link) == link


def test_what_else_there_is_is_named(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
    for path, expected in ((fifo, "it is a FIFO, expected"), (tmp_path / "socket", "a socket"), (Path("/dev/null"), "a device")):
        with pytest.raises(OSError, match=expected):
            regular(path)
    with pytest.raises(IsADirectoryError):
        regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "absent")


def test_sources_that_cannot_be_listed_have_no_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise another version of the sources could have the same digest, and find in the cache what this one has made."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.py").write_text("1")
    make_unreadable(monkeypatch, tmp_path / "part")
    with pytest.raises(PermissionError):
        digest_of_sources(tmp_path)


def test_bytecode_is_no_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("1")
    found = digest_of_sources(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    make_unreadable(monkeypatch, tmp_path / "__pycache__")
    assert digest_of_sources(tmp_path) == found
