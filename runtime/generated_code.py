"""Keep the code of dataclasses between starts, as Python keeps the bytecode of modules.

For each dataclass, Python's `dataclasses` writes the text of four to six functions and compiles it: 1,000 texts for the imports of a front,
2,500 for the imports of a worker that compiles a model. That takes 0.1 s and 0.2 s of processor time, a fifth and a third of the imports. A
text always becomes the same code, so this module stores each text with its code in a file. The file lies in `__pycache__` beside the
bytecode of this module, and needs no further protection: whoever can write there can change modules, too. Python's switches for bytecode
apply: with PYTHONDONTWRITEBYTECODE nothing is written, and PYTHONPYCACHEPREFIX names another folder.
"""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
import importlib.util
import marshal
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from runtime.launch import ROOT
from runtime.whole_files import ORDINARY, remove_abandoned, replacing

MOST = 8_000  # maximum number of texts in a file; beyond it, the texts that this process did not use are left out
DIGEST_BYTES = 32

Codes = dict[str, CodeType]


class GeneratedCode:
    """The stored code, with a method `exec` that replaces the built-in `exec` in the module `dataclasses`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = _read(path)
        self._used: Codes = {}
        self.num_compiled = 0

    def exec(self, text: str, globals: dict[str, Any] | None = None, locals: dict[str, Any] | None = None) -> None:
        """Run a text as the built-in `exec` does, but compile it only if neither an earlier process has kept its code nor this one has
        compiled it."""
        code = self._used.get(text) or self._kept.get(text)
        if code is None:
            code = compile(text, "<string>", "exec", dont_inherit=True)
            self.num_compiled += 1
        self._used[text] = code
        builtins.exec(code, globals, locals)

    def keep(self) -> None:
        """Write the file if this process has compiled a text, unless Python's switches forbid bytecode. If that fails, do nothing."""
        if not self.num_compiled or sys.dont_write_bytecode:
            return
        whole = {**self._kept, **self._used}
        content = marshal.dumps(whole if len(whole) <= MOST else self._used)
        with suppress(OSError):  # the folder is read-only, or the disk full: the next start compiles again
            self._path.parent.mkdir(exist_ok=True)
            remove_abandoned(self._path)
            with replacing(self._path, ORDINARY, synced=False) as file:
                file.write(_digest(content) + content)


_of_process: GeneratedCode | None = None


def recall(process: str) -> None:
    """Use the code that earlier processes of this kind kept."""
    global _of_process
    with suppress(NotImplementedError):  # this Python keeps no bytecode
        _of_process = GeneratedCode(place(process))
        dataclasses.__dict__["exec"] = _of_process.exec  # in `dataclasses`, this hides the built-in function


def keep() -> None:
    """Store the code of this process for later processes, and free its memory. Call this once all usual modules are imported. Dataclasses
    that are defined later are compiled as without this module."""
    global _of_process
    if _of_process is not None:
        del dataclasses.__dict__["exec"]
        _of_process.keep()
        _of_process = None


def place(process: str) -> Path:
    """Return the path of the file with the code of a kind of process. The name of the file contains the version of Python."""
    return Path(importlib.util.cache_from_source(__file__)).with_suffix(f".{process}")


def _read(path: Path) -> Codes:
    """Return the code by its text, or nothing if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    return marshal.loads(content[DIGEST_BYTES:]) if content[:DIGEST_BYTES] == _digest(content[DIGEST_BYTES:]) else {}


def _digest(content: bytes) -> bytes:
    """Return the digest that precedes the content of a file. It also depends on the version of Python and of this installation."""
    return hashlib.sha256(importlib.util.MAGIC_NUMBER + _installed().encode() + content).digest()


@cache
def _installed() -> str:
    """Return the name and version of this installation, or "" in a checkout. Code that another version of relaxserve stored is not used, so
    that the file does not grow with each version."""
    return next((found.name for found in ROOT.glob("relaxserve-*.dist-info")), "")
