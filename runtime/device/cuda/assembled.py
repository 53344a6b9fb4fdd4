"""PTX as the driver assembled it, kept in a file for the next start. Assembling a large program takes seconds.

What is assembled is for one GPU's generation and one driver, so both are in the name. A file that is damaged, or that the driver does not
take, is made anew.
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
    """The code on the card. `beside`: the path, less an ending, to which what is assembled is kept; None: nowhere."""
    if beside is None:
        return driver.load_module(ptx)
    path = beside.with_name(f"{beside.name}-{_digest(card, ptx)}{SUFFIX}")
    with suppress(OSError, DamagedFile, DamagedCode, IncompatibleExecutable):
        module = driver.load_module(read(path))
        with suppress(OSError):  # of a folder that may only be read
            os.utime(path)
        return module
    code = driver.assemble(ptx)
    with suppress(OSError):  # it is assembled again next time
        _keep(path, code)
    return driver.load_module(code)


def read(path: Path) -> bytes:
    """Raises OSError or DamagedFile."""
    content = regular(path).read_bytes()
    checksum, code = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(code).digest() != checksum:
        raise DamagedFile(path, "code", "its checksum is that of other bytes")
    return code


def _digest(card: Card, ptx: bytes) -> str:
    about = f"{card.name} {card.capability} {card.driver_version}"
    return hashlib.sha256(about.encode() + b"\0" + ptx).hexdigest()[:16]


def _keep(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(hashlib.sha256(code).digest() + code)
    fresh.replace(path)
