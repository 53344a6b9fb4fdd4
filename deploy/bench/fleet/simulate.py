"""Simulate a fleet: cells of replicas, an edge that distributes sessions over the cells, and failures of replicas and cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from deploy.bench.fleet.costs import Costs, CostsAt
from deploy.bench.fleet.policies import Cell
from deploy.bench.fleet.replica import Job, Replica
from deploy.bench.fleet.scaling import LOOK_S, Scaler
from deploy.bench.fleet.traces import Arrival, key_of
from deploy.bench.fleet.transfers import Network, Transfers
from deploy.ray.scaling import TARGET_REQUESTS


@dataclass(frozen=True, slots=True)
class Failure:
    """From `at_s` for `lasting_s` seconds, the first `num_replicas` replicas of a cell are away. They come back with empty caches, or are
    replaced if the number of replicas follows the load."""

    at_s: float
    lasting_s: float
    cell: int  # index of the cell
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet to simulate."""

    costs: Costs
    num_cells: int = 1
    num_replicas: int = 2  # replicas of each cell
    most_replicas: int = 0  # largest number of replicas of a cell, if their number follows the load; 0: it is fixed
    target_requests: float = TARGET_REQUESTS  # running and waiting requests per replica that the policy aims at
    policy: str = "prefix"  # one of POLICIES: how the router of a cell chooses a replica
    most_requests: int = 128  # a cell whose least loaded replica has so many is full: the edge takes another cell, or refuses
    failures: tuple[Failure, ...] = ()
    costs_at: CostsAt | None = None  # returns the costs at a time, if they change
    network: Network | None = None  # None: replicas give each other no pages
    num_prefill: int = 0  # replicas of each cell that only compute long prompts

    @property
    def cells(self) -> list[str]:
        return [f"cell {at}" for at in range(self.num_cells)]


@dataclass(slots=True)
class Outcome:
    """The result of a simulated fleet."""

    jobs: list[Job] = field(default_factory=list[Job])  # the admitted requests
    num_refused: int = 0  # requests that no cell took
    num_again: int = 0  # how often a request was sent to another replica, because its replica failed
    busy: list[list[tuple[float, float]]] = field(default_factory=list[list[tuple[float, float]]])  # spans of each replica's steps
    paid_s: float = 0.0  # seconds for which replicas are paid, summed over all of them; if their number is fixed, also while they are away
    wall_s: float = 0.0  # seconds from the beginning until the last request has ended

    @property
    def busy_s(self) -> float:
        """The seconds in which replicas computed, summed over all of them."""
        return sum(end_s - began_s for spans in self.busy for began_s, end_s in spans)


class Timeline:
    """Events other than arrivals, run in the order of their times."""

    def __init__(self) -> None:
        self._number = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(self, at_s: float, event: Callable[[float], None]) -> None:
        """Let an event happen at a time, which it gets as its argument."""
        heappush(self._events, (at_s, next(self._number), event))

    def run(self, until_s: float) -> None:
        """Run all events up to a time, also those that they add."""
        while self._events and self._events[0][0] <= until_s:
            now_s, _, event = heappop(self._events)
            event(now_s)


def simulate(plan: Plan, trace: Sequence[Arrival]) -> Outcome:
    """Let a fleet serve the requests of a trace, until all admitted ones have ended. A request whose replica fails is lost if no replica is
    up then."""
    size = max(plan.num_replicas, plan.most_replicas)
    cells = [
        Cell(
            name,
            [Replica(f"{name}, replica {at}", plan.costs, plan.costs_at) for at in range(size)],
            plan.policy,
            [Replica(f"{name}, prefill replica {at}", plan.costs, plan.costs_at) for at in range(plan.num_prefill)],
        )
        for name in plan.cells
    ]
    outcome, timeline, last_s = Outcome(), Timeline(), trace[-1].at_s if trace else 0.0
    scalers = [Scaler(cell, plan.num_replicas, plan.target_requests) for cell in cells] if plan.most_replicas else []

    def send(job: Job, now_s: float, most_requests: float) -> bool:
        """Send a job to a replica of the first cell that takes it. Return whether a cell took it."""
        cell = _cell_for(job, now_s, cells, most_requests)
        if cell is None:
            return False
        if plan.network is None:
            cell.choose(job.arrival).submit(job)
        else:
            transfers[cell.name].deliver(job, now_s)
        return True

    def again(job: Job, now_s: float) -> None:
        """Send a job to another replica, however many requests that replica has, because the fleet has admitted the job before. Without a
        replica that is up, the job is lost."""
        outcome.num_again += send(job, now_s, inf)

    network = plan.network
    transfers = {} if network is None else {cell.name: Transfers(cell, network, plan.costs, timeline.at, again) for cell in cells}

    def fail(failure: Failure, now_s: float) -> None:
        """Let the replicas of a failure go down, and send the requests that these replicas lose to other replicas."""
        cell = cells[failure.cell]
        cell.advance(now_s)
        gone = [replica for replica in cell.replicas[: failure.num_replicas] if replica.is_up]
        lost = [job for replica in gone for job in replica.fail()]
        cell.forget()
        if not scalers:  # where there are scalers, they start other replicas instead
            timeline.at(now_s + failure.lasting_s, lambda now_s: recover(cell, gone, now_s))
        for job in lost:
            again(job, now_s)

    def recover(cell: Cell, gone: Sequence[Replica], now_s: float) -> None:
        cell.advance(now_s)
        for replica in gone:
            replica.start()

    def look(now_s: float) -> None:
        for scaler in scalers:
            scaler.look(now_s)
        if now_s < last_s or any(replica.load for cell in cells for replica in cell.replicas):
            timeline.at(now_s + LOOK_S, look)

    for failure in plan.failures:
        timeline.at(failure.at_s, lambda now_s, failure=failure: fail(failure, now_s))
    if scalers:
        timeline.at(LOOK_S, look)
    for arrival in trace:
        timeline.run(arrival.at_s)
        job = Job(arrival)
        if send(job, arrival.at_s, plan.most_requests):
            outcome.jobs.append(job)
        else:
            outcome.num_refused += 1
    timeline.run(inf)
    for replica in (replica for cell in cells for replica in (*cell.replicas, *cell.prefill)):
        replica.finish()
        outcome.busy.append(replica.busy)
    outcome.wall_s = max((job.end_s or 0.0 for job in outcome.jobs), default=0.0)
    outcome.paid_s = sum(scaler.paid_s for scaler in scalers) if scalers else outcome.wall_s * plan.num_cells * plan.num_replicas
    outcome.paid_s += outcome.wall_s * plan.num_cells * plan.num_prefill
    return outcome


def _cell_for(job: Job, now_s: float, cells: Iterable[Cell], most_requests: float) -> Cell | None:
    """Return the first cell that is up and has a replica with fewer than `most_requests` requests, or None if there is none. Each session
    has an order of cells of its own, so that the prefixes of a session stay in one cell, and the sessions of a cell that fails are spread
    over all others. The clocks of the cells that are asked run up to now."""
    session = f"session {job.arrival.session}"
    for cell in sorted(cells, key=lambda cell: key_of(cell.name.encode(), session)):
        if not cell.is_up:
            continue
        cell.advance(now_s)
        if cell.least_load() < most_requests:
            return cell
    return None
