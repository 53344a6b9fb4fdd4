"""`python -m tests.lesser TARGET PATH...` prints the paths of test files that should run again with code for TARGET. If this CPU has no
more features than TARGET, it prints nothing, because a plain run already tests code for TARGET."""

from __future__ import annotations

import sys

from compiler.machine.target import NAMED, get


def is_lesser(name: str) -> bool:
    """Return whether this CPU can run a named target that has all features of the target `name` and further features."""
    return any(target.can_run_here and target.features > get(name).features for target in NAMED.values())


if __name__ == "__main__":
    print(*(sys.argv[2:] if is_lesser(sys.argv[1]) else ()))
