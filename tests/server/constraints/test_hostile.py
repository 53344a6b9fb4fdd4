"""A client's constraint cannot delay other streams, exhaust the worker's memory or end the worker. Every constraint in the tables has its
expected outcome."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from server.constraints.compiler import ConstraintCompiler, ConstraintLimits
from server.engine.overlap import OverlappedEngine
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import Abort, Constraint, ConstraintKind, Failed, FromWorker, SamplingParams, Submit, Tokens, Trigger
from tests.doubles.model import NullModel
from tests.process_states import resident_bytes
from tests.server.constraints.hostile import CHOICES, EITHER, GRAMMARS, REFUSED, REGEXES, SCHEMAS

TOKENIZER = Path(__file__).parents[3] / "deploy" / "demo" / "model" / "tokenizer.json"
VOCAB = 2048
TRIGGER = 5
MAX_STEP_CPU_S = 0.05  # maximum CPU time of the engine's thread per step
MAX_GROWTH_BYTES = 32 << 20  # maximum growth of the worker's memory, over four constraints that expand to large automata
TABLES = {
    ConstraintKind.REGEX: REGEXES,
    ConstraintKind.JSON_SCHEMA: SCHEMAS,
    ConstraintKind.GRAMMAR: GRAMMARS,
    ConstraintKind.CHOICE: CHOICES,
}
ROWS = [pytest.param(kind, source, bound, id=f"{kind}: {name}") for kind, rows in TABLES.items() for name, source, bound in rows]


class Worker:
    """An engine that handles a hostile constraint together with a stream, and measures the slowest step."""

    def __init__(self) -> None:
        limits = ConstraintLimits(compile_s=1.0, excess_s=0.5)
        self.constraints = ConstraintCompiler(TOKENIZER.read_bytes, eos_ids=[0], vocab_size=VOCAB, limits=limits)
        self.told: dict[str, int] = {}
        self.failed: dict[str, Failed] = {}
        self.ended: set[str] = set()
        self.slowest_cpu_s = 0.0
        model = NullModel(StepLimits(VOCAB, max_context=4096, max_tokens=128, max_seqs=8, groups=(GroupLimits(2000),)))
        self.engine = OverlappedEngine(model, self._hear, eos_ids=(0,), constraints=self.constraints)

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, Failed):
            self.failed[message.request_id] = message
            self.ended.add(message.request_id)
        if isinstance(message, Tokens):
            for event in message.events:
                self.told[event.request_id] = self.told.get(event.request_id, 0) + len(event.token_ids)
                if event.finish_reason is not None:
                    self.ended.add(event.request_id)

    def step(self) -> None:
        began_s = time.thread_time()
        if not self.engine.step():
            time.sleep(0.001)
        self.slowest_cpu_s = max(self.slowest_cpu_s, time.thread_time() - began_s)


@pytest.fixture(scope="module")
def worker():
    one = Worker()
    yield one
    one.engine.close()
    one.constraints.close()


def submit_of(name: str, constraint: Constraint | None, max_tokens: int) -> Submit:
    return Submit(name, (5, 6, 7), SamplingParams(max_tokens=max_tokens, constraint=constraint, ignore_eos=True))


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize(("kind", "source", "bound"), ROWS)
def test_it_meets_its_bound_and_a_stream_beside_it_goes_on(request, worker, kind, source, bound) -> None:
    stream, hostile = f"stream {request.node.name}", f"hostile {request.node.name}"
    worker.slowest_cpu_s = 0.0
    worker.engine.submit(submit_of(stream, None, 4000))
    worker.engine.submit(submit_of(hostile, Constraint(kind, source), 12))
    end = time.monotonic() + 120
    while hostile not in worker.ended:
        assert time.monotonic() < end, f"{worker.told}"
        worker.step()
        time.sleep(0.001)  # leaves the core to the process that computes masks
        if stream in worker.ended:
            stream += "+"
            worker.engine.submit(submit_of(stream, None, 4000))
    worker.engine.abort(Abort(stream))
    while worker.engine.has_work:
        worker.step()
    assert worker.told[stream] > 0 or stream.endswith("+")
    assert worker.slowest_cpu_s < MAX_STEP_CPU_S
    failed = worker.failed.get(hostile)
    assert failed is None or failed.code == "invalid_schema", failed
    assert bound == EITHER or (bound == REFUSED) == (failed is not None), failed


@pytest.mark.parametrize("source", [GRAMMARS[0][1], "start: ("], ids=["heavy", "broken"])
def test_an_offer_that_is_hostile_is_free(worker, source) -> None:
    offer = Constraint(ConstraintKind.GRAMMAR, f"start: X\nX: /{REGEXES[0][1]}/", Trigger(TRIGGER), fallback=source)
    worker.engine.submit(submit_of("offer", offer, 12))
    while "offer" not in worker.ended:
        worker.step()
    assert "offer" not in worker.failed and worker.told.pop("offer") == 12
    worker.ended.discard("offer")


def test_the_worker_does_not_grow_with_them(worker) -> None:
    before_bytes = resident_bytes()
    for index in range(4):
        name = f"distinct {index}"
        worker.engine.submit(submit_of(name, Constraint(ConstraintKind.REGEX, f"(e{{1000}}){{{4000 + index}}}"), 12))
        while name not in worker.ended:
            worker.step()
    assert resident_bytes() - before_bytes < MAX_GROWTH_BYTES
