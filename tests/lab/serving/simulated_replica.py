"""`python -m tests.lab simulated-replica`: how well the simulator predicts one replica of a model, on a machine that does other work too.

The engine runs in this process with one thread, and its clock is the processor time of that thread. Requests arrive by this clock. While
the engine has no request, the clock jumps to the next arrival. The costs of steps are measured by the same clock, and the same trace is
simulated. So other processes change a figure only through the caches that they share. The simulator leaves out the host's work between
steps, which is in the measured times per token.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

from deploy import demo
from deploy.bench.checkpoint import model_folder
from deploy.bench.fleet.costs import Costs, measure
from deploy.bench.fleet.figures import first_s, token_s
from deploy.bench.fleet.replica import Job, Replica
from deploy.bench.fleet.traces import TRACES, Arrival, Shape
from deploy.bench.measure import Figure, report
from deploy.model_loading.load import load_model
from runtime import flags
from server.engine.overlap import OverlappedEngine
from server.engine.worker import LoadedModel
from server.messages import Failed, FromWorker, Load, SamplingParams, Submit, Tokens
from tests.lab.serving.played import Answered, ids_of
from tests.lab.serving.simulation import figures_of_times

SPARE_S = 1e-6  # the clock passes an arrival by this much


class Played:
    """The engine on a clock that only this thread's work and jumps advance."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.step_model is not None, "a model that generates no tokens"
        self._jumped_s = -time.thread_time()
        self._ended_s = 0.0  # end of the last step, whose tokens the engine publishes during the next one
        self._first_s, self._end_s, self._num_tokens = dict[int, float](), dict[int, float](), Counter[int]()
        self._engine = OverlappedEngine(loaded.step_model, self._hear, eos_ids=loaded.eos_ids, pace=loaded.pace, clock=time.thread_time)

    @property
    def now_s(self) -> float:
        return time.thread_time() + self._jumped_s

    def run(self, trace: Sequence[Arrival]) -> list[Answered]:
        coming = list(enumerate(trace))[::-1]
        while coming or self._engine.has_work:
            while coming and coming[-1][1].at_s <= self.now_s:
                number, arrival = coming.pop()
                params = SamplingParams(arrival.num_new, temperature=0.0, ignore_eos=True)
                self._engine.submit(Submit(str(number), tuple(ids_of(arrival)), params))
            if self._engine.has_work:
                self._engine.step()
                self._ended_s = self.now_s
            else:
                self._jumped_s += coming[-1][1].at_s - self.now_s + SPARE_S
        self._engine.close()
        return [
            Answered(self._first_s[at] - arrival.at_s, self._end_s[at] - arrival.at_s, self._num_tokens[at], 0)
            for at, arrival in enumerate(trace)
        ]

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, Failed):
            raise RuntimeError(f"request {message.request_id} failed: {message.message}")
        if isinstance(message, Tokens):
            for event in message.events:
                self._first_s.setdefault(int(event.request_id), self._ended_s)
                self._end_s[int(event.request_id)] = self._ended_s
                self._num_tokens[int(event.request_id)] += len(event.token_ids)


def simulated(costs: Costs, trace: Sequence[Arrival]) -> list[Job]:
    replica, jobs = Replica("one", costs), [Job(arrival) for arrival in trace]
    for job in jobs:
        replica.advance(job.arrival.at_s)
        replica.submit(job)
    replica.finish()
    return jobs


def figures_of(trace: Sequence[Arrival], answers: Sequence[Answered], costs: Costs) -> list[Figure]:
    jobs = simulated(costs, trace)
    return figures_of_times([[first_s(job) for job in jobs]], [[token_s(job) for job in jobs]], [answers])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab simulated-replica", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=demo.NAME, help="the demo model, or a path or name")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second of the engine's clock")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--most", type=int, default=1000, help="tokens of a prompt and its answer; longer requests are left out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    made = TRACES["poisson"](Shape(options.rate, options.seconds, options.prompt, options.new, seed=1))
    trace = [one for one in made if one.num_prompt + one.num_new <= options.most]
    with flags.scope(threads=1), model_folder(options.model) as folder:
        loaded = load_model(Load("bench", str(folder)), lambda _stage, _fraction: None)
        assert loaded.step_model is not None, f"--model is {options.model}, which generates no tokens"
        costs = measure(loaded.step_model, time.thread_time)
        answers = Played(loaded).run(trace)
    report(figures_of(trace, answers, costs), as_json=options.json)
