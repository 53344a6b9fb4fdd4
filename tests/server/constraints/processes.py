"""Test helpers: list the processes of a constraint compiler, and wait for a matcher's answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from server.constraints.compiler import ConstraintCompiler
from server.constraints.matcher import LATE, Mask, Matcher
from server.messages import Constraint


def matcher_of(compiler: ConstraintCompiler, constraint: Constraint, **sharing: str) -> Matcher:
    return answered(compiler.open(constraint, **sharing))


def answered(matcher: Matcher) -> Matcher:
    wait_until(matcher.poll)
    return matcher


def mask_of(matcher: Matcher) -> Mask:
    matcher.prefetch_mask()
    mask = answered(matcher).mask()
    assert mask is not None and mask is not LATE
    return mask


def forced_by(matcher: Matcher) -> list[int]:
    matcher.forced()
    return answered(matcher).forced()


def allowed_by(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def zygote_of(compiler: ConstraintCompiler) -> int:
    compiler.warm()
    line = compiler._zygote._socket
    assert line is not None
    wait_until(lambda: line.pid is not None)
    assert line.pid is not None
    return line.pid


def processes_of(compiler: ConstraintCompiler) -> set[int]:
    """Return the ids of the compiler's constraint processes, without the zygote that forks them."""
    return below(zygote_of(compiler))


def below(pid: int) -> set[int]:
    """Return the ids of all running descendants of a process."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition was not reached in time"
        time.sleep(0.005)
