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

LOOK_S = 0.005  # interval at which a prefill replica is asked whether a prompt is computed

At = Callable[[float, Callable[[float], None]], None]  # lets an event happen at a time


@dataclass(frozen=True, slots=True)
class Network:
    """How pages travel."""

    rate_bytes: float  # per second, to one replica
    prefill_tokens: int = 2048  # of a prompt that no replica of the cell has, from which on a prefill replica computes it


def deliver(job: Job, now_s: float, cell: Cell, best: Replica, *, network: Network, costs: Costs, at: At) -> None:
    """Submit a job to a replica, after the pages that it takes have arrived."""
    arrival = job.arrival
    here = best.prefixes.num_found(arrival.keys)
    others = [other.prefixes.num_found(arrival.keys) for other in cell.replicas if other.is_up and other is not best]
    most = max(here, *others) if others else here
    num_new = arrival.num_prompt - most * BLOCK_TOKENS
    best.num_coming += 1

    def arrive(num_blocks: int, now_s: float) -> None:
        best.num_coming -= 1
        cell.advance(now_s)
        taker = best
        if best.is_up:
            best.prefixes.use(arrival.keys[:num_blocks], now_s)
        elif cell.is_up:
            taker = cell.choose(arrival)
        taker.submit(job)

    def send(num_blocks: int, now_s: float) -> None:
        """Let the blocks up to this one arrive, if that is faster than computing them."""
        num_tokens = (num_blocks - here) * BLOCK_TOKENS
        transfer_s = num_tokens * costs.token_bytes / network.rate_bytes
        if transfer_s < costs.prompt_s(num_tokens):
            at(now_s + transfer_s, lambda now_s: arrive(num_blocks, now_s))
        else:
            arrive(here, now_s)

    if cell.prefill and num_new >= network.prefill_tokens:
        helper = min(cell.prefill, key=lambda replica: replica.load)
        part = Job(replace(arrival, num_new=1, keys_after=()))
        helper.submit(part)

        def look(now_s: float) -> None:
            cell.advance(now_s)
            if part.end_s is None or part.end_s > now_s:
                at(now_s + LOOK_S, look)
            else:
                send(len(arrival.keys), now_s)

        at(now_s + LOOK_S, look)
    elif most - here >= LEAST_BLOCKS:
        send(most, now_s)
    else:
        arrive(here, now_s)
