"""Keep machine code only while the compiler's files are those that the tests have imported."""

from __future__ import annotations

from pathlib import Path

from compiler.codegen.kept import KeptCode
from tests.sources import Sources


class CurrentCode(KeptCode):
    def __init__(self, folder: Path, most_bytes: int, sources: Sources) -> None:
        super().__init__(folder, most_bytes)
        self._sources = sources
        self._stored: list[Path] = []

    def _store(self, key: str, code: bytes) -> None:
        if self._sources.have_changed():
            return
        super()._store(key, code)
        self._stored.append(self._path(key))

    def remove_doubtful(self) -> None:
        """Remove what this process has stored if the compiler's files have changed: modules that were imported late may be newer than the
        digest in the keys."""
        if self._sources.have_other_digest():
            for path in self._stored:
                path.unlink(missing_ok=True)
