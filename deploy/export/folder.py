"""The folder that an export is written to."""

from __future__ import annotations

from pathlib import Path


class ExportError(Exception):
    """The folder cannot be written."""


def new_folder(path: Path) -> Path:
    """Nothing that lies there is touched: it is made, or empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ExportError(f"{path} is there already and not empty; name another folder with --output, or remove it")
    path.mkdir(parents=True, exist_ok=True)
    return path
