"""For each kind of cache group, a request's result depends only on the request, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import tokenizers

from deploy.model_loading.load import load_model
from server.engine.worker import LoadedModel
from server.messages import Load, SamplingParams, Submit
from tests.e2e.test_bits import Outcomes, Rig, check_after_preemptions, check_in_a_batch, check_in_chunks, outcomes_alone, same

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
FAMILIES = [
    "gemma4",  # cache groups with different heads, some with windows; several layers read the keys and values of one layer
    "glm4_moe_lite",  # the latents of multi-head latent attention
    "lfm2",  # three of four layers keep states
    "qwen3_next",  # the states are matrices; a page of states covers more tokens than a page of keys and values
    pytest.param("gemma3", marks=pytest.mark.slow),  # Three of four layers have windows of 12 tokens.
    pytest.param("gemma4-experts", marks=pytest.mark.slow),  # values are the keys before their norm
    # Mamba-2: the states are matrices and are updated without the delta rule.
    pytest.param("granitemoehybrid", marks=pytest.mark.slow),
]
VOCAB = 96

pytestmark = pytest.mark.xdist_group("bits of cache groups")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    for file in (GOLDEN / request.param).iterdir():
        (folder / file.name).symlink_to(file)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return load_model(Load("m", str(folder), "bf16", max_batch=32), lambda _stage, _fraction: None)


@pytest.fixture(scope="module")
def rig(model: LoadedModel) -> Callable[..., Rig]:
    return lambda **narrower: Rig(model, None, **narrower)


def random_submits(num: int) -> list[Submit]:
    """Return requests with prompts of various lengths; some prompts have a common prefix. Every sequence becomes longer than the window."""
    rng = random.Random(5)
    common = tuple(rng.randrange(3, VOCAB) for _ in range(100))
    submits: list[Submit] = []
    for i in range(num):
        own = tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 5, 15, 16, 17, 50, 90))))
        params = SamplingParams(
            max_tokens=rng.randrange(20, 50),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(63),
            ignore_eos=True,
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        submits.append(Submit(f"r{i}", common[: rng.choice((0, 33, 64, 100))] + own, params, num_choices=rng.choice((1, 1, 1, 3))))
    return submits


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    return random_submits(40)


@pytest.fixture(scope="module")
def alone(rig: Callable[..., Rig], submits: list[Submit]) -> Outcomes:
    return outcomes_alone(rig, submits)


def test_in_a_batch_shuffled_and_from_a_warm_cache(rig, submits, alone) -> None:
    check_in_a_batch(rig(), submits, alone)


@pytest.mark.parametrize("chunk", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 512))])
def test_in_chunks(rig, submits, alone, chunk) -> None:
    check_in_chunks(rig, submits, alone, chunk)


def test_after_preemptions(rig, submits, alone, model) -> None:
    assert model.step_model is not None
    groups = tuple(replace(group, num_pages=44) for group in model.step_model.limits.groups)
    check_after_preemptions(rig(groups=groups, max_seqs=12, max_tokens=64), submits, alone)


def test_after_kills(rig, submits, alone) -> None:
    check_after_kills(lambda rng: rig(max_tokens=rng.choice((32, 128)), max_seqs=32), submits, alone, most_steps=40, num_workers=5)


def check_after_kills(
    start: Callable[[random.Random], Rig], submits: list[Submit], expected: Outcomes, *, most_steps: int, num_workers: int
) -> None:
    """Stop engines after a random number of steps. New engines, at least `num_workers` of them, continue from the tokens sent so far and
    give the same result."""
    rng, sent, num_started = random.Random(0), {}, 0
    while left := [going_on(submit, sent) for submit in submits if not is_over(submit, sent)]:
        num_started += 1
        worker = start(rng)
        worker.outcomes = sent
        for submit in left:
            worker.engine.submit(submit)
        for _ in range(rng.randrange(5, most_steps)):
            worker.engine.step()
            worker.engine.check_integrity()
    assert num_started >= num_workers
    same(sent, expected)


def is_over(submit: Submit, sent: Outcomes) -> bool:
    return all((key := (submit.request_id, choice)) in sent and sent[key].end is not None for choice in range(submit.num_choices))


def going_on(submit: Submit, sent: Outcomes) -> Submit:
    known = [sent.get((submit.request_id, choice)) for choice in range(submit.num_choices)]
    return msgspec.structs.replace(
        submit,
        emitted=tuple(tuple(one.token_ids) if one else () for one in known),
        finished=tuple(choice for choice, one in enumerate(known) if one and one.end),
    )


def test_the_memory_of_a_window_stops_growing(rig, model) -> None:
    """In a cache group with a window, a long sequence has no more pages than a short sequence. A state has a window of one token."""
    one, most, groups = rig(), 0, model.step_model.limits.groups
    one.engine.submit(Submit("r", tuple(range(3, 20)), SamplingParams(200, temperature=0.0, ignore_eos=True)))
    while one.engine.has_work:
        one.engine.step()
        held = [[page for page in pages.pages if page] for seq in one.engine.scheduler.running for pages in seq.held.lists]
        windowed = [len(pages) for pages, group in zip(held, groups, strict=False) if group.window is not None]
        most = max([most, *windowed])
    assert most <= 3
    assert (most > 0) == any(group.window is not None for group in groups)
