"""Pages that travel between simulated replicas: from one that has more of a prompt, or from a prefill replica that computes it first.

The ingress decides as `deploy/ray/directory.py` and `deploy/ray/prefill.py` do, and the server as `server/engine/page_exchange.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.policies import Cell
from deploy.bench.fleet.replica import Job, Replica
from deploy.bench.fleet.traces import BLOCK_TOKENS
from deploy.ray.directory import LEAST_BLOCKS

LOOK_S = 0.005  # interval at which prefill replicas are asked whether they have computed a prompt

At = Callable[[float, Callable[[float], None]], None]  # lets an event happen at a time


@dataclass(frozen=True, slots=True)
class Network:
    """How pages travel."""

    rate_bytes: float  # per second, to one replica
    prefill_tokens: int = 2048  # of a prompt that no replica of the cell has, from which on a prefill replica computes it


@dataclass(slots=True, eq=False)
class Delivery:
    """A job on its way to a replica that takes pages first."""

    job: Job
    best: Replica
    num_here: int  # blocks of the prompt that the replica has
    part: Job | None = None  # what a prefill replica computes


class Transfers:
    """The deliveries to the replicas of one cell."""

    def __init__(self, cell: Cell, network: Network, costs: Costs, at: At) -> None:
        self._cell = cell
        self._network = network
        self._costs = costs
        self._at = at
        self._computing: list[Delivery] = []

    def deliver(self, job: Job, now_s: float) -> None:
        """Choose a replica, and submit the job to it once the pages that it takes have arrived."""
        cell, arrival = self._cell, job.arrival
        found = {replica: replica.prefixes.num_found(arrival.keys) for replica in cell.replicas if replica.is_up}
        best = cell.choose(arrival)
        best.num_coming += 1
        delivery, most = Delivery(job, best, found[best]), max(found.values())
        if cell.prefill and arrival.num_prompt - most * BLOCK_TOKENS >= self._network.prefill_tokens:
            delivery.part = Job(replace(arrival, num_new=1, keys_after=()))
            min(cell.prefill, key=lambda replica: replica.load).submit(delivery.part)
            self._computing.append(delivery)
            if len(self._computing) == 1:
                self._at(now_s + LOOK_S, self._look)
        elif most - found[best] >= LEAST_BLOCKS:
            self._send(delivery, most, now_s)
        else:
            self._arrive(delivery, delivery.num_here, now_s)

    def _look(self, now_s: float) -> None:
        self._cell.advance(now_s)
        computing, self._computing = self._computing, []
        for delivery in computing:
            if delivery.part is not None and delivery.part.end_s is not None and delivery.part.end_s <= now_s:
                self._send(delivery, len(delivery.job.arrival.keys), now_s)
            else:
                self._computing.append(delivery)
        if self._computing:
            self._at(now_s + LOOK_S, self._look)

    def _send(self, delivery: Delivery, num_blocks: int, now_s: float) -> None:
        """Let the blocks up to this one arrive, if that is faster than computing them."""
        num_tokens = (num_blocks - delivery.num_here) * BLOCK_TOKENS
        transfer_s = num_tokens * self._costs.token_bytes / self._network.rate_bytes
        if transfer_s < self._costs.prompt_s(num_tokens):
            self._at(now_s + transfer_s, lambda now_s: self._arrive(delivery, num_blocks, now_s))
        else:
            self._arrive(delivery, delivery.num_here, now_s)

    def _arrive(self, delivery: Delivery, num_blocks: int, now_s: float) -> None:
        cell, taker = self._cell, delivery.best
        taker.num_coming -= 1
        cell.advance(now_s)
        if taker.is_up:
            taker.prefixes.use(delivery.job.arrival.keys[:num_blocks], now_s)
        elif cell.is_up:
            taker = cell.choose(delivery.job.arrival)
        taker.submit(delivery.job)
