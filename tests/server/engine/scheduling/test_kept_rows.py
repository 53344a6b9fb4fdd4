"""Rows of images that running prompts read are kept, however little memory there is for rows: no step encodes, and no image is encoded
twice for one prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from deploy.model_loading import excerpts
from deploy.model_loading.excerpts import ExcerptEncoder, Rows
from runtime.parts import InParts
from server.engine.scheduling.pace import Measured, Pace
from server.messages import Crop
from tests.doubles.model import NullModel
from tests.server.engine.scheduling.test_encoding import BRIEF, ENGINES, LIMITS, MAX_GAP_S, STEP_S, Slow, asked, stream, timed

SIZE = 4
CHEAP_S, EXPENSIVE_S = 0.001, 6.0  # to encode an image
IMAGE_BYTES = 4 * SIZE * 4  # of the rows of an image of four tokens


class Values(ExcerptEncoder):
    """Encodes an image in three parts. Each row has the value of the image's first byte."""

    def __init__(self, row_size: int) -> None:
        super().__init__(row_size)
        self.encoded: list[int] = []  # values of the images, in the order in which they were encoded

    def rows_of(self, excerpts: Sequence[Crop]) -> InParts[list[Rows]]:
        yield
        yield
        self.encoded += [one.pixels[0] for one in excerpts]
        return [np.full((one.num_tokens, SIZE), one.pixels[0], np.float32) for one in excerpts]


class WithEncoder(NullModel):
    """Keeps rows as a real model does, and refuses a step that would have to encode."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.encoder = Values(SIZE)
        self.most_kept = 0  # images whose rows were kept before a step

    def run(self, batch):
        self.most_kept = max(self.most_kept, len(self.encoder._kept))
        for seen in batch.seen:
            _, rows = self.encoder.look([seen]) if self.is_encoded(seen.key) else (None, np.empty((0, 0)))
            assert rows.tolist() == [[seen.excerpt.pixels[0]] * SIZE] * seen.count, "the step would encode an image"
        return super().run(batch)

    def is_encoded(self, key):
        return self.encoder.is_encoded(key)

    def encode(self, work):
        return self.encoder.encode(work)

    def spare(self, keys):
        self.encoder.spare(keys)


class Keeping(Slow, WithEncoder):
    pass


def started_with(rig, engine, cost_s: float):
    """Return a rig whose model keeps rows. Encoding an image is measured as taking `cost_s`."""
    pace = Pace(64, Measured({1: STEP_S, 64: 0.1}, excerpts_s={"image": cost_s}), MAX_GAP_S)
    return timed(rig(engine, limits=LIMITS, pace=pace, model_class=Keeping))


@pytest.fixture(autouse=True)
def kept_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excerpts, "KEPT_BYTES", IMAGE_BYTES)


@ENGINES
@pytest.mark.parametrize(("cost_s", "num_kept"), [(CHEAP_S, 3), (EXPENSIVE_S, 1)])
def test_a_prompt_may_have_more_images_than_are_kept(rig, engine, cost_s: float, num_kept: int) -> None:
    """A chunk reads all of them if they are cheap."""
    one = started_with(rig, engine, cost_s)
    one.run([asked("image", 1, 2, 3)], max_steps=100)
    assert one.model.encoder.encoded == [1, 2, 3] and one.model.most_kept == num_kept
    one.run([asked("next", 4)], max_steps=100)
    assert len(one.model.encoder._kept) == 1


@ENGINES
@pytest.mark.parametrize("cost_s", [CHEAP_S, EXPENSIVE_S])
def test_images_are_encoded_once_beside_others(rig, engine, cost_s: float) -> None:
    one = started_with(rig, engine, cost_s)
    one.run([stream(), *(asked(str(value), value, 10 + value) for value in range(1, 8))], max_steps=1000)
    assert sorted(one.model.encoder.encoded) == sorted([*range(1, 8), *range(11, 18)])


@ENGINES
def test_a_forked_choice_whose_rows_are_dropped_before_its_step_keeps_its_page(rig, engine) -> None:
    """The prompt ends with an image. The second choice reads its last token, in a page that is copied from the first choice, which ends
    meanwhile."""
    one = started_with(rig, engine, CHEAP_S)
    image = asked("a", 1)
    ending = msgspec.structs.replace(
        image, prompt_ids=image.prompt_ids[:-2], params=msgspec.structs.replace(BRIEF, max_tokens=1), num_choices=2
    )
    one.engine.submit(ending)
    one.until(lambda: "step" in one.model.did)
    one.model.encoder._kept.clear()
    one.run()
    assert one.outcomes["a", 0].token_ids == one.outcomes["a", 1].token_ids and one.model.encoder.encoded == [1, 1]


@ENGINES
def test_images_that_others_have_encoded_are_not_encoded_again(rig, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request waits for an image of the first, and for one of its own. Both are cheap enough for one chunk."""
    monkeypatch.setattr(excerpts, "KEPT_BYTES", 9 * IMAGE_BYTES)
    one = started_with(rig, engine, CHEAP_S)
    one.run([asked("before", 5), asked("first", 1), asked("second", 1, 2)])
    assert one.model.encoder.encoded == [5, 1, 2]


@ENGINES
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_a_plan_reads_may_be_dropped_before_its_step(rig, engine, seed: int) -> None:
    """Rows of earlier requests are still there when a plan is made, and make way for those that are encoded meanwhile."""
    rng = random.Random(seed)
    submits = [asked(str(i), *rng.choices(range(1, 5), k=rng.choice((1, 2, 3))), before=rng.choice((1, 3, 40))) for i in range(30)]
    one = started_with(rig, engine, rng.choice((CHEAP_S, EXPENSIVE_S)))
    one.model.part_s = rng.choice((0.001, 0.25))
    outcomes = one.run([stream(), *submits], per_step=1, max_steps=3000)
    for submit in submits:
        assert len(outcomes[submit.request_id, 0].token_ids) == 4 and not one.failed
