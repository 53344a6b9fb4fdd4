"""A transcript depends only on its request, to the last bit: alone, beside other audio, after preemptions and after kills of the worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy.model_loading.load import load_model
from runtime.spectrogram import AROUND, HOP
from server.engine.worker import LoadedModel
from server.messages import Audio, ErrorCode, Failed, Load, SamplingParams, Stamps, Submit
from tests.e2e.excerpt_bits import check_steps_between_parts
from tests.e2e.test_bits import Outcomes, Rig, check_after_preemptions, outcomes_alone, same, shuffled
from tests.e2e.test_group_bits import check_after_kills

GOLDEN = Path(__file__).parents[1] / "golden" / "whisper"
END, FIRST_STAMP, VOCAB = 50, 58, 60

pytestmark = pytest.mark.xdist_group("bits of speech")


@pytest.fixture(scope="module", params=["f32", "auto"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(Load("m", str(GOLDEN), request.param, max_batch=8), lambda _stage, _fraction: None)


@pytest.fixture(scope="module")
def rig(model: LoadedModel) -> Callable[..., Rig]:
    return lambda **narrower: Rig(model, None, **narrower)


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    """Return requests of which several have the same prompt, and each has audio of its own."""
    rng, noise = random.Random(1), np.random.default_rng(2)
    found: list[Submit] = []
    for i in range(24):
        samples = (0.3 * noise.standard_normal(HOP * rng.choice((1, 2, 31, 48)) + AROUND)).astype("<f4")
        audio = Audio(samples.tobytes(), rng.choice((0.0, 1.0, 100.0)))
        params = SamplingParams(
            max_tokens=rng.randrange(4, 27),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(63),
            ignore_eos=True,
            logprobs=rng.choice((None, 2)),
            stamps=rng.choice((None, Stamps(FIRST_STAMP, END, 1))),
            banned_token_ids=rng.choice(((), (51, 52, 57))),
        )
        found.append(Submit(f"r{i}", rng.choice(((51, 52, 53, 57), (51, 52, 53))), params, audio=audio))
    return found


@pytest.fixture(scope="module")
def alone(rig: Callable[..., Rig], submits: list[Submit]) -> Outcomes:
    return outcomes_alone(rig, submits)


def test_in_a_batch(rig, submits, alone) -> None:
    """Requests with equal prompts and other audio share nothing, neither at the same time nor later."""
    batch = rig()
    same(batch.run(submits), alone)
    same(batch.run(shuffled(submits, 1)), alone)
    assert batch.engine.scheduler.pool.num_found_tokens == 0


def test_after_preemptions(rig, submits, alone, model) -> None:
    """With few pages, preempted sequences lose the cache of their audio, and encode the audio again."""
    pages, heard = model.step_model.limits.groups
    check_after_preemptions(rig(groups=(replace(pages, num_pages=8), replace(heard, num_pages=5))), submits, alone)


def test_after_kills(rig, submits, alone) -> None:
    check_after_kills(lambda _: rig(), submits, alone, most_steps=20, num_workers=3)


def test_a_stream_gets_tokens_between_the_parts_of_a_window(rig, submits, alone, monkeypatch) -> None:
    found = check_steps_between_parts(rig(), submits[0], (51, 52, 53), monkeypatch)
    same(found, {key: outcome for key, outcome in alone.items() if key[0] == submits[0].request_id})


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "has no audio"),
        (0, "has 0 bytes; expected f32 samples of 1 to 48 hops of 160, and 320 more"),
        (4 * AROUND, "1 to 48"),
        (4 * AROUND + 3, "f32"),
        (4 * AROUND + 4 * 161, "f32"),
        (4 * AROUND + 4 * 160 * 49, "1 to 48"),
    ],
)
def test_audio_that_the_model_cannot_hear_is_refused(rig, size: int | None, text: str) -> None:
    worker, failed = rig(), []
    worker.engine._outbox._publish = failed.append
    worker.engine.submit(Submit("r", (51,), SamplingParams(max_tokens=3), audio=None if size is None else Audio(bytes(size), 0.0)))
    while worker.engine.has_work:
        worker.engine.step()
    (failure,) = (message for message in failed if isinstance(message, Failed))
    assert failure.code is ErrorCode.INVALID_VALUE
    assert text in failure.message
