"""Images and audio are encoded in parts, between which the engine runs steps: streams never wait for a whole excerpt, other requests go
on, and what nobody waits for any more is not encoded."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import groupby, pairwise

import msgspec
import pytest

from server.engine.loop import LONG_S, Engine
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.pace import ALONE_S, Measured, Pace
from server.engine.step_model import GroupLimits, Heard, SeeingLimits, StepLimits
from server.messages import IDLE, Abort, Audio, Crop, FinishReason, SamplingParams, Submit
from tests.doubles.model import NullModel

ENGINES = pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
IMAGE = 63
SEEING = SeeingLimits(square_bytes=12, edge_tokens=2, token=IMAGE, cost=500)
LIMITS = StepLimits(vocab_size=64, max_context=256, max_tokens=64, max_seqs=8, groups=(GroupLimits(100),), excerpts=(SEEING,))
STEP_S, MAX_GAP_S = 0.01, 1.0
COSTS = Measured({1: STEP_S, 64: 0.1}, excerpts_s={"image": 6.0, "audio": 6.0})
STREAM = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
BRIEF = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Slow(NullModel):
    """A model whose steps and parts take time on a clock of its own. It records what it does and when."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.now_s, self.part_s, self.num_parts = 0.0, 0.25, 24
        self.did: list[str] = []
        self.steps_s: list[float] = []

    def run(self, batch):
        self.now_s += STEP_S if len(batch.tokens) < 8 else 0.1 * len(batch.tokens) / 64
        self.did.append("step")
        self.steps_s.append(self.now_s)
        logits = super().run(batch)
        assert not self.late, "an image was not encoded before its step"
        return logits

    def encode(self, work):
        self.now_s += self.part_s
        self.did.append("heard" if isinstance(work, Heard) else "+".join(key.hex()[-2:] for key in work if not self.is_encoded(key)))
        return super().encode(work)

    @property
    def longest_gap_s(self) -> float:
        return max(later - sooner for sooner, later in pairwise(self.steps_s))


def started(rig, engine=Engine, limits: StepLimits = LIMITS, max_gap_s: float = MAX_GAP_S, model_class: type[Slow] = Slow):
    """Return a rig with a slow model, whose clock is that of the engine."""
    return timed(rig(engine, limits=limits, pace=Pace(limits.max_tokens, COSTS, max_gap_s), model_class=model_class))


def timed(one):
    one.engine._clock = lambda: one.model.now_s
    return one


def asked(name: str, *values: int, before: int = 3, params: SamplingParams = BRIEF, **fields) -> Submit:
    """Return a request about images, each of one square of this value."""
    crops = tuple(Crop.of(bytes([value] * 12), 2, 2) for value in values)
    prompt = [*range(1, before + 1), *(token for _ in crops for token in (*[IMAGE] * 4, 5)), 7]
    return Submit(name, tuple(prompt), params, excerpts=crops, **fields)


def stream(name: str = "stream", **fields) -> Submit:
    return Submit(name, (1, 2, 3), STREAM, **fields)


def num_tokens(one, name: str) -> int:
    return len(one.outcomes[name, 0].token_ids) if (name, 0) in one.outcomes else 0


@ENGINES
@pytest.mark.parametrize("max_gap_s", [1.0, 0.6])
def test_a_stream_waits_at_most_the_gap_while_an_image_is_encoded(rig, engine, max_gap_s: float) -> None:
    """The image takes 6 s."""
    one = started(rig, engine, max_gap_s=max_gap_s)
    one.run([stream(), asked("image", 1)], per_step=1)
    assert one.model.did.count("step") >= 200 and len(one.model.encoded) == 1
    assert 0.25 < one.model.longest_gap_s <= max_gap_s


@ENGINES
def test_parts_that_take_longer_than_the_gap_alternate_with_steps(rig, engine) -> None:
    one = started(rig, engine)
    one.model.part_s = 3.0
    one.run([stream(), asked("image", 1)], per_step=1)
    first, last = one.model.did.index(key_of(1)), len(one.model.did) - one.model.did[::-1].index(key_of(1))
    assert all({sooner, later} == {"step", key_of(1)} for sooner, later in pairwise(one.model.did[first:last]))


def key_of(value: int) -> str:
    return Crop.of(bytes([value] * 12), 2, 2).digest.hex()[-2:]


@ENGINES
def test_a_stream_hardly_slows_the_encoding_down(rig, engine) -> None:
    """Steps take a share of 3 % of the time, unless the gap that is allowed is shorter."""
    one = started(rig, engine, max_gap_s=10.0)
    one.model.part_s, one.model.num_parts = 0.01, 600
    one.run([stream(), asked("image", 1)], per_step=1)
    first, last = one.model.did.index(key_of(1)), len(one.model.did) - one.model.did[::-1].index(key_of(1))
    assert 0.02 < one.model.did[first:last].count("step") / 600 < 0.05


