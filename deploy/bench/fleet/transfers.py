"""Pages that travel between simulated replicas: from one that has more of a prompt, or from a prefill replica that computes it first.

The simulated ingress decides as `deploy/ray/directory.py` and `deploy/ray/prefill.py` do, and the simulated server as
`server/engine/page_exchange.py` does. A replica takes part in one transfer at a time, as the taker or the giver of pages, at the full rate:
if several transfers shared the rate, all would end later. The simulation leaves out pages that the giver evicts meanwhile, and the time
between two steps for which a giver waits before it reads more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.policies import Cell
from deploy.bench.fleet.replica import Job, Replica
from deploy.bench.fleet.traces import BLOCK_TOKENS
from deploy.ray.directory import LEAST_BLOCKS
from deploy.ray.prefill import pays
from server.engine.page_exchange import MOST_TRANSFERS
from server.peers.wire import MOST_GIVINGS

LOOK_S = 0.005  # interval at which prefill replicas are asked whether they have computed a prompt

At = Callable[[float, Callable[[float], None]], None]  # lets an event happen at a time
Again = Callable[[Job, float], None]  # sends a job to another replica


@dataclass(frozen=True, slots=True)
class Network:
    """How pages travel."""

    rate_bytes: float  # bytes per second that a replica can receive, and that it can send
    prefill_tokens: int = 2048  # least number of prompt tokens, in no replica's cache, for which a prefill replica computes the prompt
    patience_s: float = 2.0  # seconds that a request waits for pages beyond the time of computing them: `peer_patience_s` of servers


@dataclass(slots=True, eq=False)
class Delivery:
    """A job on its way to a replica that takes pages first."""

    job: Job
    taker: Replica
    giver: Replica
    num_here: int  # blocks of the prompt that the taker has
    num_there: int  # blocks that the giver has, or will have
    limit_s: float  # time after which the taker waits no longer
    part: Job | None = None  # the job of the prefill replica: compute the prompt


class Transfers:
    """The deliveries to the replicas of one cell."""

    def __init__(self, cell: Cell, network: Network, costs: Costs, at: At, again: Again) -> None:
        """`at` lets an event happen at a time. `again` gets the jobs whose replica was lost while they waited for pages."""
        self._cell = cell
        self._network = network
        self._costs = costs
        self._at = at
        self._again = again
        self._computing: list[Delivery] = []
        self._num_taking, self._num_giving = Counter[Replica](), Counter[Replica]()  # transfers of each replica, with those that wait
        self._free_s: dict[Replica, float] = {}  # when the last transfer of a replica ends

    def deliver(self, job: Job, now_s: float) -> None:
        """Choose a replica, and submit the job to it once the pages that it takes have arrived, at once if it takes none. If computing the
        prompt on a prefill replica pays, the replica takes the pages from there, else from the replica that has most of the prompt."""
        cell, arrival = self._cell, job.arrival
        found = {replica: replica.prefixes.num_found(arrival.keys) for replica in cell.replicas if replica.is_up}
        taker, owner = cell.choose(arrival), max(found, key=found.__getitem__)
        num_here, most, num_all = found[taker], found[owner], len(arrival.keys)
        if cell.prefill and arrival.num_prompt - most * BLOCK_TOKENS >= self._network.prefill_tokens:
            giver = min(cell.prefill, key=lambda replica: replica.load)
            if pays(num_all - giver.prefixes.num_found(arrival.keys), num_all - most):
                delivery = self._asked(job, taker, giver, num_here, num_all, now_s, computes=True)
                if delivery is not None:
                    delivery.part = Job(replace(arrival, num_new=1, keys_after=()))
                    giver.submit(delivery.part)
                    self._computing.append(delivery)
                    if len(self._computing) == 1:
                        self._at(now_s + LOOK_S, self._look)
                else:
                    taker.submit(job)
                return
        delivery = self._asked(job, taker, owner, num_here, most, now_s) if most - num_here >= LEAST_BLOCKS else None
        if delivery is None:
            taker.submit(job)
        else:
            self._send(delivery, now_s)

    def _asked(
        self, job: Job, taker: Replica, giver: Replica, num_here: int, num_there: int, now_s: float, *, computes: bool = False
    ) -> Delivery | None:
        """Return a delivery and count it, or None if computing the tokens is faster than fetching their pages, or if the taker or the giver
        has too many transfers. `computes`: the giver computes the pages first, for which the taker also waits."""
        num_tokens = (num_there - num_here) * BLOCK_TOKENS
        computing_s = self._costs.prompt_s(num_tokens)
        is_slow = num_tokens * self._costs.token_bytes > computing_s * self._network.rate_bytes
        if is_slow or self._num_taking[taker] >= MOST_TRANSFERS or self._num_giving[giver] >= MOST_GIVINGS:
            return None
        taker.num_coming += 1
        self._num_taking[taker] += 1
        limit_s = now_s + self._network.patience_s + computing_s * (1 + computes)
        return Delivery(job, taker, giver, num_here, num_there, limit_s)

    def _look(self, now_s: float) -> None:
        """Send the pages of prompts that prefill replicas have computed, and give up the prompts that are late: the jobs that wait for them
        go on without pages. While prompts are left, look again after LOOK_S."""
        self._cell.advance(now_s)
        computing, self._computing = self._computing, []
        for delivery in computing:
            part = delivery.part
            if part is not None and part.end_s is not None and part.end_s <= now_s:
                self._send(delivery, now_s)
            elif part is not None and now_s >= delivery.limit_s:
                delivery.giver.drop(part)
                self._arrive(delivery, delivery.num_here, now_s)
            else:
                self._computing.append(delivery)
        if self._computing:
            self._at(now_s + LOOK_S, self._look)

    def _send(self, delivery: Delivery, now_s: float) -> None:
        """Begin a transfer when the taker and the giver are free. It ends when all blocks have arrived, or at the delivery's `limit_s`. The
        job then reaches the taker with the blocks that have arrived."""
        taker, giver, rate = delivery.taker, delivery.giver, self._network.rate_bytes
        self._num_giving[giver] += 1
        block_s = BLOCK_TOKENS * self._costs.token_bytes / rate
        begin_s = min(max(now_s, self._free_s.get(taker, 0.0), self._free_s.get(giver, 0.0)), delivery.limit_s)
        wanted, most = delivery.num_there - delivery.num_here, int((delivery.limit_s - begin_s) / block_s)
        end_s = begin_s + wanted * block_s if wanted <= most else delivery.limit_s
        if end_s > begin_s:
            self._free_s[taker] = self._free_s[giver] = end_s

        def ended(now_s: float) -> None:
            self._num_giving[giver] -= 1
            self._arrive(delivery, delivery.num_here + min(wanted, most) if giver.is_up else delivery.num_here, now_s)

        self._at(max(end_s, now_s), ended)

    def _arrive(self, delivery: Delivery, num_blocks: int, now_s: float) -> None:
        """End a delivery: the taker has the first `num_blocks` blocks of the prompt and gets the job. If the taker is down, `again` gets
        the job."""
        taker = delivery.taker
        taker.num_coming -= 1
        self._num_taking[taker] -= 1
        self._cell.advance(now_s)
        if taker.is_up:
            taker.prefixes.use(delivery.job.arrival.keys[:num_blocks], now_s)
            taker.submit(delivery.job)
        else:
            self._again(delivery.job, now_s)
