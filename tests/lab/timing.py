"""Time runs on a shared machine: the best of several, or several by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def best_s(run: Callable[[], object], *, seconds: float = 1.0, most: int = 50) -> float:
    """Run `run` repeatedly for `seconds`, but at least three and at most `most` times, and return the shortest time in seconds. A first run
    does not count. On a shared machine, longer times include interruptions by other programs."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < most):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def by_turns(runs: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Time each of the runs once per round, and return their times in seconds by name, one per round. The speed of a shared machine can
    change by more than half from second to second; in rounds, these changes affect all runs alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if number:  # do not count the first round, which touches memory that is not mapped yet
                times[name].append(time.perf_counter() - started)
    return times
