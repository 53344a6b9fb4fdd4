"""Import the packages of this installation, even if other packages have the same names.

Other software also uses the names `server`, `compiler`, `runtime` and `deploy`: a folder of that name in the working directory or on
PYTHONPATH would be imported in place of ours, and a package that is installed later would overwrite ours. The entry package `relaxserve`
and every process that the server starts begin in this file: `python -P .../runtime/launch.py MODULE ARGUMENTS` runs a module of ours as
`python -m` would.

This file imports none of our packages before `prepare_imports`, because the import might find another package of the same name.
"""

from __future__ import annotations

import csv
import gc
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "compiler", "runtime", "deploy")
# More objects than the modules of the process that serves HTTP create (170,000). Objects of modules are never freed, so searching them for
# garbage would only delay the start.
IMPORTED = 250_000
REMEDY = "in a checkout, install relaxserve by itself (pipx install ., uv tool install .), or once more (pip install --force-reinstall .)"


class _Own:
    """A finder that finds our packages before Python searches the path."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname in PACKAGES else None


def command(module: str) -> tuple[str, ...]:
    """Return the command that runs `module` in a separate process. With `-P`, files in the working directory, such as a http.py, do not
    shadow modules of the standard library."""
    return (sys.executable, "-P", str(Path(__file__).resolve()), module)


def prepare_imports() -> None:
    """Make Python find our packages first. End the process if another package has been imported under our names, or has overwritten our
    files. Collect no garbage before IMPORTED objects exist."""
    gc.set_threshold(IMPORTED)
    if fault := foreign_module() or changed_file():
        sys.exit(f"error: {fault}; {REMEDY}")
    if not any(isinstance(finder, type) and finder.__name__ == _Own.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Own)


def foreign_module() -> str:
    """Return a description of the fault if a package with one of our names was imported before ours, for instance by code that Python runs
    at its start. Return "" if there is no such package."""
    for name in PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not Path(file).resolve().is_relative_to(ROOT):
            return f"the package {name!r} was imported from {file} before relaxserve's own"
    return ""


def changed_file(root: Path = ROOT) -> str:
    """Compare the sizes of our modules with those recorded at installation. Return a message that names the first module whose size
    differs, or "" if there is none. In a checkout nothing is recorded, because files may change: return ""."""
    record = next(root.glob("relaxserve-*.dist-info/RECORD"), None)
    if record is None:
        return ""
    with record.open(newline="") as lines:
        for path, _, size in csv.reader(lines):
            if size and path.partition("/")[0] in PACKAGES and path.endswith(".py"):
                file = root / path
                if not file.is_file() or file.stat().st_size != int(size):
                    return f"{file} is not the file that relaxserve installed: another package has overwritten it"
    return ""


if __name__ == "__main__":
    prepare_imports()
    from runtime.generated_code import recall

    recall(sys.argv[1])
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
