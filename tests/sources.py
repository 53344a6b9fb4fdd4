"""Tell whether files of the compiler have changed since the tests began, so that no old code is kept under the digest of new files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import compiler.signature as signature


class Sources:
    """The Python files below a folder. `digest` computes a digest of their contents."""

    def __init__(self, folder: Path, digest: Callable[[], str]) -> None:
        self._digest = digest
        self._files = [str(path) for path in folder.rglob("*.py")]
        self._times, self.version = self._read_times(), digest()

    def have_changed(self) -> bool:
        """Return whether a file has other contents. The times of the files are compared first, because a run of the tests asks thousands of
        times."""
        return self._read_times() != self._times and self.have_other_digest()

    def have_other_digest(self) -> bool:
        try:
            return self._digest() != self.version
        except OSError:  # a file was removed meanwhile
            return True

    def _read_times(self) -> list[int] | None:
        try:
            return [os.stat(file).st_mtime_ns for file in self._files]
        except FileNotFoundError:
            return None


COMPILER = Sources(Path(signature.__file__).parent, signature.compiler_version.__wrapped__)
# From here on, the keys of kept code contain this digest
assert signature.compiler_version() == COMPILER.version, "the compiler's files changed while the tests began; start the tests again"
