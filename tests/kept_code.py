"""Keep machine code between tests, processes and runs of the tests, so that each kernel is scheduled, emitted and compiled only once.

A kernel is found as servers find theirs (compiler/codegen/kept.py): by a digest of its loop nest before it is scheduled, of the target and
of the compiler's sources. After a change of the compiler, LLVM still compiles only modules whose LLVM IR is new. Files are sealed and
private like those of servers. `make clean` removes them.

Kernels are compiled anew while a test may have changed the compiler: if it uses the fixture `monkeypatch`, and while an attribute of the
compiler is patched by any other MonkeyPatch. So they are for compilations with instruments, which watch the passes. This file's own patches
are those of unittest.mock, which count as no change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from tests.sources import COMPILER, Sources

FOLDER = Path(__file__).parent.parent / ".pytest_cache" / "modules"
MOST_BYTES = 1 << 30
DRIVER = "compiler.driver"
USERS = (DRIVER, "compiler.codegen.link")  # modules that call `emitted`
CHANGING = "monkeypatch"  # the fixture with which tests change modules
_may_change = False  # whether the running test uses this fixture
_patching: set[pytest.MonkeyPatch] = set()  # those that have changed the compiler and have not undone it


@contextmanager
def kept_modules(folder: Path = FOLDER, sources: Sources = COMPILER) -> Generator[None]:
    """Let this process look up kernels and the code of LLVM IR, if a test file has imported the compiler's driver."""
    if DRIVER not in sys.modules:
        yield
        return
    from tests.current_code import CurrentCode  # here, because most tests of the server do not import LLVM

    kept, driver = CurrentCode(folder, MOST_BYTES, sources), sys.modules[DRIVER]

    def keeping(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_kept(module: Any, options: Any, *rest: Any) -> Any:
            keeps = options.kept is None and not options.instruments and not _may_change and not _patching
            return call(module, replace(options, kept=kept) if keeps else options, *rest)

        return with_kept

    with ExitStack() as patches:
        for name in USERS:
            patches.enter_context(patch.object(sys.modules[name], "emitted", kept.emit))
        for name in ("plan", "build"):
            patches.enter_context(patch.object(driver, name, keeping(getattr(driver, name))))
        patches.enter_context(_noticed_patches())
        patches.callback(kept.remove_doubtful)
        yield
    kept.trim()


@contextmanager
def _noticed_patches() -> Generator[None]:
    """Notice which MonkeyPatches change attributes of the compiler, until they undo it."""
    change, remove, undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.delattr, pytest.MonkeyPatch.undo

    def noticed(call: Callable[..., None]) -> Callable[..., None]:
        def with_notice(own: pytest.MonkeyPatch, target: object, *rest: Any, **named: Any) -> None:
            if _module_of(target).startswith("compiler."):
                _patching.add(own)
            call(own, target, *rest, **named)

        return with_notice

    def undone(own: pytest.MonkeyPatch) -> None:
        undo(own)
        _patching.discard(own)

    with patch.multiple(pytest.MonkeyPatch, setattr=noticed(change), delattr=noticed(remove), undo=undone):
        yield


def _module_of(target: object) -> str:
    """Return the name of the module that a patch changes: of a path, a module, a class, or the class of an object."""
    if isinstance(target, str):
        return target
    return target.__name__ if isinstance(target, ModuleType) else str(getattr(target, "__module__", ""))


@pytest.hookimpl(tryfirst=True)  # before fixtures compile
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _may_change
    _may_change = CHANGING in getattr(item, "fixturenames", ())


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Compile every kernel of a test, even those whose code is kept."""
    from compiler.codegen.kept import emitted

    with ExitStack() as patches:
        patches.enter_context(patch(f"{__name__}._may_change", True))
        for name in USERS:
            patches.enter_context(patch(f"{name}.emitted", emitted))
        yield
