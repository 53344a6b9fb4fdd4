"""The command `relaxserve`, and `python -m relaxserve`: makes sure of the packages behind it, whose names are less its own."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def main() -> None:
    _load_launch()
    from deploy.cli import main as run

    run()


def _load_launch() -> None:
    """By its path: the name `runtime` may be somebody else's. It lies beside this package, or above it in a checkout."""
    file = next(file for root in (_HERE.parent, _HERE.parents[2]) if (file := root / "runtime" / "launch.py").is_file())
    spec = spec_from_file_location("relaxserve.launch", file)
    assert spec is not None and spec.loader is not None, "a file of Python has a loader"
    launch = module_from_spec(spec)
    spec.loader.exec_module(launch)
    launch.own_packages_first()
