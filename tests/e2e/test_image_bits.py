"""An answer about images depends only on its request, to the last bit: alone, beside others, in chunks that cut images, after prefixes that
were found in the cache, after preemptions and after kills of the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isqrt

import msgspec
import numpy as np
import pytest

from deploy.model_loading.costs import step_of
from server.engine.axes import along_positions
from server.engine.worker import LoadedModel
from server.messages import Crop, Embed, ErrorCode, Failed, SamplingParams, Submit
from tests.e2e.excerpt_bits import check_excerpts_after_kills, check_steps_between_parts, counted, drawn_submits, loaded_subject
from tests.e2e.excerpt_bits import model as model
from tests.e2e.excerpt_bits import rig as rig
from tests.e2e.excerpt_bits import subject as subject
from tests.e2e.test_bits import Outcomes, Rig, check_after_preemptions, check_in_a_batch, check_in_chunks, outcomes_alone, same
from tests.e2e.test_families_that_see import OTHER_FAMILIES
from tests.golden.crops import crop_of, tokens_of
from tests.golden.vision import SUBJECTS
from tests.golden.vision_subject import Subject

FAMILIES = [name for name in OTHER_FAMILIES if name not in ("llava_siglip", "glm4v_moe")]
pytestmark = pytest.mark.xdist_group("bits of images")


@pytest.fixture(
    scope="module",
    params=[
        # in f32 as in test_families_that_see.py, whose servers find these programs in the cache
        *((name, "f32") for name in FAMILIES),
        ("idefics3", "bf16"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in (("idefics3", "f32"), *((name, "bf16") for name in FAMILIES))),
    ],
    ids="-".join,
)
def loaded(request: pytest.FixtureRequest) -> tuple[Subject, LoadedModel]:
    name, format = request.param
    return loaded_subject(SUBJECTS[name], format)


def crop(subject: Subject, seed: int, shape: int | None = None) -> Crop:
    """Return a crop of random pixels. Crops of any size have different shapes."""
    rows, columns = ((2, 3), (5, 1), (3, 2))[seed if shape is None else shape] if subject.any_size else (1, 1)
    return crop_of(subject, np.random.default_rng(seed).integers(0, 256, (rows * subject.crop, columns * subject.crop, 3)))


@pytest.fixture(scope="module")
def submits(subject: Subject, model: LoadedModel) -> list[Submit]:
    """Return requests of which several have the same images, and several have the same tokens and other images."""
    words = [number for number in range(len(subject.tokens)) if number != subject.image]
    scored = None if model.step_model.limits.both_ways else 1  # images whose tokens are in one step have no scores of the prompt
    return drawn_submits(24, words, (0, 1, 2, 5), partial(crop, subject), partial(tokens_of, subject), scored)


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
    groups = model.step_model.limits.groups
    few = tuple(replace(group, num_pages=14) if group.window is None else group for group in groups)
    check_after_preemptions(rig(groups=few), submits, alone)


def test_after_kills(rig, submits, alone) -> None:
    check_excerpts_after_kills(rig, submits, alone)


def test_images_are_not_encoded_again(rig, subject, model, monkeypatch) -> None:
    """A crop is encoded once for all requests of one salt, and once more for another salt."""
    encoded = counted(model.step_model._encoder, monkeypatch)
    worker, params = rig(), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    first = Submit("a", (1, *tokens_of(subject, crop(subject, 0)), 2), params, excerpts=(crop(subject, 0),))
    worker.run([first, msgspec.structs.replace(first, request_id="b", prompt_ids=(3, *first.prompt_ids))])
    assert [len(crops) for crops in encoded] == [1]
    worker.run([msgspec.structs.replace(first, request_id="c", cache_salt="other")])
    assert [len(crops) for crops in encoded] == [1, 1]


def test_equal_tokens_with_other_images_share_no_prefix(rig, subject) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    crops = crop(subject, 0), crop(subject, 2, 0 if subject.between else 2)  # of another shape, unless tokens between rows show it
    prompt = (*range(20), *tokens_of(subject, crops[0]), *range(20))
    first, second = (Submit(name, prompt, params, excerpts=(one,)) for name, one in zip("ab", crops, strict=True))
    worker = rig()
    outcomes = worker.run([first]) | worker.run([second])
    assert worker.engine.scheduler.pool.num_found_tokens == 16  # the page before the image
    assert outcomes["a", 0].logprobs != outcomes["b", 0].logprobs
    worker.run([msgspec.structs.replace(first, request_id="c")])
    assert worker.engine.scheduler.pool.num_found_tokens == 16 + len(prompt) // 16 * 16


def test_a_step_of_text_needs_no_coordinates(model) -> None:
    """A step without coordinates has the logits of one whose coordinates are the positions. Measurements of costs and of quality pass no
    coordinates."""
    if not model.step_model.limits.three_axes:
        pytest.skip("tokens of this model have one coordinate")
    batch = step_of(model.step_model.limits, num_seqs=2, num_each=3, context=5)
    logits = [
        model.step_model.download(model.step_model.run(replace(batch, axes=axes))) for axes in (None, along_positions(batch.positions))
    ]
    np.testing.assert_array_equal(*logits)


def test_expensive_crops_are_encoded_one_after_another(rig, submits, alone, model, monkeypatch) -> None:
    (seeing,) = model.step_model.limits.excerpts
    # Even a crop with a single token costs as much as a step's budget of prompt tokens.
    worker = rig(excerpts=(replace(seeing, cost=512 * seeing.example.num_tokens),))
    encoded = counted(model.step_model._encoder, monkeypatch)
    given = [submit for submit in submits if submit.excerpts][:8]
    names = {submit.request_id for submit in given}
    same(worker.run(given), {key: outcome for key, outcome in alone.items() if key[0] in names})
    assert {len(crops) for crops in encoded} == {1}


def test_a_stream_gets_tokens_between_the_parts_of_an_image(rig, submits, alone, monkeypatch) -> None:
    submit = next(submit for submit in submits if submit.excerpts and submit.params.prompt_logprobs is None)
    found = check_steps_between_parts(rig(), submit, range(5), monkeypatch)
    same(found, {key: outcome for key, outcome in alone.items() if key[0] == submit.request_id})


@pytest.mark.covering(together=1)
@pytest.mark.parametrize(
    ("num_missing", "gap", "crops", "text"),
    [
        (0, 9, 0, "has {count} image tokens ({image}); 0 crops of images take 0"),
        (1, 9, 1, "1 crops of images take {count}"),
        (9, 9, 1, "has 0 image tokens"),
        (0, 1, 1, "have others between them"),
    ],
)
def test_prompts_that_do_not_fit_their_images_are_refused(rig, subject, num_missing: int, gap: int, crops: int, text: str) -> None:
    count = crop(subject, 0).num_tokens
    tokens = tokens_of(subject, crop(subject, 0))
    tokens = tokens[: max(0, len(tokens) - num_missing)]
    prompt = (*tokens[:gap], 1, *tokens[gap:])
    failure = _failure(rig(), Submit("r", prompt, SamplingParams(max_tokens=3), excerpts=(crop(subject, 0),) * crops))
    assert failure.code is ErrorCode.INVALID_VALUE
    assert text.format(image=subject.image, count=count) in failure.message


def test_crops_of_another_size_and_embeddings_of_images_are_refused(rig, subject) -> None:
    edge = isqrt(subject.rows)
    small = Submit("r", (subject.image,) * subject.rows, SamplingParams(max_tokens=3), excerpts=(Crop.of(b"abc", edge, edge),))
    assert f"a crop has 3 bytes; expected {3 * subject.crop**2}" in _failure(rig(), small).message
    assert "image tokens" in _failure(rig(), Embed("e", (1, subject.image))).message


def test_scores_of_a_prompt_whose_images_are_in_one_step_are_refused(rig, subject, model) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    scored = Submit("r", tuple(tokens_of(subject, crop(subject, 0))), params, excerpts=(crop(subject, 0),))
    if model.step_model.limits.both_ways:
        assert "prompt_logprobs is given with images" in _failure(rig(), scored).message
    else:
        assert rig().run([scored])["r", 0].prompt_logprobs


def _failure(worker: Rig, message: Submit | Embed) -> Failed:
    failed: list[object] = []
    worker.engine._outbox._publish = failed.append
    worker.engine.submit(message) if isinstance(message, Submit) else worker.engine.embed(message)
    while worker.engine.has_work:
        worker.engine.step()
    (failure,) = (one for one in failed if isinstance(one, Failed))
    return failure
