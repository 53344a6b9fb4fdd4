"""Simulate a fleet: cells of replicas, an edge that distributes sessions over the cells, and failures of replicas and cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.policies import Cell
from deploy.bench.fleet.replica import Job, Replica
from deploy.bench.fleet.traces import Arrival, key_of


@dataclass(frozen=True, slots=True)
class Failure:
    """From `at_s` for `lasting_s` seconds, the first `num_replicas` replicas of a cell are away. They come back with empty caches."""

    at_s: float
    lasting_s: float
    cell: int
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet to simulate."""

    costs: Costs
    num_cells: int = 1
    num_replicas: int = 2  # of each cell
    policy: str = "prefix"
    most_requests: int = 128  # of the least loaded replica of a cell; the edge then takes another cell, and refuses if there is none
    failures: tuple[Failure, ...] = ()


@dataclass(slots=True)
class Outcome:
    jobs: list[Job] = field(default_factory=list[Job])  # those that were admitted
    num_refused: int = 0
    num_again: int = 0  # requests that were sent again, because a replica failed
    busy_s: float = 0.0  # of all replicas together
    wall_s: float = 0.0  # until the last end


def simulate(plan: Plan, trace: Sequence[Arrival]) -> Outcome:
    cells = [
        Cell(f"cell {at}", [Replica(f"cell {at}, replica {number}", plan.costs) for number in range(plan.num_replicas)], plan.policy)
        for at in range(plan.num_cells)
    ]
    outcome, number = Outcome(), count()
    events: list[tuple[float, int, Failure | tuple[Failure, list[Replica]]]] = []
    for failure in plan.failures:
        heappush(events, (failure.at_s, next(number), failure))

    def happen(until_s: float) -> None:
        """Let replicas fail and come back up to a time."""
        while events and events[0][0] <= until_s:
            now_s, _, event = heappop(events)
            if isinstance(event, Failure):
                cell = cells[event.cell]
                cell.advance(now_s)
                gone = [replica for replica in cell.replicas[: event.num_replicas] if replica.is_up]
                lost = [job for replica in gone for job in replica.fail()]
                cell.forget()
                heappush(events, (now_s + event.lasting_s, next(number), (event, gone)))
                outcome.num_again += len(lost)
                for job in lost:
                    _send(job, now_s, cells, inf)  # it was admitted once
            else:
                cells[event[0].cell].advance(now_s)
                for replica in event[1]:
                    replica.is_up = True

    for arrival in trace:
        happen(arrival.at_s)
        job = Job(arrival)
        if _send(job, arrival.at_s, cells, plan.most_requests):
            outcome.jobs.append(job)
        else:
            outcome.num_refused += 1
    happen(inf)
    for replica in (replica for cell in cells for replica in cell.replicas):
        replica.finish()
        outcome.busy_s += replica.busy_s
    outcome.wall_s = max((job.end_s or 0.0 for job in outcome.jobs), default=0.0)
    return outcome


def _send(job: Job, now_s: float, cells: Iterable[Cell], most_requests: float) -> bool:
    """Send a job to a replica of the first cell that takes it. The order of cells is the session's own, so that its prefixes stay in one
    cell, and the sessions of a cell that fails are spread over all others. Return whether a cell took it."""
    session = f"session {job.arrival.session}"
    for cell in sorted(cells, key=lambda cell: key_of(cell.name.encode(), session)):
        if not cell.is_up:
            continue
        cell.advance(now_s)
        if cell.least_load() < most_requests:
            cell.choose(job.arrival).submit(job)
            return True
    return False
