"""Calls of tools, which matchers draft, force and take back, have the same tokens under any load and after the death of workers."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.pace import Measured, Pace
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import IDLE, Constraint, ConstraintKind, SamplingParams, Submit, Trigger
from tests.doubles.model import History, hashed_logits
from tests.server.engine.conftest import VOCAB
from tests.server.engine.test_bits import is_over, next_submit, same, shuffled

MARKER = 315
WHOLE, STATES = GroupLimits(40), GroupLimits(40, window=33, keeps_states=True, page_size=32)
RANDOM = hashed_logits(VOCAB)


def logits_of(history: History) -> NDArray[np.float32]:
    """Logits of a model that often begins a call."""
    logits = RANDOM(history).copy()
    if int(history.sum()) % 7 == 0:
        logits[MARKER] = 30.0
    return logits


class SlowMachine:
    """A replacement for StepTime, and the clock of its seconds. A short step of a batch has room for two tokens."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, num_tokens: int) -> None:
        self.now_s += 0.02 + 0.03 * num_tokens


@pytest.fixture(scope="module")
def submits(tokenizer) -> list[Submit]:
    """Requests that offer tools. Some names begin alike, and a single offer is forced as a whole."""
    rng = random.Random(8)

    def offer(name: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(f'{{"name": "{name}"').ids)

    def constraint(*names: str) -> Constraint:
        trigger = Trigger(token_id=MARKER, offers=tuple(map(offer, names)))
        return Constraint(ConstraintKind.REGEX, r'\{"name": "(' + "|".join(names) + r')"[a-c]{1,4}\}', trigger)

    some = constraint("get_weather_today"), constraint("of", "off_the", "the"), constraint("green", "greek", "bob")
    found: list[Submit] = []
    for i in range(24):
        params = SamplingParams(
            max_tokens=rng.randrange(20, 70),
            temperature=rng.choice((0.0, 1.0)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
            ignore_eos=rng.random() < 0.7,
            banned_sequences=rng.choice(((), (), ((65, 66),))),
            seed=i,
            logprobs=rng.choice((None, None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            constraint=some[i % 3],
        )
        prompt = tuple(rng.randrange(1, 300) for _ in range(rng.randrange(1, 60)))
        found.append(Submit(f"r{i}", prompt, params, num_choices=rng.choice((1, 1, 2)), fairness_key=f"key{i % 2}"))
    return found


@pytest.fixture(scope="module")
def alone(rig, submits, constraints):
    outcomes = {}
    for submit in submits:
        outcomes |= rig(constraints=constraints, logits_of=logits_of).run([submit])
    assert sum(outcome.token_ids.count(MARKER) for outcome in outcomes.values()) > 2 * len(submits)
    return outcomes


@pytest.mark.parametrize(
    ("engine", "groups"),
    [
        (Engine, (WHOLE,)),
        (OverlappedEngine, (WHOLE, STATES)),
        pytest.param(Engine, (WHOLE, STATES), marks=pytest.mark.slow),
        pytest.param(OverlappedEngine, (WHOLE,), marks=pytest.mark.slow),
    ],
)
def test_company_preemption_and_batches(rig, submits, alone, constraints, engine, groups) -> None:
    limits = StepLimits(VOCAB, max_context=512, max_tokens=64, max_seqs=8, groups=groups)
    same(rig(engine, constraints=constraints, logits_of=logits_of), shuffled(submits, 1), alone, "together")
    tight = rig(engine, limits=limits, constraints=constraints, logits_of=logits_of)
    pushing = [msgspec.structs.replace(submit, priority=-i // 7) for i, submit in enumerate(shuffled(submits, 3))]
    same(tight, pushing, alone, "after preemptions", per_step=1)
    assert tight.engine.scheduler.num_preemptions > 0
    machine, pace = SlowMachine(), Pace(limits.max_tokens, Measured({1: 0.05, 64: 1.94}), 1.0)
    slow = rig(engine, limits=limits, constraints=constraints, logits_of=logits_of, pace=pace, cost=machine, clock=machine)
    lines = [msgspec.structs.replace(submit, priority=IDLE * (i % 3 > 0)) for i, submit in enumerate(shuffled(submits, 4))]
    same(slow, lines, alone, "as lines of a batch on a slow machine", per_step=1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_later_worker_goes_on_exactly(rig, submits, alone, constraints, engine, seed: int) -> None:
    """Engines stop after a random number of steps, also in the middle of a draft, which is then drafted anew."""
    rng = random.Random(seed)
    sent = rig(engine, constraints=constraints)
    open_submits, num_workers = submits, 0
    while open_submits:
        num_workers += 1
        worker = rig(engine, constraints=constraints, logits_of=logits_of)
        worker.outcomes = sent.outcomes
        for submit in open_submits:
            worker.engine.submit(submit)
        worker.steps(rng.randrange(4, 40))
        open_submits = [next_submit(submit, sent.outcomes) for submit in submits if not is_over(submit, sent.outcomes)]
    assert num_workers > 4
    for key, outcome in alone.items():
        assert sent.outcomes[key] == outcome, key
