"""How the parts are put together."""

from __future__ import annotations

import subprocess
from pathlib import Path

from deploy.serve import WORKER


def test_a_worker_imports_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """An operator may well have a file of such a name where the server is started."""
    (tmp_path / "socket.py").write_text("raise SystemExit('not yours')")
    ended = subprocess.run([*WORKER, str(tmp_path / "none")], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "not yours" not in ended.stderr
    assert "FileNotFoundError" in ended.stderr  # it came as far as to the front's socket
