"""Import packages of other projects when a test first uses them. Every process of pytest-xdist collects all test files, so a package that
takes seconds to import would be imported once per process, although one process runs its tests."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Later:
    """A package that is imported when one of its public names is first read. pytest and its plugins look for marks and private names in
    everything that a test file contains."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "pytestmark":
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def imported_later(name: str) -> Any:
    """Return a package that is imported when it is first used. If it is not installed, skip the test file."""
    if find_spec(name) is None:
        pytest.skip(f"needs {name}: make .venv/clients", allow_module_level=True)
    return Later(name)
