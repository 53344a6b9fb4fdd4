"""Print what relaxserve needs, one requirement a line, with the packages of the extras that the arguments name:

    python -m pip install --require-hashes -c constraints.txt $(python docker/requirements.py hub,otel)

pip cannot check a hash of a folder, so it installs these first, and then relaxserve itself with --no-deps.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(extras: Iterable[str]) -> list[str]:
    project = tomllib.loads(PROJECT.read_text())["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"the extra is {extra!r}; expected one of {', '.join(sorted(optional))}")
        found += optional[extra]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(extra for argument in sys.argv[1:] for extra in argument.split(",") if extra)))
