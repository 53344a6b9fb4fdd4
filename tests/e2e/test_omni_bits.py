"""An answer about images and recordings depends only on its request, to the last bit: alone, beside others, in chunks that cut images and
recordings, after prefixes that were found in the cache, after preemptions and after kills of the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest

from server.audio.clips import clips_of
from server.engine.step_model import ListeningLimits
from server.engine.worker import LoadedModel
from server.messages import Clip, Crop, Excerpt, Listening, SamplingParams, Submit
from tests.e2e.excerpt_bits import check_excerpts_after_kills, counted, drawn_submits, loaded_subject
from tests.e2e.excerpt_bits import model as model
from tests.e2e.excerpt_bits import rig as rig
from tests.e2e.excerpt_bits import subject as subject
from tests.e2e.test_bits import Outcomes, Rig, check_after_preemptions, check_in_a_batch, check_in_chunks, outcomes_alone, same
from tests.golden.omni import SUBJECTS, Subject

pytestmark = pytest.mark.xdist_group("bits of images and recordings")
SECONDS = (0.3, 1.99, 0.71)  # of recordings
SHAPES = ((2, 3), (5, 1), (3, 2))  # rows and columns of crops


@pytest.fixture(
    scope="module",
    params=[("qwen2_5_omni", "f32"), ("qwen2_5_omni", "int8-fast"), ("qwen3_omni_moe", "f32"), ("qwen3_omni_moe", "bf16")],
    ids="-".join,
)
def loaded(request: pytest.FixtureRequest) -> tuple[Subject, LoadedModel]:
    name, format = request.param
    return loaded_subject(SUBJECTS[name], format)


def excerpt(subject: Subject, model: LoadedModel, seed: int) -> Excerpt:
    """Return a crop of random pixels for an even seed, otherwise a clip of random sound."""
    number, random = seed // 2, np.random.default_rng(seed)
    if seed % 2 == 0:
        rows, columns = SHAPES[number]
        return Crop.of(random.integers(0, 256, rows * columns * subject.square**2 * 3, dtype=np.uint8).tobytes(), rows, columns)
    (limits,) = (one for one in model.step_model.limits.excerpts if isinstance(one, ListeningLimits))
    given = Listening(limits.token, 128, limits.num_hops, limits.frames_each, limits.ends, 0, limits.piece_hops)
    return clips_of(random.normal(0, 0.1, round(16_000 * SECONDS[number])).astype(np.float32), given)[0]


def tokens_of(subject: Subject, one: Excerpt) -> list[int]:
    return [subject.image if isinstance(one, Crop) else subject.audio] * one.num_tokens


@pytest.fixture(scope="module")
def submits(subject: Subject, model: LoadedModel) -> list[Submit]:
    """Return requests of which several have the same excerpts, and several have the same tokens and other excerpts."""
    words = [number for number in range(len(subject.tokens)) if number not in (subject.image, subject.audio)]
    return drawn_submits(24, words, (0, 1, 2, 4), partial(excerpt, subject, model), partial(tokens_of, subject), distinct=6)


@pytest.fixture(scope="module")
def alone(rig: Callable[..., Rig], submits: list[Submit]) -> Outcomes:
    return outcomes_alone(rig, submits)


def test_some_requests_have_both(submits) -> None:
    assert sum({Crop, Clip} == {type(one) for one in submit.excerpts} for submit in submits) >= 5


def test_in_a_batch_and_from_a_warm_cache(rig, submits, alone) -> None:
    check_in_a_batch(rig(), submits, alone)


@pytest.mark.parametrize("chunk", [16, 21, 64])
def test_in_chunks(rig, submits, alone, chunk: int) -> None:
    check_in_chunks(rig, submits, alone, chunk)


def test_after_preemptions(rig, submits, alone, model) -> None:
    groups = tuple(replace(group, num_pages=18) for group in model.step_model.limits.groups)
    check_after_preemptions(rig(groups=groups), submits, alone)


def test_after_kills(rig, submits, alone) -> None:
    check_excerpts_after_kills(rig, submits, alone)


def test_expensive_excerpts_are_encoded_one_after_another(rig, submits, alone, model, monkeypatch) -> None:
    """Even an excerpt with a single token costs as much as a step's budget of prompt tokens, an image as well as a recording."""
    worker = rig(excerpts=tuple(replace(one, cost=512 * one.example.num_tokens) for one in model.step_model.limits.excerpts))
    encoded = counted(model.step_model._encoder, monkeypatch)
    given = [submit for submit in submits if len(submit.excerpts) > 1][:6]
    names = {submit.request_id for submit in given}
    same(worker.run(given), {key: outcome for key, outcome in alone.items() if key[0] in names})
    assert {len(excerpts) for excerpts in encoded} == {1}


def test_excerpts_are_encoded_once(rig, subject, model, monkeypatch) -> None:
    """An excerpt is encoded once for all requests of one salt, and once more for another salt."""
    encoded = counted(model.step_model._encoder, monkeypatch)
    one, two = excerpt(subject, model, 0), excerpt(subject, model, 1)
    prompt = (1, *tokens_of(subject, two), *tokens_of(subject, one), 2)
    first = Submit("a", prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), excerpts=(two, one))
    worker = rig()
    worker.run([first, msgspec.structs.replace(first, request_id="b", prompt_ids=(3, *prompt))])
    assert [one for some in encoded for one in some] == [two, one]
    worker.run([msgspec.structs.replace(first, request_id="c", cache_salt="other")])
    assert sum(map(len, encoded)) == 4


def test_equal_tokens_with_another_recording_share_the_prefix_before_it(rig, subject, model) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    image, sound = excerpt(subject, model, 0), excerpt(subject, model, 3)
    assert isinstance(sound, Clip)
    other = Clip.of(bytes(sound.samples)[: len(sound.samples) // 8 * 4], sound.loudest, sound.num_hops, sound.num_tokens)
    prompt = (*range(12), *tokens_of(subject, image), *tokens_of(subject, sound), *range(20))
    first, second = (Submit(name, prompt, params, excerpts=(image, one)) for name, one in (("a", sound), ("b", other)))
    worker = rig()
    outcomes = worker.run([first]) | worker.run([second])
    assert worker.engine.scheduler.pool.num_found_tokens == 16  # the page before the recording, with most of the image
    assert outcomes["a", 0].logprobs != outcomes["b", 0].logprobs
