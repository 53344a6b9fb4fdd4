"""Keep machine code without waiting until it is on the disk.

Servers wait, because a power failure may leave a file without its content. Tests would lose nothing: they compile again what a damaged file
held.
"""

from __future__ import annotations

import os
from contextlib import suppress

from compiler.codegen.kept import KeptCode
from runtime.sealed import key_of, make_private, seal


class UnsyncedCode(KeptCode):
    def _store(self, key: str, code: bytes) -> None:
        path = self._path(key)
        with suppress(OSError):  # as on a full disk, where the tests go on without
            make_private(path.parent)
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            fresh.write_bytes(seal(code, path.name, key_of(path.parent)))
            fresh.replace(path)
