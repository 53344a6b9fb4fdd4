"""Measure the processor seconds of tests, with those of the processes that they start. Unlike seconds of the clock, they depend little on
other work of the machine.

    pytest -p tests.check.cost --cost=FILE PATH...     append the seconds of each test to FILE; with a space instead of `=`, pytest takes
                                                       a FILE that exists for a path of tests
    python -m tests.check.cost FILE                    print them by function, most first
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from server.process_state import TIMES, fields_of

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", type=Path, required=True, help="file to which the processor seconds of tests are added")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before_s = processor_s()
    try:
        return (yield)
    finally:
        with item.config.getoption("--cost").open("a") as file:  # processes of pytest-xdist append to the same file
            file.write(json.dumps([item.nodeid, round(processor_s() - before_s, 3)]) + "\n")


def processor_s() -> float:
    """Return the processor seconds of this process and of all processes below it."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + _of_children(os.getpid())


def _of_children(pid: int) -> float:
    total = 0.0
    with suppress(OSError):  # a process may end while it is read
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in file.read_text().split():
                with suppress(OSError):
                    total += sum(map(int, fields_of(int(child))[TIMES])) / TICKS_PER_S + _of_children(int(child))
    return total


def by_function(lines: str) -> dict[str, float]:
    """Return the seconds of each test function, most first."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, seconds in map(json.loads, lines.splitlines()):
        found[name.partition("[")[0].partition("@")[0]] += seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


if __name__ == "__main__":
    functions = by_function(Path(sys.argv[1]).read_text())
    print(f"{sum(functions.values()):9.2f} s of {len(functions)} functions")
    print(*(f"{seconds:9.2f} s {name}" for name, seconds in functions.items()), sep="\n")
