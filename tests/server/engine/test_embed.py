"""Texts are batched by tokens, in turns, and a vector does not depend on the batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.device.null import NullEmbedModel
from runtime.step import EmbedLimits
from server.engine.embed import Embedder
from server.messages import Embed, Embedding, Failed

LIMITS = EmbedLimits(embedding_size=24, max_context=64, max_tokens=100, max_seqs=4)


class CountedModel(NullEmbedModel):
    """The null model refuses a step that is too large; this one also remembers the sizes."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.sizes: list[list[int]] = []

    def run(self, token_lists):
        self.sizes.append([len(tokens) for tokens in token_lists])
        return super().run(token_lists)


@pytest.fixture
def told() -> dict[str, Embedding | Failed]:
    return {}


@pytest.fixture
def embedder(told) -> Embedder:
    return Embedder(CountedModel(), lambda message: told.setdefault(message.request_id, message))


def vector(message: Embedding) -> np.ndarray:
    return np.frombuffer(message.vector, "<f4")


def test_vectors_do_not_depend_on_the_batch(embedder, told) -> None:
    rng = random.Random(0)
    embeds = [Embed(str(i), tuple(rng.randrange(500) for _ in range(rng.randrange(1, 64)))) for i in range(30)]
    for embed in embeds:
        embedder.submit(embed)
    num_steps = 0
    while embedder.has_work:
        assert embedder.step()
        num_steps += 1
    assert num_steps < 30
    for embed in embeds:
        alone: list[Embedding] = []
        one = Embedder(NullEmbedModel(LIMITS), alone.append)
        one.submit(embed)
        one.step()
        assert alone == [told[embed.request_id]]
        assert alone[0].num_tokens == len(embed.prompt_ids)
        assert np.linalg.norm(vector(alone[0])) == pytest.approx(1.0, abs=1e-6)
    assert not embedder.step()


def test_raw_vectors_on_demand(embedder, told) -> None:
    embedder.submit(Embed("raw", (1, 2), normalize=False))
    embedder.submit(Embed("unit", (1, 2)))
    embedder.step()
    raw, unit = vector(told["raw"]), vector(told["unit"])
    assert np.array_equal(raw, NullEmbedModel(LIMITS).run([(1, 2)])[0])
    assert np.allclose(raw / np.linalg.norm(raw), unit)


def test_a_key_with_many_texts_does_not_hold_up_another(embedder, told) -> None:
    for i in range(200):
        embedder.submit(Embed(f"flood{i}", tuple(range(50)), fairness_key="flood"))
    embedder.step()
    embedder.submit(Embed("late", (1, 2), fairness_key="late"))
    for _ in range(12):
        embedder.step()
    assert "late" in told


def test_aborts_deadlines_and_refusals(embedder, told) -> None:
    embedder.submit(Embed("too long", (1,) * 65))
    embedder.submit(Embed("empty", ()))
    embedder.submit(Embed("expired", (1,), deadline=1.0))
    embedder.submit(Embed("aborted", (1,)))
    embedder.submit(Embed("served", (1,)))
    embedder.abort("aborted")
    embedder.abort("never heard of")
    while embedder.has_work:
        embedder.step()
    codes = {name: message.code for name, message in told.items() if isinstance(message, Failed)}
    assert codes == {
        "too long": "context_length_exceeded",
        "empty": "context_length_exceeded",
        "expired": "deadline_exceeded",
    }
    assert isinstance(told["served"], Embedding) and "aborted" not in told