@ENGINES
def test_requests_that_arrive_are_answered_while_an_image_is_encoded(rig, engine) -> None:
    one = started(rig, engine)
    one.model.part_s, one.model.num_parts = 0.01, 1000
    one.engine.submit(asked("image", 1))
    one.steps(3)
    assert one.model.now_s < 10 * ALONE_S, "a step without a stream returns soon"
    one.engine.submit(Submit("text", (1, 2, 3, 4), BRIEF))
    one.until(lambda: ("text", 0) in one.outcomes and one.outcomes["text", 0].end)
    assert not num_tokens(one, "image") and not one.model.encoded
    one.run()
    assert num_tokens(one, "image") == 4


@ENGINES
@pytest.mark.parametrize("streams", [[], [stream()]])
def test_prompts_and_images_share_the_machine(rig, engine, streams: list[Submit]) -> None:
    """Beside prompts that never end, an image of 6 s is encoded in about twice the time, also if streams limit the gap."""
    one = started(rig, engine)
    for submit in (*streams, asked("image", 1)):
        one.engine.submit(submit)
    number = 0
    while not num_tokens(one, "image"):
        number += 1
        one.engine.submit(Submit(f"text {number}", tuple(range(1, 60)), msgspec.structs.replace(BRIEF, max_tokens=1)))
        one.step()
    assert 6.0 < one.model.now_s < 15.0 and one.model.longest_gap_s <= MAX_GAP_S


@ENGINES
def test_answers_do_not_depend_on_when_parts_run(rig, engine) -> None:
    submits = [stream(), asked("a", 1, 2), asked("b", 2, before=40), Submit("text", (9, 8), BRIEF), asked("c", 1, num_choices=2)]
    together = started(rig, engine).run(submits, per_step=1)
    for submit in submits:
        for key, outcome in started(rig).run([submit]).items():
            assert outcome.token_ids == together[key].token_ids


@ENGINES
def test_an_image_of_several_requests_is_encoded_once(rig, engine) -> None:
    one = started(rig, engine)
    one.run([asked("a", 1), asked("b", 1, before=9), asked("c", 1, params=msgspec.structs.replace(BRIEF, max_tokens=9))])
    assert one.model.did.count(key_of(1)) == one.model.num_parts


@ENGINES
def test_an_image_that_the_prefix_cache_covers_is_not_encoded(rig, engine) -> None:
    one = started(rig, engine)
    one.run([asked("a", 1, before=20)])
    one.model.encoded.clear()
    longer = asked("b", 1, before=20)
    one.run([Submit("b", (*longer.prompt_ids, *range(20)), BRIEF, excerpts=longer.excerpts)])
    assert one.num_cached["b"] == 16 and len(one.model.encoded) == 1, "the page ends before the image"
    one.model.encoded.clear()
    one.run([Submit("c", (*longer.prompt_ids, *range(20), 3), BRIEF, excerpts=longer.excerpts)])
    assert one.num_cached["c"] == 32 and not one.model.encoded


@ENGINES
def test_an_aborted_request_drops_its_encoding(rig, engine) -> None:
    one = started(rig, engine)
    one.engine.submit(stream())
    one.engine.submit(asked("gone", 1))
    one.until(lambda: key_of(1) in one.model.did)
    one.engine.abort(Abort("gone"))
    before = one.model.did.count(key_of(1))
    one.run([asked("next", 2)])
    assert one.model.did.count(key_of(1)) == before and one.outcomes["gone", 0].end == (FinishReason.ABORT, None)
    assert one.model.did.count(key_of(2)) == one.model.num_parts and num_tokens(one, "next") == 4


@ENGINES
def test_images_of_ended_requests_are_freed_at_once(rig, engine) -> None:
    """What the engine keeps for the next step, and garbage, may refer to a sequence that has ended, but not to its images."""
    one = started(rig, engine)
    one.run([asked("before", 9)])
    gc.disable()
    try:
        freed = [weakref.ref(Crop.of(bytes(12), 2, 2))]
        for name, values in (("one", (1,)), ("two", (2, 3)), ("aborted", (4,))):
            submit = asked(name, *values, num_choices=2 if name == "two" else 1)
            freed += map(weakref.ref, submit.excerpts)
            one.engine.submit(submit)
            del submit
        one.until(lambda: num_tokens(one, "one") > 1)
        one.engine.abort(Abort("aborted"))
        one.run()
        assert [ref() for ref in freed] == [None] * len(freed)
    finally:
        gc.enable()


@ENGINES
def test_paused_nothing_is_encoded(rig, engine) -> None:
    one = started(rig, engine)
    one.engine.submit(asked("image", 1))
    one.steps(2)
    one.engine.pause(True)
    one.step()  # a step that was planned may still run
    before = len(one.model.did)
    assert not one.step() and len(one.model.did) == before
    one.engine.pause(False)
    assert num_tokens(one, "image") == 0 and one.run()["image", 0].token_ids


