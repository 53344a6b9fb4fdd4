"""The output folder of an export."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

# The error numbers of writes for which there is no room: the disk is full, the user's quota is used up, or the file is larger than the file
# system allows.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ExportError(Exception):
    """Raised if the output folder of an export is not empty, cannot be made or written, or is on a disk without room."""


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """Create the folder, for an export that fills it. If the export fails or is interrupted, remove what it has written. Raise ExportError
    if the folder has files, which an export never overwrites, if it cannot be made or written, or if its disk has no room."""
    try:
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise ExportError(f"{path} exists and is not empty; name another folder with --output, or remove it")
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{path} cannot be made: {error.strerror}; name another folder with --output") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ExportError(f"{path} cannot be written by this user; name another folder with --output")
    try:
        yield path
    except BaseException as error:
        for written in [path] if is_new else [*path.iterdir()]:
            if written.is_dir():
                shutil.rmtree(written, ignore_errors=True)
            else:
                written.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL:
            text = f"{path} cannot be written: {error.strerror}; free space there, or name another folder with --output"
            raise ExportError(text) from error
        raise
