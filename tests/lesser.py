"""`python -m tests.lesser TARGET PATH...` prints the paths where this CPU has more than the target: elsewhere plain tests run its code."""

from __future__ import annotations

import sys

from compiler.machine.target import NAMED, get


def is_lesser(name: str) -> bool:
    """Whether this CPU runs a named target with more features than this one."""
    return any(target.can_run_here and target.features > get(name).features for target in NAMED.values())


if __name__ == "__main__":
    print(*(sys.argv[2:] if is_lesser(sys.argv[1]) else ()))
