"""Store the code that the driver assembled from PTX in a file for the next start. Assembling a large program takes seconds.

The file is sealed (runtime/sealed.py), because it is code. Assembled code is for one model of GPU and one driver, so the file name depends
on both. A file that is damaged, or that the driver rejects, is written again.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from runtime import sealed
from runtime.device.cuda import driver
from runtime.device.cuda.card import Card
from runtime.errors import DamagedCode, DamagedFile, IncompatibleExecutable, UnsafeCache

SUFFIX = ".cubin"


def load_module(card: Card, ptx: bytes, beside: Path | None) -> int:
    """Load the code on the card and return its module. `beside` is the beginning of the path of the file with the assembled code. If there
    is no such file yet, assemble the code and store it. If `beside` is None, the assembled code is not stored."""
    if beside is None:
        return driver.load_module(ptx)
    path = beside.with_name(f"{beside.name}-{_digest(card, ptx)}{SUFFIX}")
    with suppress(OSError, DamagedFile, UnsafeCache, DamagedCode, IncompatibleExecutable):
        module = driver.load_module(bytes(sealed.load(path)))
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)
        return module
    code = driver.assemble(ptx)
    with suppress(OSError, UnsafeCache):  # if the code cannot be stored, the next start assembles it again
        sealed.store(path, code)
    return driver.load_module(code)


def _digest(card: Card, ptx: bytes) -> str:
    """Return a digest of what the assembled code depends on: the model of GPU, the driver, and the PTX."""
    about = f"{card.name} {card.capability} {card.driver_version}"
    return hashlib.sha256(about.encode() + b"\0" + ptx).hexdigest()[:16]
