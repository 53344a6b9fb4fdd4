"""Let `make test` run some combinations of a test's parameters that together contain each pair of values; the others are marked slow.

`@pytest.mark.covering("kind", "size")` names parameters of a test, or fixtures with parameters; without names, it means all of them. Among
equal values of all other parameters, each pair of values of two named parameters is in a combination that runs. With `together=1` each
single value is, with `together=3` each triple. `make test-slow` runs all combinations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import cast

import pytest

MIXED = 0.6180339887  # multiples of the golden ratio, without their whole parts, are spread evenly
Combination = tuple[Hashable, ...]  # the value of each parameter


def mark_uncovered(items: Sequence[pytest.Item]) -> None:
    """Mark combinations of parameters as slow that `covering` leaves out."""
    tests: defaultdict[tuple[object, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        # A combination that is slow anyway covers nothing in `make test`
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            names, _ = _asked(item)
            others = tuple((name, value) for name, value in _values(item).items() if name not in names)
            tests[item.path, item.cls, item.originalname, others].append(item)
    for same in tests.values():
        names, together = _asked(same[0])
        needed = covering([tuple(_values(item)[name] for name in names) for item in same], together)
        for number, item in enumerate(same):
            if number not in needed:
                item.add_marker(pytest.mark.slow)


def _asked(item: pytest.Function) -> tuple[tuple[str, ...], int]:
    marker = item.get_closest_marker("covering")
    assert marker is not None
    names = cast(tuple[str, ...], marker.args) or (*_values(item),)
    if missing := set(names) - _values(item).keys():
        raise pytest.UsageError(f"{item.nodeid}: covering names {sorted(missing)}; the test's parameters are {sorted(_values(item))}")
    return names, marker.kwargs.get("together", 2)


def _values(item: pytest.Function) -> Mapping[str, Hashable]:
    return {name: _hashable(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}


def _hashable(value: object) -> Hashable:
    """Return what tells a value apart from others: the value, or its id if it has no hash. All combinations share the values of a
    parameter."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def covering(given: Sequence[Combination], together: int = 2) -> set[int]:
    """Return the numbers of combinations that contain everything that all combinations contain `together` by `together`. In each turn, one
    of those combinations is chosen that contain most of what is missing. Their order is mixed, so that each value is chosen about as often
    as others."""

    def parts(combination: Combination) -> Iterator[tuple[tuple[int, Hashable], ...]]:
        return combinations(enumerate(combination), min(together, len(combination)))

    missing = {part for combination in given for part in parts(combination)}
    queue = [(-sum(1 for _ in parts(combination)), number * MIXED % 1, number) for number, combination in enumerate(given)]
    heapify(queue)
    chosen: set[int] = set()
    while missing:
        _, order, number = heappop(queue)
        new = missing.intersection(parts(given[number]))
        if not new:
            continue
        if queue and (-len(new), order) > queue[0][:2]:  # by now it contains less than another may contain
            heappush(queue, (-len(new), order, number))
            continue
        chosen.add(number)
        missing -= new
    return chosen
