"""A simulated replica: a model of the scheduler with a clock of its own. It simulates a step much faster than a replica computes it.

It decides how many prompt tokens a step takes with the real pace (`server/engine/scheduling/pace.py`), admits in the order of arrival, and
forgets the prefix that was used least recently. Consecutive steps that only decode are simulated at once, up to the next end or arrival of
a request. The model leaves out preemption (a sequence is admitted when its prompt and its answer fit), priorities, fairness between several
keys, and the host's time between steps. `tests/deploy/bench/fleet/test_replica.py` compares the model with the real scheduler.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from deploy.bench.fleet.costs import Costs, CostsAt, constant
from deploy.bench.fleet.traces import BLOCK_TOKENS, Arrival
from server.engine.scheduling.pace import Measured, Pace
from server.load_settings import MAX_GAP_MS


@dataclass(slots=True, eq=False)
class Job:
    """One request, from its arrival at the fleet to its end."""

    arrival: Arrival
    first_s: float | None = None  # time of the first token
    end_s: float | None = None  # time of the last token; None: the request has not ended
    num_cached: int = 0  # prompt tokens that a prefix cache had when the request was first admitted
    num_sent: int = 0  # how many times the request was sent to a replica
    left: int = 0  # prompt tokens that the present replica has not computed


class Prefixes:
    """The prefix cache: keys of blocks, the least recently used first."""

    def __init__(self) -> None:
        self.kept_since_s = 0.0  # latest time at which a block that has since been evicted was stored; 0: no block was evicted
        self._stored_s: OrderedDict[bytes, float] = OrderedDict()

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning of a prompt the cache has."""
        return next((at for at, key in enumerate(keys) if key not in self._stored_s), len(keys))

    def use(self, keys: Sequence[bytes], now_s: float) -> None:
        """Store the blocks that are missing, and let all of them be the most recently used."""
        for key in reversed(keys):  # the beginnings are used last, because other prompts may share them
            self._stored_s.setdefault(key, now_s)
            self._stored_s.move_to_end(key)

    def shrink(self, most: int) -> None:
        """Evict the least recently used blocks until at most `most` are left."""
        while len(self._stored_s) > most:
            self.kept_since_s = max(self.kept_since_s, self._stored_s.popitem(last=False)[1])