@ENGINES
def test_images_of_several_keys_take_turns(rig, engine) -> None:
    one = started(rig, engine)
    flood = [asked(f"flood {number}", number, fairness_key="flood") for number in range(1, 6)]
    one.run([*flood, asked("late", 9, fairness_key="other")])
    order = list(dict.fromkeys(one.model.did))
    assert order.index(key_of(9)) < order.index(key_of(3)), "not after all of the other key"
    assert all(one.model.did.count(key_of(number)) == one.model.num_parts for number in (1, 2, 3, 4, 5, 9)), "nothing was encoded in vain"


@ENGINES
def test_an_image_of_a_better_priority_goes_first(rig, engine) -> None:
    one = started(rig, engine)
    one.engine.submit(asked("later", 1, priority=1))
    one.steps(2)
    one.engine.submit(asked("sooner", 2))
    one.until(lambda: num_tokens(one, "sooner"))
    assert not num_tokens(one, "later")
    one.run()


@ENGINES
def test_a_sequence_that_waits_for_its_image_can_be_preempted(rig, engine) -> None:
    """Streams need its pages. Later it continues, and the parts that have run are not lost."""
    limits = replace(LIMITS, groups=(GroupLimits(16),))
    one = started(rig, engine, limits)
    one.model.part_s, one.model.num_parts = 1.0, 190
    outcomes = one.run([stream("a"), asked("image", 1, before=50)], per_step=1)
    alone = started(rig, engine, LIMITS).run([asked("image", 1, before=50)])
    assert one.engine.scheduler.num_preemptions and outcomes["image", 0].token_ids == alone["image", 0].token_ids
    assert one.model.did.count(key_of(1)) == one.model.num_parts


@ENGINES
def test_an_image_of_a_batch_takes_what_streams_leave(rig, engine) -> None:
    """A part of the image of a batch job takes 0.25 s, so it runs only after 25 s of steps of a stream."""
    one = started(rig, engine)
    one.engine.submit(stream())
    one.steps(20)
    one.engine.submit(asked("batch", 1, priority=IDLE))
    one.steps(150)
    assert one.model.did.count(key_of(1)) <= 1
    one.run()
    assert num_tokens(one, "batch") == 4 and num_tokens(one, "stream") == 200


@ENGINES
def test_an_image_of_a_batch_waits_for_those_of_others(rig, engine) -> None:
    one = started(rig, engine)
    one.engine.submit(asked("batch", 1, priority=IDLE))
    one.steps(2)
    one.engine.submit(asked("other", 2))
    one.until(lambda: num_tokens(one, "other"))
    assert not num_tokens(one, "batch")
    one.run()
    assert num_tokens(one, "batch") == 4


@ENGINES
def test_a_long_encoding_is_announced(rig, engine) -> None:
    one = started(rig, engine)
    one.run([asked("image", 1)])
    assert one.announced_s[0] >= LONG_S and one.announced_s[-1] == 0.0


def test_cheap_excerpts_are_encoded_together(rig) -> None:
    """As many as take no longer than a step; expensive ones take turns with steps."""
    for cost, groups in ((1, ["+".join(map(key_of, (1, 2, 3)))]), (500, [key_of(1), key_of(2), key_of(3)])):
        pace = Pace(64, Measured({1: STEP_S, 64: 0.1}, excerpts_s={"image": cost * 0.1 / 64}), MAX_GAP_S)
        one = timed(rig(limits=LIMITS, pace=pace, model_class=Slow))
        one.run([asked("image", 1, 2, 3)])
        turns = [name for name, _ in groupby(one.model.did)]
        assert turns[: 2 * len(groups)] == [name for group in groups for name in (group, "step")]


# --- models that hear ------------------------------------------------------------------------------------------------------

HOPS = 48
SPOKEN = replace(LIMITS, excerpts=(), groups=(GroupLimits(100), GroupLimits(20, page_size=256)), num_hops=HOPS, hearing_cost=100)


def spoken(name: str, **fields) -> Submit:
    return Submit(name, (1, 2), BRIEF, audio=Audio(bytes(4 * (160 * HOPS + 320)), 0.0), **fields)


@ENGINES
def test_audio_is_heard_in_parts_once_per_request(rig, engine) -> None:
    one = started(rig, engine, SPOKEN)
    long = Submit("stream", (1, 2, 3), STREAM, audio=spoken("stream").audio)
    one.run([long, spoken("a"), spoken("b", num_choices=2)], per_step=1)
    assert one.model.did.count("heard") == 3 * one.model.num_parts
    assert one.model.longest_gap_s <= MAX_GAP_S


@ENGINES
def test_audio_is_heard_again_after_a_preemption(rig, engine) -> None:
    few = replace(SPOKEN, groups=(GroupLimits(15), GroupLimits(20, page_size=256)))
    submits = [msgspec.structs.replace(spoken(name), params=msgspec.structs.replace(BRIEF, max_tokens=120)) for name in "ab"]
    one = started(rig, engine, few)
    outcomes = one.run(submits)
    assert one.engine.scheduler.num_preemptions
    assert one.model.did.count("heard") > 2 * one.model.num_parts
    for submit in submits:
        assert started(rig, engine, SPOKEN).run([submit])[submit.request_id, 0].token_ids == outcomes[submit.request_id, 0].token_ids
