"""The output folder of an export."""

from __future__ import annotations

from pathlib import Path


class ExportError(Exception):
    """Raised if the output folder of an export is not empty."""


def new_folder(path: Path) -> Path:
    """Create the folder. Raise ExportError if it has files, which an export never overwrites."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ExportError(f"{path} exists and is not empty; name another folder with --output, or remove it")
    path.mkdir(parents=True, exist_ok=True)
    return path