class Replica:
    """A simulated replica, whose clock is `now_s`. `costs_at` returns the costs at a time, if they change, as on a machine that replicas
    share. The limits of the replica are those of `costs` at any time."""

    def __init__(self, name: str, costs: Costs, costs_at: CostsAt | None = None) -> None:
        self.name = name
        self.now_s = 0.0
        self.is_up = True
        self.waiting: deque[Job] = deque()
        self.busy: list[tuple[float, float]] = []  # begin and end of each span of time in which the replica computed
        self.num_coming = 0  # jobs that will be submitted here when their pages have arrived
        self._costs = costs
        self._costs_at = costs_at or constant(costs)
        self._restart()

    def _restart(self) -> None:
        """Begin without jobs and with an empty cache."""
        self._pace = Pace(self._costs.max_tokens, Measured(self._costs.prompt), MAX_GAP_MS / 1000)
        self.prefixes = Prefixes()
        self._prompts: list[Job] = []  # admitted jobs whose prompts are not computed yet
        self._decoding: list[tuple[int, int, Job]] = []  # a heap of (decoding step in which the job ends, order of beginning, job)
        self._num_steps = self._num_begun = 0  # number of decoding steps; number of jobs that have begun to decode
        self._num_context = self._num_held = 0  # tokens of context of all decoding jobs; tokens for which pages are reserved

    @property
    def num_requests(self) -> int:
        """The number of jobs that were submitted and have not ended."""
        return len(self.waiting) + len(self._prompts) + len(self._decoding)

    @property
    def load(self) -> int:
        """The number of requests that the router counts as the load of this replica."""
        return self.num_requests + self.num_coming

    @property
    def pages_share(self) -> float:
        """The share of pages that running requests hold."""
        return self._num_held / self._costs.capacity

    def start(self) -> None:
        """Begin to serve, with an empty cache."""
        assert not self.num_requests
        self._restart()
        self.is_up = True

    def submit(self, job: Job) -> None:
        """Let a job wait until it is admitted."""
        job.num_sent += 1
        self.waiting.append(job)

    def drop(self, job: Job) -> None:
        """Take back a job that nobody waits for any more. If its prompt is computed already, do nothing: the job goes on."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self._prompts:
            self._prompts.remove(job)
            self._num_held -= job.arrival.num_prompt + job.arrival.num_new

    def fail(self) -> list[Job]:
        """Stop serving, and lose the cache and all jobs. Return the jobs that have not ended."""
        lost = [*self.waiting, *self._prompts, *(job for _, _, job in self._decoding)]
        self.waiting.clear()
        self.is_up = False
        self._restart()
        return lost

    def advance(self, until_s: float) -> None:
        """Run all steps that begin before a time, and let the clock run at least up to this time."""
        while self.now_s < until_s and self.num_requests:
            self._admit()
            self._step(until_s)
        self.now_s = max(self.now_s, until_s)

    def finish(self) -> None:
        """Run steps until all jobs have ended."""
        while self.num_requests:
            self._admit()
            self._step(float("inf"))

    def _admit(self) -> None:
        """Admit waiting jobs in their order, as long as the batch has places and their prompts and answers fit into the memory. A job that
        does not fit into the whole memory is admitted when it is alone."""
        costs = self._costs
        while self.waiting and len(self._prompts) + len(self._decoding) < costs.max_seqs:
            job = self.waiting[0]
            arrival = job.arrival
            size = arrival.num_prompt + arrival.num_new
            if self._num_held + size > costs.capacity and self._num_held:
                return
            self.waiting.popleft()
            found = self.prefixes.num_found(arrival.keys)
            num_cached = min(found * BLOCK_TOKENS, arrival.num_prompt - 1)
            if job.num_sent == 1:
                job.num_cached = num_cached
            self.prefixes.use(arrival.keys[:found], self.now_s)
            job.left = arrival.num_prompt - num_cached
            self._num_held += size
            self._prompts.append(job)
            self._shrink()

    def _shrink(self) -> None:
        """Evict blocks of the prefix cache for which running jobs leave no pages."""
        self.prefixes.shrink(max(0, self._costs.capacity - self._num_held) // BLOCK_TOKENS)

    def _step(self, until_s: float) -> None:
        """Take a step with as many prompt tokens as the pace allows and one token of each decoding job. Without prompts, take all steps up
        to the next event: see `_decode`."""
        num_decode = len(self._decoding)
        budget, done = self._pace.prefill_budget(num_decode) if self._prompts else 0, list[Job]()
        num_prompt = num_pairs = 0
        for job in self._prompts:
            if num_prompt >= budget:
                break
            count = min(job.left, budget - num_prompt)
            num_pairs += count * (job.arrival.num_prompt - job.left)
            job.left -= count
            num_prompt += count
            if not job.left:
                done.append(job)
        if num_prompt:
            num_steps = 1
            self._compute(self._duration_s(num_prompt, num_decode, num_pairs))
        else:
            num_steps = self._decode(until_s)
        if num_decode:
            self._num_steps += num_steps
            self._num_context += num_steps * num_decode
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._decoding)[2])
        for job in done:
            self._prompts.remove(job)
            self._begin(job)

    def _duration_s(self, num_prompt: int, num_decode: int, num_pairs: int) -> float:
        """Return how many seconds a step takes. If the costs change during the step, the part of the step that is left continues at the new
        costs."""
        left, end_s = 1.0, self.now_s
        while True:
            costs, holds_until_s = self._costs_at(end_s)
            whole_s = costs.step_s(num_prompt, num_decode, self._num_context, num_pairs)
            if end_s + left * whole_s <= holds_until_s:
                return end_s + left * whole_s - self.now_s
            left -= (holds_until_s - end_s) / whole_s
            end_s = holds_until_s

    def _decode(self, until_s: float) -> int:
        """Take decoding steps until a sequence ends, a request arrives or the costs change. Return the number of steps. The step in which
        the costs change is taken alone."""
        num_decode = len(self._decoding)
        costs, holds_until_s = self._costs_at(self.now_s)
        # the time of the next step, and how much longer each step takes than the one before
        step_s, longer_s = costs.step_s(0, num_decode, self._num_context), costs.context_s * num_decode
        num_steps = self._decoding[0][0] - self._num_steps
        if until_s < inf:
            num_steps = min(num_steps, ceil((until_s - self.now_s) / step_s))
        if holds_until_s < inf:
            num_steps = min(num_steps, floor((holds_until_s - self.now_s) / (step_s + longer_s * max(0, num_steps - 1))))
        if num_steps <= 1:
            self._compute(self._duration_s(0, num_decode, 0))
            return 1
        self._compute(num_steps * (step_s + longer_s * (num_steps - 1) / 2))
        return num_steps

    def _compute(self, seconds: float) -> None:
        """Let the clock run while the replica computes, and record this time in `busy`. Spans without a gap are joined."""
        began_s = self.busy.pop()[0] if self.busy and self.busy[-1][1] == self.now_s else self.now_s
        self.now_s += seconds
        self.busy.append((began_s, self.now_s))

    def _begin(self, job: Job) -> None:
        """Record a job's first token: its prompt is computed. The job then decodes, or ends if its answer has one token."""
        arrival = job.arrival
        if job.first_s is None:
            job.first_s = self.now_s
        self.prefixes.use(arrival.keys, self.now_s)
        self._num_context += arrival.num_prompt
        if arrival.num_new == 1:
            self._end(job)
            return
        self._num_begun += 1
        heapq.heappush(self._decoding, (self._num_steps + arrival.num_new - 1, self._num_begun, job))
        self._shrink()

    def _end(self, job: Job) -> None:
        """Record a job's last token and free its pages. The prefix cache keeps its blocks, with those of its answer if the job has keys for
        them."""
        arrival = job.arrival
        job.end_s = self.now_s
        self._num_context -= arrival.num_prompt + arrival.num_new - 1
        self._num_held -= arrival.num_prompt + arrival.num_new
        self.prefixes.use(arrival.keys_after, self.now_s)
        self._shrink()
