"""Rows of excerpts are kept under their keys, whether they were encoded in parts or with the step that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deploy.model_loading import excerpts
from deploy.model_loading.excerpts import BothEncoders, ExcerptEncoder, Rows
from runtime.parts import InParts
from server.engine.step_model import ExcerptTokens
from server.messages import Clip, Crop, Excerpt

SIZE = 4


class Fake(ExcerptEncoder):
    """Encodes an excerpt in three parts. Each row is the first byte of the excerpt."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.encoded: list[int] = []

    def rows_of(self, excerpts: Sequence[Crop | Clip]) -> InParts[list[Rows]]:
        found: list[Rows] = []
        for one in excerpts:
            yield
            yield
            value = (one.pixels if isinstance(one, Crop) else one.samples)[0]
            self.encoded.append(value)
            found.append(np.full((one.num_tokens, SIZE), value, np.float32))
        return found


def crop(value: int, num_tokens: int = 2) -> Crop:
    return Crop.of(bytes([value]), 1, num_tokens)


def seen(*values: int) -> list[ExcerptTokens]:
    return [ExcerptTokens(crop(value), b"%d" % value, 2 * number, 0, 2) for number, value in enumerate(values)]


def wanted(*values: int) -> dict[bytes, Excerpt]:
    return {b"%d" % value: crop(value) for value in values}


def test_rows_are_there_after_the_last_part() -> None:
    encoder = Fake()
    assert [encoder.encode(wanted(1, 2)) for _ in range(5)] == [False, False, False, False, True]
    assert encoder.is_encoded(b"1") and encoder.is_encoded(b"2") and not encoder.is_encoded(b"3")
    at, rows = encoder.look(seen(2, 1))
    assert at.tolist() == [0, 1, 2, 3] and rows[:, 0].tolist() == [2, 2, 1, 1] and encoder.encoded == [1, 2]


def test_a_step_encodes_what_is_missing() -> None:
    encoder = Fake()
    encoder.encode(wanted(3))
    assert encoder.look(seen(1, 2, 1))[1][:, 0].tolist() == [1, 1, 2, 2, 1, 1] and encoder.encoded == [1, 2]
    assert [encoder.encode(wanted(3)) for _ in range(3)] == [False, False, True], "it begins anew"
    assert encoder.look([])[0].size == 0


def test_the_least_recently_used_rows_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excerpts, "KEPT_BYTES", 3 * 2 * SIZE * 4)
    encoder = Fake()
    encoder.look(seen(1, 2, 3))
    encoder.look(seen(1))
    while not encoder.encode(wanted(4)):
        pass
    assert [encoder.is_encoded(b"%d" % value) for value in (1, 2, 3, 4)] == [True, False, True, True]
    assert encoder.look(seen(1, 2, 3, 4, 5))[1][:, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    while not encoder.encode(wanted(6)):
        pass
    assert encoder.is_encoded(b"6") and not encoder.is_encoded(b"1")


def test_spared_rows_are_kept_until_others_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excerpts, "KEPT_BYTES", 2 * SIZE * 4)
    encoder = Fake()
    encoder.look(seen(1))
    encoder.spare([b"1", b"2"])
    for value in (2, 3, 4):
        encoder.look(seen(value))
    assert [encoder.is_encoded(b"%d" % value) for value in (1, 2, 3, 4)] == [True, True, False, True]
    encoder.spare([b"2"])
    encoder.look(seen(5))
    assert [encoder.is_encoded(b"%d" % value) for value in (1, 2, 5)] == [False, True, True]


def test_what_is_dropped_loses_only_the_excerpt_that_has_begun() -> None:
    encoder = Fake()
    assert not any(encoder.encode(wanted(1, 2)) for _ in range(4))
    while not encoder.encode(wanted(3)):
        pass
    while not encoder.encode(wanted(1, 2)):
        pass
    assert encoder.encoded == [1, 3, 2]


def test_each_kind_has_its_encoder() -> None:
    images, sounds = Fake(), Fake()
    both = BothEncoders(SIZE, {Crop: images, Clip: sounds})
    mixed = {b"a": Clip.of(bytes([7]), 0.0, 1, 1), b"b": crop(8), b"c": crop(9), b"d": Clip.of(bytes([6]), 0.0, 1, 1)}
    while not both.encode(mixed):
        pass
    assert (sounds.encoded, images.encoded) == ([7, 6], [8, 9])
    assert [both._kept[key][0, 0] for key in mixed] == [7, 8, 9, 6]
