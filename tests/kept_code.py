"""Keep machine code between tests, processes and runs of the tests, so that LLVM compiles each module only once.

The compiler runs as before, up to the LLVM IR. The key of a module is the one with which servers keep code: the IR, the target, LLVM's
release and the passes that we ask of LLVM (compiler/codegen/kept.py). Files are sealed and private like those of servers. `make clean`
removes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / ".pytest_cache" / "modules"
MOST_BYTES = 1 << 30
DRIVER = "compiler.driver"
USERS = (DRIVER, "compiler.codegen.link")  # modules that call `emitted`


@contextmanager
def kept_modules(folder: Path = FOLDER) -> Iterator[None]:
    """Let this process look up the code of LLVM IR before it runs LLVM, if a test file has imported the compiler's driver."""
    if DRIVER not in sys.modules:
        yield
        return
    from compiler.codegen.kept import KeptCode  # here, because most tests of the server do not import LLVM

    kept = KeptCode(folder, MOST_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        for name in USERS:
            patch.setattr(sys.modules[name], "emitted", kept.emit)
        yield
    kept.trim()


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let LLVM compile every module of a test, even those whose code is kept."""
    from compiler.codegen.kept import emitted

    for name in USERS:
        monkeypatch.setattr(f"{name}.emitted", emitted)
