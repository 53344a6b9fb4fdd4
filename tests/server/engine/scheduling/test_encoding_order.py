"""Which images are encoded before a step, in which order and for how long: cheap ones before the same step, and those of batch jobs
briefly, but in the end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from server.engine.scheduling.pace import ALONE_S, Measured, Pace
from server.engine.step_model import GroupLimits
from server.messages import IDLE, Submit
from tests.server.engine.scheduling.test_encoding import (
    BRIEF,
    ENGINES,
    LIMITS,
    MAX_GAP_S,
    STEP_S,
    Slow,
    asked,
    key_of,
    num_tokens,
    started,
    stream,
    timed,
)


@ENGINES
def test_cheap_images_of_many_requests_are_encoded_before_one_step(rig, engine) -> None:
    """30 images of 1 ms each, of 30 requests."""
    pace = Pace(64, Measured({1: STEP_S, 64: 0.1}, excerpts_s={"image": 0.001}), MAX_GAP_S)
    one = timed(rig(engine, limits=replace(LIMITS, max_seqs=30, groups=(GroupLimits(400),)), pace=pace, model_class=Slow))
    one.model.part_s, one.model.num_parts = 0.001, 1
    for number in range(30):
        one.engine.submit(asked(str(number), number, params=msgspec.structs.replace(BRIEF, max_tokens=1)))
    num_turns = 0
    while len(one.model.encoded) < 30:
        one.step()
        num_turns += 1
    assert num_turns <= 3
    one.run()


@ENGINES
def test_a_long_part_of_one_image_does_not_slow_down_the_next(rig, engine) -> None:
    """An image of a single part of 10 s, then one of 100 parts of 10 ms, beside a stream."""

    class Uneven(Slow):
        def encode(self, work):
            is_long = bytes([1] * 12) in [excerpt.pixels for excerpt in work.values()]
            self.part_s, self.num_parts = (10.0, 1) if is_long else (0.01, 100)
            return super().encode(work)

    one = started(rig, engine, model_class=Uneven)
    one.run([stream(), asked("long", 1), asked("brief", 2)], per_step=1)
    did = one.model.did
    first, last = did.index(key_of(2)), len(did) - did[::-1].index(key_of(2))
    assert did[first:last].count("step") <= 10


@ENGINES
@pytest.mark.parametrize("is_image", [False, True])
def test_requests_with_images_are_admitted_as_those_with_text_are(rig, engine, is_image: bool) -> None:
    """Ten prompts of 160 tokens, in 39 pages. Those that wait for an image need pages too."""
    one = started(rig, engine, replace(LIMITS, max_seqs=16, groups=(GroupLimits(40),)))
    most = 0
    for number in range(10):
        image = asked(str(number), number, before=0)
        prompt = (*(image.prompt_ids if is_image else (1,) * len(image.prompt_ids)), *[number + 1] * 160)[:160]
        one.engine.submit(Submit(str(number), prompt, BRIEF, excerpts=image.excerpts if is_image else ()))
    while one.engine.has_work:
        one.step()
        most = max(most, len(one.engine.scheduler.running))
    assert one.engine.scheduler.num_preemptions == 0 and most == 3


@ENGINES
def test_an_image_of_a_batch_beside_streams_of_batches_is_encoded_briefly(rig, engine) -> None:
    """A new request waits for all of it."""
    one = started(rig, engine)
    one.model.part_s, one.model.num_parts = 0.01, 100
    one.run([stream(priority=IDLE), asked("image", 1, priority=IDLE)], per_step=1)
    assert one.model.longest_gap_s < 3 * ALONE_S


@ENGINES
def test_an_image_of_a_batch_is_encoded_even_if_images_of_others_arrive_all_the_time(rig, engine) -> None:
    """Each image takes 6 s; a new one arrives 2 s after the last was answered. The image of the batch is dropped once, not each time."""
    one = started(rig, engine)
    one.engine.submit(asked("batch", 99, priority=IDLE))
    number = 0
    while not num_tokens(one, "batch"):
        number += 1
        assert number < 5, "it starves"
        idle_until = one.model.now_s + 2.0
        one.until(lambda end=idle_until: one.model.now_s >= end)
        one.engine.submit(asked(str(number), number))
        one.until(lambda number=number: num_tokens(one, str(number)) == 4)
    assert one.model.did.count(key_of(99)) < 2 * one.model.num_parts
    one.run()
