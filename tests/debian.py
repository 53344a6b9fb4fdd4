"""Programs and files of Debian packages that some tests use: installed ones, or those that `make .venv/debian` unpacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / ".venv" / "debian" / "usr"


def program(name: str) -> str:
    """Return the path of a program. Skip the test if it is missing."""
    folders = ":".join(str(FOLDER / part) for part in ("bin", "sbin"))
    found = shutil.which(name) or shutil.which(name, path=folders)
    if found is None:
        pytest.skip(f"needs {name}: `make .venv/debian` fetches it on Debian and Ubuntu")
    return found


def file(path: str) -> Path:
    """Return a file below /usr. Skip the test if it is missing."""
    found = next((place for root in (Path("/usr"), FOLDER) if (place := root / path).is_file()), None)
    if found is None:
        pytest.skip(f"needs {path}: `make .venv/debian` fetches it on Debian and Ubuntu")
    return found
