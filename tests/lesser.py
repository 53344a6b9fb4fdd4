"""`python -m tests.lesser TARGET PATH...` prints the paths of tests to run again with the code of TARGET, if this CPU has more features
than TARGET. Otherwise it prints nothing, because a plain run already tests that code."""

from __future__ import annotations

import sys

from compiler.machine.target import NAMED, get


def is_lesser(name: str) -> bool:
    """Return whether this CPU can run some named target that has all features of the target `name` and more."""
    return any(target.can_run_here and target.features > get(name).features for target in NAMED.values())


if __name__ == "__main__":
    print(*(sys.argv[2:] if is_lesser(sys.argv[1]) else ()))
