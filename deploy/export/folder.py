"""The output folder of an export."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class ExportError(Exception):
    """Raised if the output folder of an export is not empty, or cannot be made."""


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """Create the folder, for an export that fills it. If the export fails or is interrupted, remove what it has written. Raise ExportError
    if the folder has files, which an export never overwrites, or cannot be made."""
    try:
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise ExportError(f"{path} exists and is not empty; name another folder with --output, or remove it")
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{path} cannot be made: {error.strerror}; name another folder with --output") from error
    try:
        yield path
    except BaseException:
        for written in [path] if is_new else [*path.iterdir()]:
            if written.is_dir():
                shutil.rmtree(written, ignore_errors=True)
            else:
                written.unlink(missing_ok=True)
        raise
