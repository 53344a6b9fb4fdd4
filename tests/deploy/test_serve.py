"""How the parts are put together."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.serve import WORKER, serve
from server.settings import ServerSettings
from server.state import StateError


@pytest.mark.parametrize(
    ("file", "complaint"),
    [("", "Is a directory; name a file"), ("file/x", "Not a directory; name a file"), ("sub/x", "Is a directory; name a file in a folder")],
)
def test_a_state_file_that_cannot_be_used_stops_the_start(file: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "sub" / "x.new").mkdir(parents=True)

    async def greet(*_: object) -> bool:
        raise AssertionError("it started")

    with pytest.raises(StateError, match=complaint):
        serve(ServerSettings(port=0, state_file=tmp_path / file), [], greet)


def test_a_worker_imports_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """An operator may well have a file of such a name where the server is started."""
    (tmp_path / "socket.py").write_text("raise SystemExit('not yours')")
    ended = subprocess.run([*WORKER, str(tmp_path / "none")], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "not yours" not in ended.stderr
    assert "FileNotFoundError" in ended.stderr  # it came as far as to the front's socket
