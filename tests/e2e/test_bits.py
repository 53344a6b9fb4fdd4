"""On compiled models, tokens and log-probabilities depend only on the request, to the last bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from deploy import demo
from deploy.model_loading.load import load_model
from runtime import flags
from server.constraints.compiler import ConstraintCompiler
from server.engine.overlap import OverlappedEngine
from server.engine.page_exchange import ExchangeOf
from server.engine.step_model import GroupLimits, StepLimits, StepModel
from server.engine.worker import LoadedModel
from server.messages import Constraint, ConstraintKind, FromWorker, Load, SamplingParams, Submit, TokenLogprob, Tokens

pytestmark = pytest.mark.xdist_group("bits of the demo")  # the tests of this group share two compiled models and the expected results

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
CONSTRAINTS = (
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Constraint(ConstraintKind.REGEX, "The [a-z]{3,8} is (red|green|blue)\\."),
    Constraint(ConstraintKind.CHOICE, '["Paris", "Rome", "Madrid (Spain)"]'),
)


@dataclass
class Outcome:
    """Everything that the engine sent for one of a request's answers ("choices")."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    end: tuple[str, int | None] | None = None


Outcomes = dict[tuple[str, int], Outcome]


class Limited:
    """A model with narrower limits than the compiled model. The engine sees only the narrower limits."""

    def __init__(self, model: StepModel, limits: StepLimits) -> None:
        self.limits = limits
        self._model = model

    def __getattr__(self, name: str):
        return getattr(self._model, name)


class Rig:
    """A new engine. All engines share one compiled model."""

    def __init__(
        self, loaded: LoadedModel, constraints: ConstraintCompiler | None, *, exchange: ExchangeOf | None = None, **narrower: Any
    ) -> None:
        assert loaded.step_model is not None
        limits = loaded.step_model.limits
        narrow = StepLimits(**{name: narrower.get(name, getattr(limits, name)) for name in StepLimits.__slots__})
        self.outcomes: Outcomes = {}
        self.engine = OverlappedEngine(
            Limited(loaded.step_model, narrow), self.hear, eos_ids=loaded.eos_ids, constraints=constraints, exchange=exchange
        )

    def hear(self, message: FromWorker) -> None:
        for event in message.events if isinstance(message, Tokens) else ():
            outcome = self.outcomes.setdefault((event.request_id, event.choice), Outcome())
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            outcome.prompt_logprobs = outcome.prompt_logprobs or event.prompt_logprobs
            if event.finish_reason is not None:
                outcome.end = event.finish_reason, event.stop_token_id

    def run(self, submits: list[Submit], *, per_step: int = 1_000_000) -> Outcomes:
        self.outcomes = {}
        arriving = list(submits)
        while arriving or self.engine.has_work:
            for submit in arriving[:per_step]:
                self.engine.submit(submit)
            del arriving[:per_step]
            self.engine.step()
        self.engine.check_integrity()
        assert self.engine.scheduler.pool.num_used == 0
        return self.outcomes


@pytest.fixture(scope="module")
def load() -> Callable[..., LoadedModel]:
    def load(quantize: str, **switches: int) -> LoadedModel:
        with flags.scope(**switches):
            return load_model(
                Load("demo", str(demo.MODEL), quantize, max_batch=32, kv_cache_bytes=64 << 20), lambda _stage, _fraction: None
            )

    return load


@pytest.fixture(scope="module", params=["bf16", "int8"])
def model(request: pytest.FixtureRequest, load: Callable[..., LoadedModel]) -> LoadedModel:
    return load(request.param)


@pytest.fixture(scope="module")
def constraints(model: LoadedModel):
    assert model.read_tokenizer is not None and model.step_model is not None
    compiler = ConstraintCompiler(model.read_tokenizer, eos_ids=model.eos_ids, vocab_size=model.step_model.limits.vocab_size)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def rig(model: LoadedModel, constraints: ConstraintCompiler) -> Callable[..., Rig]:
    return lambda **narrower: Rig(model, constraints, **narrower)


