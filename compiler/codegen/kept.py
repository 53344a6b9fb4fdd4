"""Keep the machine code of each kernel on disk, sealed (runtime/sealed.py), so that other programs need not compile them again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Final

import llvmlite
import msgspec

from compiler.codegen.link import __file__ as link_file
from compiler.codegen.link import emitted
from compiler.machine.target import Target
from runtime import sealed
from runtime.errors import RuntimeFault

log = logging.getLogger(__name__)

SUFFIX: Final = ".code"
MOST_BYTES: Final = 256 << 20  # beyond this, the entries that were used least recently are removed


class KeptCode:
    """Emits machine code like `link.emitted`, and keeps it in a folder. Processes may share the folder."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.num_reused = self.num_emitted = 0
        self._most_bytes = most_bytes
        self._can_store = True

    def emit(self, text: str, target: Target) -> bytes:
        path = self.folder / f"{key_of(text, target)}{SUFFIX}"
        with suppress(OSError, RuntimeFault):  # a missing or damaged entry is compiled again
            code = bytes(sealed.load(path))
            path.touch()
            self.num_reused += 1
            return code
        code = emitted(text, target)
        self.num_emitted += 1
        if self._can_store:
            self._store(path, code)
        return code

    def _store(self, path: Path, code: bytes) -> None:
        try:
            sealed.require_private(self.folder)
            sealed.store(path, code)
        except (OSError, RuntimeFault) as error:  # a full or read-only disk, or a folder that others can write to
            log.warning("machine code cannot be kept in %s: %s; the next compilation takes longer", self.folder, error)
            self._can_store = False

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    def trim(self) -> None:
        """Remove the entries that were used least recently until the rest fits."""
        total = 0
        for _, num_bytes, path in sorted(self._used(), reverse=True):
            total += num_bytes
            if total > self._most_bytes:
                with suppress(OSError):
                    path.unlink()

    def _used(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.paths():
            with suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                yield status.st_mtime, status.st_size, path


def key_of(text: str, target: Target) -> str:
    """Return a digest of everything that determines the machine code of a module: its LLVM IR, the target, and what compiles it."""
    fields = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(target).items()}
    return hashlib.sha256(msgspec.json.encode([text, fields, _version()])).hexdigest()[:32]


@lru_cache(maxsize=1)
def _version() -> str:
    """Return the release of LLVM's binding, and a digest of the module that runs LLVM's passes. All else shows in the LLVM IR."""
    return f"{llvmlite.__version__} {hashlib.sha256(Path(link_file).read_bytes()).hexdigest()}"
