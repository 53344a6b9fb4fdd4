"""Store the code that the driver assembled from PTX in a file for the next start. Assembling a large program takes seconds.

Assembled code is for one model of GPU and one driver, so the file name depends on both. A file that is damaged, or that the driver rejects,
is written again.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from runtime.device.cuda import driver
from runtime.device.cuda.card import Card
from runtime.errors import DamagedCode, DamagedFile, IncompatibleExecutable
from runtime.files import regular

SUFFIX = ".cubin"
_CHECKSUM_BYTES = 32


def load_module(card: Card, ptx: bytes, beside: Path | None) -> int:
    """Load the code on the card and return its module. `beside` is the path, without suffix, of the file for the assembled code; None: the
    assembled code is not stored."""
    if beside is None:
        return driver.load_module(ptx)
    path = beside.with_name(f"{beside.name}-{_digest(card, ptx)}{SUFFIX}")
    with suppress(OSError, DamagedFile, DamagedCode, IncompatibleExecutable):
        module = driver.load_module(read(path))
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)
        return module
    code = driver.assemble(ptx)
    with suppress(OSError):  # if the code cannot be stored, the next start assembles it again
        _keep(path, code)
    return driver.load_module(code)


def read(path: Path) -> bytes:
    """Read a file of assembled code and verify its checksum. Raises OSError or DamagedFile."""
    content = regular(path).read_bytes()
    checksum, code = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(code).digest() != checksum:
        raise DamagedFile(path, "code", "its checksum differs")
    return code


def _digest(card: Card, ptx: bytes) -> str:
    about = f"{card.name} {card.capability} {card.driver_version}"
    return hashlib.sha256(about.encode() + b"\0" + ptx).hexdigest()[:16]


def _keep(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(hashlib.sha256(code).digest() + code)
    fresh.replace(path)