def random_submits(num: int, vocab_size: int) -> list[Submit]:
    """Return requests with mixed lengths, parameters, seeds, stop tokens and constraints; some prompts share a prefix."""
    rng = random.Random(3)
    common = tuple(rng.randrange(3, vocab_size) for _ in range(140))
    submits: list[Submit] = []
    for i in range(num):
        beginning = common[: rng.choice((0, 0, 17, 64, 140))]
        own = tuple(rng.randrange(3, vocab_size) for _ in range(rng.choice((1, 5, 17, 30, 31, 100))))
        constraint = rng.choice((None, None, None, *CONSTRAINTS))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 50),
            temperature=rng.choice((0.0, 0.7, 1.0, 1.6)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 40)),
            min_p=rng.choice((0.0, 0.05)),
            typical_p=rng.choice((1.0, 0.8)),
            frequency_penalty=rng.choice((0.0, 0.6)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            stop_token_ids=rng.choice(((), tuple(range(100, 200)))) if constraint is None else (),
            ignore_eos=rng.random() < 0.7,
            seed=rng.getrandbits(63),
            logprobs=rng.choice((None, 0, 3)),
            processed_logprobs=rng.random() < 0.5,
            prompt_logprobs=rng.choice((None, None, None, 2)),
            constraint=constraint,
        )
        submits.append(Submit(f"r{i}", beginning + own, params, num_choices=rng.choice((1, 1, 1, 3))))
    return submits


@pytest.fixture(scope="module", params=[60, pytest.param(400, marks=pytest.mark.slow)])
def submits(request: pytest.FixtureRequest, model: LoadedModel) -> list[Submit]:
    assert model.step_model is not None
    return random_submits(request.param, model.step_model.limits.vocab_size)


def outcomes_alone(rig: Callable[..., Rig], submits: list[Submit]) -> Outcomes:
    """Run each request alone in a new engine with an empty cache, and return all outcomes."""
    outcomes: Outcomes = {}
    for submit in submits:
        outcomes |= rig().run([submit])
    assert len(outcomes) == sum(submit.num_choices for submit in submits)
    assert all(outcome.end is not None for outcome in outcomes.values())
    assert sum(len(outcome.token_ids) for outcome in outcomes.values()) > 10 * len(submits)
    return outcomes


@pytest.fixture(scope="module")
def alone(rig: Callable[..., Rig], submits: list[Submit]) -> Outcomes:
    return outcomes_alone(rig, submits)


def shuffled(submits: list[Submit], seed: int) -> list[Submit]:
    return random.Random(seed).sample(submits, len(submits))


def same(got: Outcomes, expected: Outcomes) -> None:
    """Assert that outcomes are equal. Show only the first difference."""
    assert got.keys() == expected.keys()
    for key, outcome in expected.items():
        assert got[key] == outcome, key


def check_in_a_batch(batch: Rig, submits: list[Submit], alone: Outcomes) -> None:
    """Check that requests that run at the same time have the same outcomes as alone. Then check this again with the requests in another
    order, so that they find prefixes in the cache."""
    same(batch.run(submits), alone)
    num_cold = batch.engine.scheduler.pool.num_found_tokens
    same(batch.run(shuffled(submits, 1)), alone)
    assert batch.engine.scheduler.pool.num_found_tokens > num_cold


def check_in_chunks(rig: Callable[..., Rig], submits: list[Submit], alone: Outcomes, chunk: int) -> None:
    same(rig(max_tokens=chunk, max_seqs=min(chunk, 32)).run(shuffled(submits, chunk), per_step=3), alone)


def check_after_preemptions(tight: Rig, submits: list[Submit], alone: Outcomes) -> None:
    """Check that requests have the same outcomes after preemptions. The page pool is too small for all requests, and each request has a
    higher priority than the one before, so later requests preempt earlier ones."""
    pushing = [msgspec.structs.replace(submit, priority=-i) for i, submit in enumerate(shuffled(submits, 3))]
    same(tight.run(pushing, per_step=1), alone)
    assert tight.engine.scheduler.num_preemptions > 0


def test_in_a_batch_shuffled_and_from_a_warm_cache(rig, submits, alone):
    check_in_a_batch(rig(), submits, alone)


@pytest.mark.parametrize("chunk", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 512))])
def test_in_chunks(rig, submits, alone, chunk):
    check_in_chunks(rig, submits, alone, chunk)


def test_after_preemptions(rig, submits, alone):
    check_after_preemptions(rig(groups=(GroupLimits(62),), max_seqs=12), submits, alone)


def test_by_one_thread(request, load, constraints, submits, alone, model):
    quantize = request.node.callspec.params["model"]
    single = load(quantize, threads=1)
    assert single.ready.cache_hit and single.ready.signature == model.ready.signature
    same(Rig(single, constraints).run(submits), alone)
