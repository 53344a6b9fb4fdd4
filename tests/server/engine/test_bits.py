"""A request's result never depends on other requests, the chunks of its prompt, the prefix cache, preemptions, or the death of earlier
workers."""

from __future__ import annotations

import random

import msgspec
import pytest

from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import SamplingParams, Submit

SMALL = StepLimits(vocab_size=320, max_context=512, max_tokens=64, max_seqs=12, groups=(GroupLimits(24),))


@pytest.fixture(params=[40, pytest.param(1000, marks=pytest.mark.slow)])
def submits(request, random_submits) -> list[Submit]:
    return random_submits(request.param, 11)


@pytest.fixture
def alone(rig, submits, constraints):
    """Run each request alone in a new engine with an empty cache, and return all outcomes."""
    outcomes = {}
    for submit in submits:
        one = rig(constraints=constraints)
        outcomes |= one.run([submit])
        assert not one.failed
    assert len(outcomes) == sum(submit.num_choices for submit in submits)
    assert sum(len(outcome.token_ids) for outcome in outcomes.values()) > 5 * len(submits)
    return outcomes


def shuffled(submits: list[Submit], seed: int) -> list[Submit]:
    return random.Random(seed).sample(submits, len(submits))


def same(one, submits: list[Submit], expected, how: str, **pace: int) -> None:
    """Run `submits` on the rig `one` and assert that the outcomes equal `expected`. Show only the first difference."""
    got = one.run(submits, **pace)
    assert not one.failed, how
    assert got.keys() == expected.keys(), how
    for key, outcome in expected.items():
        assert got[key] == outcome, (how, type(one.engine).__name__, key)


def test_company_order_chunks_cache_and_preemption(rig, submits, alone, constraints):
    for engine in (Engine, OverlappedEngine):
        batch = rig(engine, constraints=constraints)
        same(batch, submits, alone, "in a batch of 32")
        batch.outcomes = {}
        same(batch, shuffled(submits, 1), alone, "with a warm prefix cache, shuffled")
        assert batch.engine.scheduler.pool.num_found_tokens > 0

        for chunk in (16, 64, 512):
            limits = StepLimits(320, 512, max_tokens=chunk, max_seqs=min(chunk, 32), groups=(GroupLimits(600),))
            chunked = rig(engine, limits=limits, constraints=constraints)
            same(chunked, shuffled(submits, chunk), alone, f"with chunks of {chunk}")

        tight = rig(engine, limits=SMALL, constraints=constraints)
        pushing = [msgspec.structs.replace(submit, priority=-i // 7) for i, submit in enumerate(shuffled(submits, 3))]
        same(tight, pushing, alone, "after preemptions", per_step=1)
        assert tight.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_later_worker_goes_on_exactly(rig, random_submits, constraints, engine):
    """Engines stop after a random number of steps. New engines continue from the tokens sent so far and give the result of an undisturbed
    engine."""
    submits = random_submits(40, 5)
    whole = rig(constraints=constraints).run(submits)
    rng = random.Random(0)
    sent = rig(engine, constraints=constraints)
    open_submits = submits
    num_workers = 0
    while open_submits:
        num_workers += 1
        limits = StepLimits(320, 512, max_tokens=rng.choice((32, 128)), max_seqs=32, groups=(GroupLimits(600),))
        worker = rig(engine, limits=limits, constraints=constraints)
        worker.outcomes = sent.outcomes
        for submit in open_submits:
            worker.engine.submit(submit)
        worker.steps(rng.randrange(1, 12))
        open_submits = [next_submit(submit, sent.outcomes) for submit in submits if not is_over(submit, sent.outcomes)]
    assert num_workers > 4
    for key, outcome in whole.items():
        assert sent.outcomes[key] == outcome, key


def is_over(submit: Submit, outcomes) -> bool:
    return all((key := (submit.request_id, choice)) in outcomes and outcomes[key].end is not None for choice in range(submit.num_choices))


def next_submit(submit: Submit, outcomes) -> Submit:
    sent = [outcomes.get((submit.request_id, choice)) for choice in range(submit.num_choices)]
    return msgspec.structs.replace(
        submit,
        emitted=tuple(tuple(one.token_ids) if one else () for one in sent),
        finished=tuple(choice for choice, one in enumerate(sent) if one and one.end),
    )


def test_choices_are_forks_of_one_prompt(rig):
    prompt = tuple(range(1, 50))
    submit = Submit("r", prompt, SamplingParams(max_tokens=30, seed=5, ignore_eos=True), num_choices=4)
    cost = CountedTokens()
    together = rig(cost=cost)
    outcomes = together.run([submit])
    texts = {tuple(outcomes["r", choice].token_ids) for choice in range(4)}
    assert len(texts) == 4
    # The first choice computes the whole prompt. The three other choices recompute only its last token. The last token of each choice is
    # sampled but never computed.
    assert cost.num_tokens == len(prompt) + 3 + 4 * 29


class CountedTokens:
    """A replacement for StepTime. It counts the tokens of all steps instead of their seconds."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def spend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
