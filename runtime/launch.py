"""Import this installation's own packages, whatever else has their names.

`server`, `compiler`, `runtime` and `deploy` are names that others use, too: a folder of that name in the working directory or on PYTHONPATH
would be imported in place of ours, and a package that is installed later would overwrite ours. The entry package `relaxserve` and every
process that the server starts begin here: `python -P .../runtime/launch.py MODULE ARGUMENTS` runs a module of ours as `-m` would.

This file imports nothing of ours, for whose it would be is not certain yet.
"""

from __future__ import annotations

import csv
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "compiler", "runtime", "deploy")
REMEDY = "install relaxserve by itself (pipx install relaxserve, uv tool install relaxserve), or once more (pip install --force-reinstall)"


class _Own:
    """Finds our packages before the path is looked at."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname in PACKAGES else None


def command(module: str) -> tuple[str, ...]:
    """What runs `module` in a process of its own. `-P` keeps files of the working directory, as a http.py, from the standard library's
    names."""
    return (sys.executable, "-P", str(Path(__file__).resolve()), module)


def own_packages_first() -> None:
    """End the process if an import would load other packages than the installed ones."""
    if fault := foreign_module() or changed_file():
        sys.exit(f"error: {fault}; {REMEDY}")
    if not any(isinstance(finder, type) and finder.__name__ == _Own.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Own)


def foreign_module() -> str:
    """Something that Python imports at its start may have imported another package by now."""
    for name in PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not Path(file).resolve().is_relative_to(ROOT):
            return f"the package {name!r} was imported from {file} before relaxserve's own"
    return ""


def changed_file(root: Path = ROOT) -> str:
    """The first of our modules that has another size than the one that was installed; "" in a checkout, where files may change."""
    record = next(root.glob("relaxserve-*.dist-info/RECORD"), None)
    if record is None:
        return ""
    with record.open(newline="") as lines:
        for path, _, size in csv.reader(lines):
            if size and path.partition("/")[0] in PACKAGES and path.endswith(".py"):
                file = root / path
                if not file.is_file() or file.stat().st_size != int(size):
                    return f"{file} is not the file that relaxserve installed: another package has put one of that name there"
    return ""


if __name__ == "__main__":
    own_packages_first()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
