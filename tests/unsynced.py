"""Keep machine code without waiting until it is on the disk, and only while the compiler's files are those that the tests have imported.

Servers wait, because a power failure may leave a file without its content. Tests would lose nothing: they compile again what a damaged file
held.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from compiler.codegen.kept import KeptCode
from runtime.sealed import key_of, make_private, seal
from tests.sources import Sources


class UnsyncedCode(KeptCode):
    def __init__(self, folder: Path, most_bytes: int, sources: Sources) -> None:
        super().__init__(folder, most_bytes)
        self._sources = sources
        self._stored: list[Path] = []

    def _store(self, key: str, code: bytes) -> None:
        if self._sources.have_changed():
            return
        path = self._path(key)
        with suppress(OSError):  # as on a full disk, where the tests go on without
            make_private(path.parent)
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            fresh.write_bytes(seal(code, path.name, key_of(path.parent)))
            fresh.replace(path)
            self._stored.append(path)

    def remove_doubtful(self) -> None:
        """Remove what this process has stored if the compiler's files have changed: modules that were imported late may be newer than the
        digest in the keys."""
        if self._sources.have_other_digest():
            for path in self._stored:
                path.unlink(missing_ok=True)
