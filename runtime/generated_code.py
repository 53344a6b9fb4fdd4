"""Keep the code of dataclasses between starts, as Python keeps that of modules.

For each dataclass, Python's `dataclasses` writes the text of four to six functions and compiles it: 1,000 texts for the imports of a front,
2,500 for those of a worker that compiles a model. That takes 0.1 and 0.2 s of processor time, a fifth and a third of the imports. A text
always becomes the same code, so this module keeps code by its text. The file lies with the bytecode of this module in `__pycache__`, and
is trusted as that is: whoever can write there can change modules, too. Python's switches for bytecode apply: with PYTHONDONTWRITEBYTECODE
nothing is written, and PYTHONPYCACHEPREFIX names another folder.
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

MOST = 8_000  # texts in a file; with more, those that this process did not use are left out
DIGEST_BYTES = 32

Codes = dict[str, CodeType]


class GeneratedCode:
    """Takes the place of `exec` in the module `dataclasses`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = _read(path)
        self._used: Codes = {}
        self.num_compiled = 0

    def exec(self, text: str, globals: dict[str, Any] | None = None, locals: dict[str, Any] | None = None) -> None:
        """Run a text as the built-in `exec` does, but compile it only if no earlier process kept its code."""
        code = self._used.get(text) or self._kept.get(text)
        if code is None:
            code = compile(text, "<string>", "exec", dont_inherit=True)
            self.num_compiled += 1
        self._used[text] = code
        builtins.exec(code, globals, locals)

    def keep(self) -> None:
        """Write the file if this process has compiled a text, unless Python's switches forbid bytecode. Ignore a failure."""
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
        dataclasses.__dict__["exec"] = _of_process.exec  # hides the built-in function there


def keep() -> None:
    """Keep the code of this process for later ones, and let its memory go. Call this once all usual modules are imported. Later dataclasses
    are compiled as without this module."""
    global _of_process
    if _of_process is not None:
        del dataclasses.__dict__["exec"]
        _of_process.keep()
        _of_process = None


def place(process: str) -> Path:
    """Return where the code of a kind of process is kept. The name has the version of Python."""
    return Path(importlib.util.cache_from_source(__file__)).with_suffix(f".{process}")


def _read(path: Path) -> Codes:
    """Return the code by its text. A missing or damaged file has none."""
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
    """Return the name and version of this installation, or "" in a checkout. What another version kept is not used, so that a file does not
    grow with each version."""
    return next((found.name for found in ROOT.glob("relaxserve-*.dist-info")), "")
