"""Keep machine code between tests, processes and runs of the tests, so that each kernel is scheduled, emitted and compiled only once.

A kernel is found as servers find theirs (compiler/codegen/kept.py): by a digest of its loop nest before it is scheduled, of the target and
of the compiler's sources. After a change of the compiler, LLVM still compiles only modules whose LLVM IR is new. Files are sealed and
private like those of servers. `make clean` removes them.

Kernels are compiled anew for a test that may change the compiler, because it uses `monkeypatch`, and for compilations with instruments,
which watch the passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / ".pytest_cache" / "modules"
MOST_BYTES = 1 << 30
DRIVER = "compiler.driver"
USERS = (DRIVER, "compiler.codegen.link")  # modules that call `emitted`
CHANGING = "monkeypatch"  # the fixture with which tests change modules
_is_changed = False  # whether the running test may have changed the compiler


@contextmanager
def kept_modules(folder: Path = FOLDER) -> Iterator[None]:
    """Let this process look up kernels and the code of LLVM IR, if a test file has imported the compiler's driver."""
    if DRIVER not in sys.modules:
        yield
        return
    from tests.unsynced import UnsyncedCode  # here, because most tests of the server do not import LLVM

    kept, driver = UnsyncedCode(folder, MOST_BYTES), sys.modules[DRIVER]

    def keeping(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_kept(module: Any, options: Any, *rest: Any) -> Any:
            keeps = options.kept is None and not options.instruments and not _is_changed
            return call(module, replace(options, kept=kept) if keeps else options, *rest)

        return with_kept

    with pytest.MonkeyPatch.context() as patch:
        for name in USERS:
            patch.setattr(sys.modules[name], "emitted", kept.emit)
        for name in ("plan", "build"):
            patch.setattr(driver, name, keeping(getattr(driver, name)))
        yield
    kept.trim()


@pytest.hookimpl(tryfirst=True)  # before fixtures compile
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _is_changed
    _is_changed = CHANGING in getattr(item, "fixturenames", ())


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile every kernel of a test, even those whose code is kept."""
    from compiler.codegen.kept import emitted

    monkeypatch.setattr(f"{__name__}._is_changed", True)
    for name in USERS:
        monkeypatch.setattr(f"{name}.emitted", emitted)
