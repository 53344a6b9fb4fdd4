"""Embeddings: which texts share a step, how texts and streams alternate, and that an embedding does not depend on its batch. An encoder
only embeds; a decoder embeds while it generates answers for other requests."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import count

import msgspec
import numpy as np
import pytest

from runtime.parts import whole
from server.engine.embed import Embedder
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.pace import ALONE_S, UNKNOWN_S
from server.engine.step_model import EmbedLimits, GroupLimits, SeeingLimits, StepLimits
from server.messages import IDLE, Abort, Crop, Embed, Embedding, ErrorCode, Failed, SamplingParams, Step, Submit
from tests.doubles.model import NullEmbedModel, hashed_logits

LIMITS = EmbedLimits(vocab_size=500, embedding_size=24, max_context=64, max_tokens=100, max_seqs=4)


class CountedModel(NullEmbedModel):
    """A null model that refuses steps beyond its limits and records the length of each text in each step."""

    def __init__(self, limits: EmbedLimits = LIMITS) -> None:
        super().__init__(limits)
        self.sizes: list[list[int]] = []
        self.images: list[int] = []

    def run(self, token_lists, seconds):
        self.sizes.append([len(tokens) for tokens in token_lists])
        return super().run(token_lists, seconds)

    def see(self, crops):
        self.images.append(len(crops))
        return super().see(crops)


@pytest.fixture
def sent() -> dict[str, Embedding | Failed]:
    return {}


@pytest.fixture
def embedder(sent) -> Embedder:
    return Embedder(CountedModel(), answers_to(lambda message: sent.setdefault(message.request_id, message)))


def answers_to(take):
    """Return a function that passes on the answers to requests."""
    return lambda message: None if isinstance(message, Step) else take(message)


def test_the_first_step_is_announced_as_long_because_its_cost_is_unknown() -> None:
    messages = []
    one = Embedder(CountedModel(), messages.append)
    for name in "ab":
        one.embed(Embed(name, (1, 2)))
        assert one.step()
    assert [type(message) for message in messages] == [Step, Embedding, Embedding] and messages[0].limit_s == UNKNOWN_S


def vector(message: Embedding) -> np.ndarray:
    return np.frombuffer(message.vector, "<f4")


def test_vectors_do_not_depend_on_the_batch(embedder, sent) -> None:
    rng = random.Random(0)
    embeds = [Embed(str(i), tuple(rng.randrange(500) for _ in range(rng.randrange(1, 64)))) for i in range(30)]
    for embed in embeds:
        embedder.embed(embed)
    num_steps = 0
    while embedder.has_work:
        assert embedder.step()
        num_steps += 1
    assert num_steps < 30
    for embed in embeds:
        alone: list[Embedding] = []
        one = Embedder(NullEmbedModel(LIMITS), answers_to(alone.append))
        one.embed(embed)
        one.step()
        assert alone == [sent[embed.request_id]]
        assert alone[0].num_tokens == len(embed.prompt_ids)
        assert np.linalg.norm(vector(alone[0])) == pytest.approx(1.0, abs=1e-6)
    assert not embedder.step()


def test_raw_vectors_on_demand(embedder, sent) -> None:
    embedder.embed(Embed("raw", (1, 2), normalize=False))
    embedder.embed(Embed("unit", (1, 2)))
    embedder.step()
    raw, unit = vector(sent["raw"]), vector(sent["unit"])
    assert np.array_equal(raw, NullEmbedModel(LIMITS).run([(1, 2)], [None])[0])
    assert np.allclose(raw / np.linalg.norm(raw), unit)


def test_a_key_with_many_texts_does_not_hold_up_another(embedder, sent) -> None:
    for i in range(200):
        embedder.embed(Embed(f"flood{i}", tuple(range(50)), fairness_key="flood"))
    embedder.step()
    embedder.embed(Embed("late", (1, 2), fairness_key="late"))
    for _ in range(12):
        embedder.step()
    assert "late" in sent


@pytest.mark.parametrize("stray", [-1, 500])
def test_a_token_outside_the_vocabulary_is_refused(stray, embedder, sent) -> None:
    """The step would read another token in its place. A tokenizer may have more tokens than its model."""
    embedder.embed(Embed("bad", (1, stray, 2)))
    embedder.embed(Embed("good", (0, 499)))
    embedder.step()
    assert isinstance(sent["good"], Embedding)
    assert sent["bad"] == Failed("bad", ErrorCode.INVALID_VALUE, f"the text has token {stray}; expected 0 to 499")


SEEING = SeeingLimits(square_bytes=12, edge_tokens=1, token=-1, cost=80)


def test_images_are_embedded_beside_texts(sent) -> None:
    """One image costs so much that no second one fits into the same step."""
    model = CountedModel(replace(LIMITS, seeing=SEEING))
    embedder = Embedder(model, answers_to(lambda message: sent.setdefault(message.request_id, message)))
    crops = [Crop.of(bytes([value] * 12), 1, 1) for value in range(3)]
    for number, crop in enumerate(crops):
        embedder.embed(Embed(f"image {number}", (), crop=crop, normalize=False))
        embedder.embed(Embed(f"text {number}", (number, 2), normalize=False))
    while embedder.has_work:
        assert embedder.step()
    assert model.images == [1, 1, 1]
    for number, crop in enumerate(crops):
        np.testing.assert_array_equal(vector(sent[f"image {number}"]), whole(model.see([crop]))[0])
        np.testing.assert_array_equal(vector(sent[f"text {number}"]), model.run([(number, 2)], [None])[0])


def test_an_image_that_costs_more_than_a_step_delays_no_text(sent) -> None:
    model = CountedModel(replace(LIMITS, seeing=replace(SEEING, cost=1000)))
    embedder = Embedder(model, answers_to(lambda message: sent.setdefault(message.request_id, message)))
    embedder.embed(Embed("image", (), crop=Crop.of(bytes(12), 1, 1)))
    embedder.embed(Embed("text", (1, 2)))
    while embedder.has_work:
        embedder.step()
    assert list(sent) == ["text", "image"] and model.images == [1]


def test_texts_are_embedded_between_the_parts_of_an_image(sent) -> None:
    """Each part takes longer than a step of texts waits for images."""
    clock = count(0.0, 2 * ALONE_S)
    model = CountedModel(replace(LIMITS, seeing=SEEING))
    model.num_parts = 5
    embedder = Embedder(model, answers_to(lambda message: sent.setdefault(message.request_id, message)), lambda: next(clock))
    embedder.embed(Embed("image", (), crop=Crop.of(bytes(12), 1, 1)))
    for number in range(8):
        assert (embedder.step() and "image" not in sent) or number >= model.num_parts - 1
        embedder.embed(Embed(f"text {number}", (number, 2)))
    while embedder.has_work:
        embedder.step()
    assert list(sent).index("text 3") < list(sent).index("image") < list(sent).index("text 7")


def test_an_image_whose_request_is_aborted_is_not_encoded_further(sent) -> None:
    clock = count(0.0, 2 * ALONE_S)
    model = CountedModel(replace(LIMITS, seeing=replace(SEEING, cost=10)))
    model.num_parts = 5
    embedder = Embedder(model, answers_to(lambda message: sent.setdefault(message.request_id, message)), lambda: next(clock))
    for name in ("a", "b"):
        embedder.embed(Embed(name, (), crop=Crop.of(bytes(12), 1, 1)))
    embedder.step()
    embedder.abort(Abort("a"))
    while embedder.has_work:
        embedder.step()
    assert list(sent) == ["b"] and model.images == [2]
    embedder.embed(Embed("c", (), crop=Crop.of(bytes(12), 1, 1)))
    embedder.step()
    embedder.abort(Abort("c"))
    assert not embedder.has_work and not embedder.step() and list(sent) == ["b"]


def test_batch_jobs_wait_for_texts_and_images_of_others(sent) -> None:
    clock = count(0.0, 2 * ALONE_S)
    model = CountedModel(replace(LIMITS, seeing=SEEING))
    model.num_parts = 5
    embedder = Embedder(model, answers_to(lambda message: sent.setdefault(message.request_id, message)), lambda: next(clock))
    crop = Crop.of(bytes(12), 1, 1)
    embedder.embed(Embed("idle image", (), crop=crop, priority=IDLE))
    embedder.embed(Embed("text", (1, 2)))
    embedder.step()
    assert list(sent) == ["text"] and not model.images
    embedder.embed(Embed("image", (), crop=crop))
    embedder.embed(Embed("idle text", (1, 2), priority=IDLE))
    while embedder.has_work:
        embedder.step()
    assert list(sent).index("image") < list(sent).index("idle text") and list(sent).index("image") < list(sent).index("idle image")


def test_images_that_no_model_sees_are_refused(embedder, sent) -> None:
    embedder.embed(Embed("blind", (), crop=Crop.of(bytes(12), 1, 1)))
    assert sent["blind"].message == "this model embeds only texts"
    other = Embedder(CountedModel(replace(LIMITS, seeing=SEEING)), answers_to(lambda message: sent.setdefault(message.request_id, message)))
    other.embed(Embed("small", (), crop=Crop.of(bytes(9), 1, 1)))
    assert sent["small"].message == "a crop has 9 bytes; expected 12"


def test_aborts_deadlines_and_refusals(embedder, sent) -> None:
    embedder.embed(Embed("too long", (1,) * 65))
    embedder.embed(Embed("empty", ()))
    embedder.embed(Embed("expired", (1,), deadline=1.0))
    embedder.embed(Embed("aborted", (1,)))
    embedder.embed(Embed("served", (1,)))
    embedder.abort(Abort("aborted"))
    embedder.abort(Abort("never heard of"))
    while embedder.has_work:
        embedder.step()
    codes = {name: message.code for name, message in sent.items() if isinstance(message, Failed)}
    assert codes == {
        "too long": "context_length_exceeded",
        "empty": "context_length_exceeded",
        "expired": "deadline_exceeded",
    }
    assert isinstance(sent["served"], Embedding) and "aborted" not in sent


def test_an_encoder_pauses_and_generates_nothing(embedder, sent) -> None:
    embedder.embed(Embed("a", (1, 2)))
    embedder.pause(True)
    assert not embedder.step() and embedder.has_work
    embedder.pause(False)
    assert embedder.step() and isinstance(sent["a"], Embedding)
    embedder.submit(Submit("b", (1,), SamplingParams(1)))
    assert sent["b"].code == "not_a_generative_model"


# --- embeddings by decoders ----------------------------------------------------------------------------------------------

SIZE = 24
DECODER = StepLimits(vocab_size=320, max_context=128, max_tokens=48, max_seqs=6, groups=(GroupLimits(40),), embedding_size=SIZE)
ENGINES = pytest.mark.parametrize("engine", [Engine, OverlappedEngine])


def expected(tokens) -> np.ndarray:
    return hashed_logits(SIZE)(np.asarray(tokens, np.int32))


def texts(num: int) -> list[Embed]:
    """Return texts, some longer than a step and some shorter. Every second text begins with the same instruction."""
    rng = random.Random(1)
    instruction = tuple(rng.randrange(320) for _ in range(33))
    return [
        Embed(f"t{i}", instruction * (i % 2) + tuple(rng.randrange(320) for _ in range(rng.choice((1, 15, 16, 40, 90)))), normalize=False)
        for i in range(num)
    ]


@ENGINES
def test_texts_among_streams(rig, engine) -> None:
    submits = [Submit(f"s{i}", tuple(range(1, 30 + i)), SamplingParams(60, seed=i, ignore_eos=True)) for i in range(4)]
    alone = rig(limits=DECODER).run(submits)
    one = rig(engine, limits=DECODER)
    embeds = texts(20)
    for submit in submits:
        one.engine.submit(submit)
    for i in range(200):
        if i < len(embeds):
            one.engine.embed(embeds[i])
        one.step()
    assert one.run() == alone
    for embed in embeds:
        np.testing.assert_array_equal(np.frombuffer(one.embedded[embed.request_id].vector, "<f4"), expected(embed.prompt_ids))
        assert one.embedded[embed.request_id].num_tokens == len(embed.prompt_ids)
    assert one.engine.scheduler.pool.num_found_tokens > 0, "the instruction was computed once"


@ENGINES
def test_a_text_that_ends_early_leaves_nothing(rig, engine) -> None:
    for num_steps in range(5):
        one = rig(engine, limits=DECODER)
        one.engine.embed(Embed("aborted", tuple(range(100))))
        one.engine.embed(Embed("expired", tuple(range(100, 200)), deadline=time.monotonic() + 60))
        one.engine.embed(Embed("kept", (1, 2)))
        for _ in range(num_steps):
            one.step()
        one.engine.abort(Abort("aborted"))
        deadlines = one.engine._requests._deadlines
        deadlines[:] = [(0.0, arrival, name) for _, arrival, name in deadlines]
        one.run()
        assert "kept" in one.embedded and set(one.failed) <= {"expired"}
        assert num_steps > 3 or one.failed["expired"].code == "deadline_exceeded"
        assert num_steps > 2 or "aborted" not in one.embedded


@ENGINES
@pytest.mark.parametrize("num_pages", [40, 12])
def test_each_token_has_a_vector_whatever_runs_beside_it(rig, engine, num_pages) -> None:
    """A request for a vector per token gets the right vectors, even if the text has more tokens than a step has rows, begins with a cached
    prefix, shares steps with streams, or is preempted."""
    limits = replace(DECODER, groups=(GroupLimits(num_pages),))
    submits = [Submit(f"s{i}", tuple(range(1, 30 + i)), SamplingParams(60, seed=i, ignore_eos=True)) for i in range(3)]
    alone = rig(limits=limits).run(submits)
    one = rig(engine, limits=limits)
    embeds = [msgspec.structs.replace(embed, per_token=i % 3 != 2) for i, embed in enumerate(texts(12))]
    for submit in submits:
        one.engine.submit(submit)
    for i in range(100):
        if i < len(embeds):
            one.engine.embed(embeds[i])
        one.step()
    assert one.run() == alone
    for embed in embeds:
        found = np.frombuffer(one.embedded[embed.request_id].vector, "<f4").reshape(-1, SIZE)
        ends = range(1, len(embed.prompt_ids) + 1) if embed.per_token else [len(embed.prompt_ids)]
        np.testing.assert_array_equal(found, [expected(embed.prompt_ids[:end]) for end in ends])
    assert num_pages == 40 or one.engine.scheduler.num_preemptions > 0, "nothing was preempted"


def test_the_vectors_of_tokens_have_length_one_each(rig) -> None:
    one = rig(limits=DECODER)
    one.engine.embed(Embed("a", (1, 2, 3), per_token=True))
    one.run()
    rows = np.frombuffer(one.embedded["a"].vector, "<f4").reshape(3, SIZE)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1.0, abs=1e-6)


def test_an_encoder_has_no_vectors_of_tokens(embedder, sent) -> None:
    embedder.embed(Embed("a", (1, 2), per_token=True))
    assert sent["a"].code == "not_an_embedding_model" and not embedder.has_work


def test_a_text_that_cannot_be_embedded_is_refused_by_name(rig) -> None:
    one = rig(limits=DECODER)
    one.run([])
    for embed in (Embed("long", (1,) * 129), Embed("empty", ()), Embed("odd", (320,))):
        one.engine.embed(embed)
    assert {name: failed.code for name, failed in one.failed.items()} == {
        "long": "context_length_exceeded",
        "empty": "invalid_value",
        "odd": "invalid_value",
    }
    one.engine.embed(Embed("full", (1,) * 128))
    one.run()
    assert "full" in one.embedded
    generator = rig()
    generator.engine.embed(Embed("a", (1,)))
    assert generator.failed["a"].code == "not_an_embedding_model"
    embedder = rig(limits=StepLimits(320, 128, 48, 6, (GroupLimits(40),), embedding_size=SIZE, generates=False))
    embedder.run([Submit("a", (1,), SamplingParams(1))])
    assert embedder.failed["a"].code == "not_a_generative_model"


def test_texts_are_unit_vectors_unless_asked_otherwise(rig) -> None:
    one = rig(limits=DECODER)
    one.engine.embed(Embed("unit", (1, 2)))
    one.run()
    assert np.linalg.norm(np.frombuffer(one.embedded["unit"].vector, "<f4")) == pytest.approx(1.0, abs=1e-6)


def test_texts_share_pages_only_within_a_tenant(rig) -> None:
    """A decoder that embeds reuses pages of the same salt only."""
    num_tokens = []
    for salt in ("victim:", "spy:"):
        one = rig(limits=DECODER)
        one.engine.embed(Embed("first", tuple(range(1, 65)), cache_salt="victim:"))
        one.run()
        before = one.engine.stats().num_step_tokens
        one.engine.embed(Embed("second", tuple(range(1, 65)), cache_salt=salt))
        one.run()
        num_tokens.append(one.engine.stats().num_step_tokens - before)
    assert num_tokens == [16, 64]
