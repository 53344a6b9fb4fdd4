"""Measure a running fleet for the simulator: how long prompts, tokens and the way of a request take while others of its replicas are busy.

Replicas share the cores of this machine with each other, with Ray and with the clients. So each time is measured while one replica is busy,
while two are, and so on up to all: the others compute requests of the sizes that the trace has. It matters what they do, because two cores
of a virtual machine may be two threads of one core, on which prefill disturbs more than decoding. Times are those that clients see. A time
of the whole request consists of the step, and of a way (HTTP, proxy, ingress, processes that wake up).

Other work on this machine comes and goes, so `Calibration.add` is called several times between the runs that it is to explain. It measures
everything once or twice, in a random order. A cost is the mean of the middle half of its samples. Where three processes share two cores,
one waits while two run, and a median would be the time of those that run.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from deploy.bench.fleet.costs import NEAR, Costs
from deploy.bench.fleet.traces import Arrival
from tests.lab.serving.played import Answered, kept_busy, played

PROMPTS, STREAMS = (1, 16, 64, 128, 256), (1, 2, 4, 8, 16)  # measured sizes: tokens of a prompt, streams of a replica
LONG = 2 * PROMPTS[-1]  # tokens of a prompt that takes several steps
NUM_RUNS, NUM_NEW = 2, 24  # runs of a prompt in a pass; tokens of a measured stream
SHORT, NUM_SHORT, GAP_S = 16, 10, 0.3  # prompt tokens of the requests that measure the way, their number in a pass, and their mean distance
Thing = TypeVar("Thing")
_NEW_SESSIONS = count(-1, -1)  # no trace has these


@dataclass(frozen=True, slots=True)
class Measured:
    """`costs` and `ways_s` have an entry for each number of busy replicas, from one on. A way is what a request of one step took in
    addition to the step."""

    costs: Sequence[Costs]
    ways_s: Sequence[Sequence[float]]


@dataclass(slots=True)
class Calibration:
    """`url` is that of the fleet, `urls` those of its replicas' servers. Requests in the background have the sizes of those of `trace`."""

    url: str
    urls: Sequence[str]
    model: str
    trace: Sequence[Arrival]
    chance: random.Random = field(default_factory=lambda: random.Random(5))
    prompt_s: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))  # by busy replicas and size
    decode_s: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))  # by busy replicas and streams
    far_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # per token after a long prompt, by busy ones
    short_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # first token of short requests, likewise

    def add(self) -> None:
        asyncio.run(self._pass())

    async def _pass(self) -> None:
        for busy in self._mixed(range(1, len(self.urls) + 1)):
            first, *others = self._mixed(self.urls)[:busy]
            async with kept_busy(others, self.model, self.trace):
                for size in self._mixed((*PROMPTS, LONG) * NUM_RUNS):
                    (one,) = await self._ask([first], Arrival(0.0, 0, size, NUM_NEW if size == LONG else 1, ()))
                    self.prompt_s[busy, size].append(one.first_s)
                    if size == LONG:
                        self.far_s[busy].append(one.token_s)
                for num in self._mixed(STREAMS):
                    found = await self._ask([first], Arrival(0.0, 0, 4, NUM_NEW, ()), num)
                    self.decode_s[busy, num] += [one.token_s for one in found]
            async with kept_busy([self.url] * (busy - 1), self.model, self.trace):
                for _ in range(NUM_SHORT):
                    await asyncio.sleep(self.chance.expovariate(1 / GAP_S))
                    (one,) = await self._ask([self.url], Arrival(0.0, 0, SHORT, 1, ()))
                    self.short_s[busy].append(one.first_s)

    async def _ask(self, urls: Sequence[str], arrival: Arrival, num: int = 1) -> list[Answered]:
        """Send a request `num` times to each of several servers at once. No prompt has the beginning of an earlier one."""
        trace = [Arrival(0.0, next(_NEW_SESSIONS), arrival.num_prompt, arrival.num_new, ()) for _ in range(num * len(urls))]
        return await played(urls, self.model, trace)

    def _mixed(self, things: Sequence[Thing]) -> list[Thing]:
        return self.chance.sample(things, len(things))

    def measured(self, max_seqs: int) -> Measured:
        costs = [self._costs(busy, max_seqs) for busy in range(1, len(self.urls) + 1)]
        ways_s = [[max(0.0, s - one.step_s(SHORT, 0, 0)) for s in self.short_s[busy]] for busy, one in enumerate(costs, 1)]
        return Measured(costs, ways_s)

    def _costs(self, busy: int, max_seqs: int) -> Costs:
        decode = {num: middle(self.decode_s[busy, num]) for num in STREAMS}
        seen = {size: middle(self.prompt_s[busy, size]) for size in (*PROMPTS, LONG)}
        way_s = max(0.0, seen[1] - decode[1])  # a prompt of one token costs as much as a token of a stream
        prompt = rising({size: seen[size] - way_s for size in PROMPTS})
        half = PROMPTS[-1]
        pair_s = max(0.0, seen[LONG] - way_s - 2 * prompt[half]) / half**2
        context_s = max(0.0, middle(self.far_s[busy]) - decode[1]) / (LONG - NEAR)
        return Costs(prompt, rising(decode), context_s, pair_s, max_seqs=max_seqs)


def middle(samples: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    ranked = sorted(samples)
    out = len(ranked) // 4
    kept = ranked[out : len(ranked) - out]
    return sum(kept) / len(kept)


def rising(costs: Mapping[int, float]) -> dict[int, float]:
    """Return costs of which none is below that of a smaller size: only noise makes it so."""
    found, most = dict[int, float](), 0.0
    for size, seconds in costs.items():
        found[size] = most = max(most, seconds)
    return found
