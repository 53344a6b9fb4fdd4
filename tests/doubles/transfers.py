"""Transfers of pages between two engines of this process, without sockets."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial

from server.engine.loop import Engine
from server.engine.page_exchange import PageExchange
from server.engine.step_model import StepModel
from server.messages import FromWorker, GivePages, PagesGiven, Peering
from server.peers.named import Giver
from server.peers.taking import Arrival, Transfer
from server.peers.wire import Ask, Proofs

PEERING = Peering("a secret of tests", 1e18, 600.0, 0.0)  # a busy machine must not make a transfer too late
GIVER = Giver("127.0.0.1", 1)
Change = Callable[[list[Arrival]], list[Arrival]]


class LocalTransfer(Transfer):
    """A transfer whose whole answer has arrived when it begins. `change` takes what the giver has sent, and returns what arrives."""

    def __init__(self, giver: Giver, ask: Ask, proofs: Proofs, *, answer: Callable[[Ask], list[Arrival]], change: Change) -> None:
        super().__init__(giver, ask, proofs)
        self._arriving = partial(answer, ask)
        self._change = change

    def begin(self) -> None:
        self.end_s = float("inf")
        self.arrivals = queue.Queue()
        for arrival in self._change(self._arriving()):
            self.arrivals.put(arrival)


def giving_of(model: StepModel, engine: Engine) -> Callable[[Ask], list[Arrival]]:
    """Return a function that answers an Ask as a server would whose worker has this engine."""

    def answer(ask: Ask) -> list[Arrival]:
        sent: list[FromWorker] = []
        exchange = PageExchange(model, engine.scheduler, sent.append, peering=PEERING, fingerprint="")
        exchange.give(GivePages("give", ask.digests, ask.num_held, 1))
        while exchange.is_giving:
            exchange.more("give")
            exchange.work()
        given = [message for message in sent if isinstance(message, PagesGiven)]
        assert given[0].offer is not None and not given[-1].data
        return [given[0].offer, *(one.data for one in given[1:-1]), None]

    return answer


def exchange_with(
    model: StepModel, engine: Engine, change: Change = lambda arrivals: arrivals, peering: Peering = PEERING
) -> Callable[..., PageExchange]:
    """Return a function that makes the exchange of an engine which takes pages from the given one."""
    transfer_of = partial(LocalTransfer, answer=giving_of(model, engine), change=change)
    return partial(PageExchange, peering=peering, fingerprint="same", transfer_of=transfer_of)
