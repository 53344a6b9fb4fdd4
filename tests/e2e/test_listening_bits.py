"""An answer about recordings depends only on its request, to the last bit: alone, beside others, in chunks that cut recordings, after
prefixes that were found in the cache, after preemptions and after kills of the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest

from runtime.spectrogram import HOP
from server.audio.clips import clips_of
from server.engine.worker import LoadedModel
from server.messages import Clip, Crop, Embed, ErrorCode, Failed, Listening, SamplingParams, Submit
from tests.e2e.excerpt_bits import check_excerpts_after_kills, counted, drawn_submits, loaded_subject
from tests.e2e.excerpt_bits import model as model
from tests.e2e.excerpt_bits import rig as rig
from tests.e2e.excerpt_bits import subject as subject
from tests.e2e.test_bits import Outcomes, Rig, check_after_preemptions, check_in_a_batch, check_in_chunks, outcomes_alone
from tests.golden.listening import SUBJECTS, Subject

pytestmark = pytest.mark.xdist_group("bits of recordings")
SECONDS = (0.3, 1.99, 0.7)  # of recordings


@pytest.fixture(
    scope="module",
    params=[("qwen2_audio", "f32"), ("qwen2_audio", "bf16"), ("voxtral", "f32"), ("voxtral", "int8-fast")],
    ids="-".join,
)
def loaded(request: pytest.FixtureRequest) -> tuple[Subject, LoadedModel]:
    name, format = request.param
    return loaded_subject(SUBJECTS[name], format)


def clip(model: LoadedModel, seed: int, seconds: float | None = None) -> Clip:
    """Return a clip of random sound."""
    (limits,) = model.step_model.limits.excerpts
    given = Listening(limits.token, 128, limits.num_hops, limits.frames_each, limits.ends, 1)
    sound = np.random.default_rng(seed).normal(0, 0.1, round(16_000 * (SECONDS[seed] if seconds is None else seconds)))
    return clips_of(sound.astype(np.float32), given)[0]


@pytest.fixture(scope="module")
def submits(subject: Subject, model: LoadedModel) -> list[Submit]:
    """Return requests of which several have the same recordings, and several have the same tokens and other recordings."""
    words = [number for number in range(len(subject.tokens)) if number != subject.audio]
    return drawn_submits(20, words, (0, 1, 2, 3), partial(clip, model), lambda one: [subject.audio] * one.num_tokens)


@pytest.fixture(scope="module")
def alone(rig: Callable[..., Rig], submits: list[Submit]) -> Outcomes:
    return outcomes_alone(rig, submits)


def test_in_a_batch_and_from_a_warm_cache(rig, submits, alone) -> None:
    check_in_a_batch(rig(), submits, alone)


@pytest.mark.covering("loaded", "chunk", together=1)
@pytest.mark.parametrize("chunk", [16, 21, 64])
def test_in_chunks(rig, submits, alone, chunk: int) -> None:
    check_in_chunks(rig, submits, alone, chunk)


def test_after_preemptions(rig, submits, alone, model) -> None:
    groups = tuple(replace(group, num_pages=16) for group in model.step_model.limits.groups)
    check_after_preemptions(rig(groups=groups), submits, alone)


def test_after_kills(rig, submits, alone) -> None:
    check_excerpts_after_kills(rig, submits, alone)


def test_recordings_are_not_encoded_again(rig, subject, model, monkeypatch) -> None:
    """A clip is encoded once for all requests of one salt, and once more for another salt."""
    encoded = counted(model.step_model._encoder, monkeypatch)
    worker, params, one = rig(), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), clip(model, 0)
    first = Submit("a", (1, *[subject.audio] * one.num_tokens, 2), params, excerpts=(one,))
    worker.run([first, msgspec.structs.replace(first, request_id="b", prompt_ids=(3, *first.prompt_ids))])
    assert encoded == [[one]]
    worker.run([msgspec.structs.replace(first, request_id="c", cache_salt="other")])
    assert encoded == [[one]] * 2


def test_equal_tokens_with_other_recordings_share_no_prefix(rig, subject, model) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    clips = clip(model, 0, 1.5), clip(model, 1, 1.5)
    prompt = (*range(20), *[subject.audio] * clips[0].num_tokens, *range(20))
    first, second = (Submit(name, prompt, params, excerpts=(one,)) for name, one in zip("ab", clips, strict=True))
    worker = rig()
    outcomes = worker.run([first]) | worker.run([second])
    assert worker.engine.scheduler.pool.num_found_tokens == 16  # the page before the recording
    assert outcomes["a", 0].logprobs != outcomes["b", 0].logprobs


def test_clips_that_the_model_cannot_hear_are_refused(rig, subject, model) -> None:
    (limits,), one = model.step_model.limits.excerpts, clip(model, 0)
    most = limits.num_tokens(limits.num_hops)
    for wrong, text in (
        (Clip.of(b"", 0.0, limits.num_hops + 1, most), "hops; expected"),
        (Clip.of(b"", 0.0, 0, 0), "a clip has 0 hops"),
        (Clip.of(b"", 0.0, limits.num_hops, most - 1), f"tokens; expected {most}"),
        (Clip.of(b"abc", 0.0, limits.num_hops, most), "a clip has 3 bytes"),
        (Clip.of(bytes(4 * HOP * (limits.num_hops + 3)), 0.0, limits.num_hops, most), "at most"),
        (Crop.of(b"abc", 1, 1), "the request has images, and this model hears audio and reads text"),
    ):
        prompt = (subject.audio,) * max(1, wrong.num_tokens)
        failure = _failure(rig(), Submit("r", prompt, SamplingParams(max_tokens=3), excerpts=(wrong,)))
        assert failure.code is ErrorCode.INVALID_VALUE and text in failure.message
    missing = Submit("r", (subject.audio,) * (one.num_tokens - 1), SamplingParams(max_tokens=3), excerpts=(one,))
    assert f"1 clips of recordings take {one.num_tokens}" in _failure(rig(), missing).message
    assert "audio tokens" in _failure(rig(), Embed("e", (1, subject.audio))).message


def _failure(worker: Rig, message: Submit | Embed) -> Failed:
    failed: list[object] = []
    worker.engine._outbox._publish = failed.append
    worker.engine.submit(message) if isinstance(message, Submit) else worker.engine.embed(message)
    while worker.engine.has_work:
        worker.engine.step()
    (failure,) = (one for one in failed if isinstance(one, Failed))
    return failure
