"""Draw requests with images or recordings, and make the engines that answer them, for tests of bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deploy.model_loading.excerpts import ExcerptEncoder
from deploy.model_loading.load import load_model
from server.engine.worker import LoadedModel
from server.messages import Clip, Crop, Load, SamplingParams, Submit
from tests.e2e.test_bits import Outcomes, Rig
from tests.e2e.test_group_bits import check_after_kills


def loaded_subject(subject: Any, format: str) -> tuple[Any, LoadedModel]:
    """Load the model of a golden, for the fixture `loaded` of a module. The fixtures below need this fixture."""
    return subject, load_model(Load("m", str(subject.folder), format, max_batch=32), lambda _stage, _fraction: None)


@pytest.fixture(scope="module")
def subject(loaded: tuple[Any, LoadedModel]) -> Any:
    return loaded[0]


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, LoadedModel]) -> LoadedModel:
    return loaded[1]


@pytest.fixture(scope="module")
def rig(model: LoadedModel) -> Callable[..., Rig]:
    """Return a function that empties the model's cache of encoded excerpts and makes a new engine."""

    def fresh(**narrower: object) -> Rig:
        model.step_model._encoder._kept.clear()
        return Rig(model, None, **narrower)

    return fresh


def drawn_submits(
    count: int,
    words: Sequence[int],
    numbers: Sequence[int],
    excerpt_of: Callable[[int], Any],
    tokens_of: Callable[[Any], Sequence[int]],
    scored: int | None = 1,
    distinct: int = 3,
) -> list[Submit]:
    """Draw requests of which several have the same excerpts, and several have the same tokens and other excerpts. `numbers` are the numbers
    of excerpts that a request may have. `scored` is the number of log-probabilities of prompt tokens that some requests ask for. There are
    `distinct` excerpts."""
    rng, found = random.Random(1), []
    for i in range(count):
        prompt, excerpts = [rng.choice(words[:4]) for _ in range(rng.choice((1, 16, 20)))], list[Crop | Clip]()
        for _ in range(rng.choice(numbers)):
            excerpts.append(excerpt_of(rng.randrange(distinct)))
            prompt += [*rng.sample(words, rng.choice((0, 2))), *tokens_of(excerpts[-1])]
        prompt += rng.sample(words, 3)
        params = SamplingParams(
            max_tokens=rng.randrange(12, 30),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(63),
            ignore_eos=True,
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, scored)),
        )
        found.append(Submit(f"r{i}", tuple(prompt), params, num_choices=rng.choice((1, 1, 2)), excerpts=tuple(excerpts)))
    return found


def check_excerpts_after_kills(rig: Callable[..., Rig], submits: Sequence[Submit], alone: Outcomes) -> None:
    """Compare answers after kills, without log-probabilities of the prompt: a request that is continued does not compute them again."""
    submits = [msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, prompt_logprobs=None)) for submit in submits]
    expected = {key: replace(outcome, prompt_logprobs=()) for key, outcome in alone.items()}
    check_after_kills(lambda _: rig(), submits, expected, most_steps=20, num_workers=3)


def counted(encoder: ExcerptEncoder, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Return a list to which the encoder will add the excerpts that it encodes for a chunk."""
    found, together = list[list[Any]](), encoder.together
    monkeypatch.setattr(encoder, "together", lambda excerpts: found.extend([[*excerpts]] if excerpts else []) or together(excerpts))
    return found


def check_steps_between_parts(worker: Rig, submit: Submit, words: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    """Answer a request beside a stream that may not wait. A step of the stream runs between any two parts of encoding what the request
    has. Return its outcomes."""
    did, model, scheduler = list[str](), worker.engine._model, worker.engine.scheduler
    for name in ("run", "encode"):
        call = getattr(model, name)
        monkeypatch.setattr(model, name, lambda given, call=call, name=name: did.append(name) or call(given), raising=False)
    monkeypatch.setattr(scheduler.pace, "_max_gap_s", 0.0)
    text = Submit("stream", tuple(words[:3]), SamplingParams(max_tokens=40, ignore_eos=True), audio=submit.audio)
    if submit.audio is not None:
        worker.engine.submit(text)
        while not worker.outcomes:
            worker.engine.step()
        did.clear()
    outcomes = worker.run([submit] if submit.audio is not None else [text, submit], per_step=1)
    first, last = did.index("encode"), did.index("encode") + 2 * 20
    assert did[first:last] == ["encode", "run"] * 20, did
    return {key: outcome for key, outcome in outcomes.items() if key[0] == submit.request_id}
