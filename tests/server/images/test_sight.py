"""Images are written into prompts as models were trained, and nothing that a client writes can take the place of an image."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
from msgspec.structs import replace

from runtime.fits import Canvas, Capped, Filled, Fit, Free, Grid, Mixed, Stretched, Tiles
from server.errors import ApiError
from server.images.decoder import ImageDecoder, Picture
from server.images.sight import Sight
from server.interfaces import Tokenizer
from server.messages import Crop, Vision
from server.text.media import Markers, Senses
from tests.server.images.files import NOWHERE

VISION = Vision(crop_size=8, edge_tokens=2, image_token=3, fit=Tiles(longest_edge=16), filter=1)
DECODER = ImageDecoder(1, 1 << 30, NOWHERE)
SIGHT = Sight(VISION, "<image>", DECODER, Markers("<image>", "image", "images"))
CROP = Crop.of(b"", 1, 2)


def expanded(sight: Sight, prompt: str, pictures: list[Picture]) -> str:
    """Return a prompt with the tokens of images in place of their markers."""
    return Senses((sight,)).filled(prompt, pictures)[0]


def test_an_image_in_parts_is_written_row_by_row() -> None:
    found = expanded(SIGHT, "a<image>b", [Picture(2, 1, [CROP] * 3)])
    row = "<fake_token_around_image><row_{}_col_1><image><image>\n"
    whole = "\n<fake_token_around_image><global-img><image><image><fake_token_around_image>"
    assert found == "a" + row.format(1) + row.format(2) + whole + "b"


def test_an_image_of_one_crop_is_only_the_whole() -> None:
    found = expanded(SIGHT, "<image>", [Picture(0, 0, [CROP])])
    assert found == "<fake_token_around_image><global-img><image><image><fake_token_around_image>"


class Words:
    special_texts: ClassVar = {1: b"<s>", 3: b"<soft>", 4: b"<begin>", 5: b"<end>"}
    begin: ClassVar[list[int]] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.begin if add_special_tokens else []


class WordsAfterBegin(Words):
    begin: ClassVar = [1]


MIXED = Mixed(least_pixels=0, most_pixels=280 * 64, splits=True, least_crops=2, most_crops=4, tile_edge=8, unsplit_pixels=64)
AROUND = {"marker": "<begin>", "around": ("-<begin>", "<end>-")}


def sight_of(**changes: Any) -> Sight | None:
    return Sight.of(replace(VISION, **{"fit": Stretched(), **changes}), cast("Tokenizer", Words()), DECODER)


def test_texts_around_an_image_are_written() -> None:
    sight = sight_of(**AROUND)
    assert sight is not None and sight.marker == "<begin>"
    assert expanded(sight, "a<begin>b", [Picture(0, 0, [CROP])]) == "a-<begin><soft><soft><end>-b"


def test_without_texts_around_an_image_there_are_only_its_tokens() -> None:
    sight = sight_of()
    assert sight is not None and expanded(sight, "a<soft>b", [Picture(0, 0, [CROP])]) == "a<soft><soft>b"


def test_a_token_stands_between_rows_of_an_image() -> None:
    sight = sight_of(fit=Capped(24), between="<break>", around=("", "<end>"))
    assert sight is not None and expanded(sight, "a<soft>b", [Picture(0, 0, [Crop.of(b"", 3, 2)])]) == (
        "a<soft><soft><break><soft><soft><break><soft><soft><end>b"
    )


def test_a_large_image_of_lfm2_names_the_places_of_its_crops() -> None:
    sight = sight_of(fit=MIXED, edge_tokens=1, around=("<begin>", "<end>"))
    assert sight is not None
    whole, places = Crop.of(b"", 1, 1), [f"<|img_row_{row}_col_1|><soft><soft>" for row in (1, 2)]
    assert expanded(sight, "<soft>", [Picture(2, 1, [CROP, CROP, whole])]) == f"<begin>{''.join(places)}<|img_thumbnail|><soft><end>"
    assert expanded(sight, "<soft>", [Picture(2, 1, [CROP, CROP])]) == f"<begin>{''.join(places)}<end>"
    assert expanded(sight, "<soft>", [Picture(0, 0, [CROP])]) == "<begin><soft><soft><end>"


def test_the_crops_of_a_grid_follow_each_other() -> None:
    sight = sight_of(fit=Grid(most_crops=4), **AROUND)
    assert sight is not None and expanded(sight, "<begin>", [Picture(1, 2, [CROP] * 3)]) == f"-<begin>{'<soft>' * 6}<end>-"


def test_a_prompt_begins_with_the_token_that_the_tokenizer_puts_before_texts() -> None:
    sight = Sight.of(VISION, cast("Tokenizer", WordsAfterBegin()), DECODER)
    assert sight is not None
    assert [expanded(sight, text, []) for text in ("USER: a", "<s>USER: a")] == ["<s>USER: a"] * 2


@pytest.mark.parametrize("changes", [{"image_token": 9}, {"marker": "<start>"}])
def test_a_vocabulary_without_a_token_of_images_shows_none(changes: dict[str, Any]) -> None:
    assert sight_of(**changes) is None


@pytest.mark.parametrize("prompt", ["", "<image>", "<image><image><image>"])
def test_a_template_that_writes_another_number_of_images_is_refused(prompt: str) -> None:
    with pytest.raises(ApiError, match="the messages have 2") as caught:
        expanded(SIGHT, prompt, [Picture(0, 0, [CROP])] * 2)
    assert caught.value.param == "messages"


def test_only_contents_with_images_become_parts() -> None:
    messages = [{"role": "user", "content": "a<image><image>b"}, {"role": "assistant", "content": "c"}, {"role": "tool", "content": None}]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert Senses((SIGHT,)).in_parts(messages) == [{"role": "user", "content": parts}, *messages[1:]]


def test_an_image_on_a_canvas_has_separators_between_its_crops() -> None:
    sight = sight_of(fit=Canvas(most_crops=4), marker="<begin>", around=("<start>", "<end>"))
    assert sight is not None
    row = "<soft><soft><|tile_x_separator|><soft><soft><|tile_y_separator|>"
    assert expanded(sight, "a<begin>b", [Picture(2, 2, [CROP] * 5)]) == f"a<start>{row}{row}<begin><soft><soft><end>b"
    assert expanded(sight, "<begin>", [Picture(0, 0, [CROP])]) == "<start><begin><soft><soft><end>"


@pytest.mark.parametrize("fit", [Tiles(longest_edge=16), Grid(most_crops=4), Canvas(most_crops=4), MIXED], ids=str)
def test_detail_low_does_not_split(fit: Fit) -> None:
    sight = sight_of(fit=fit)
    assert sight is not None
    assert [sight.plan(detail).fit for detail in (None, "auto", "high", "low")] == [fit, fit, fit, replace(fit, splits=False)]


@pytest.mark.parametrize(
    ("fit", "low"),
    [
        (Free(least_pixels=5 * 64, most_pixels=1000 * 64), Free(least_pixels=5 * 64, most_pixels=256 * 64)),
        (Free(least_pixels=500 * 64, most_pixels=1000 * 64), Free(least_pixels=256 * 64, most_pixels=256 * 64)),
        (Capped(800), Capped(16 * 8)),
        (Filled(280 * 64), Filled(70 * 64)),
        (Stretched(), Stretched()),
    ],
    ids=str,
)
def test_detail_low_shows_fewer_pixels_of_an_image_of_any_size(fit: Fit, low: Fit) -> None:
    sight = sight_of(fit=fit, edge_tokens=1)
    assert sight is not None
    assert [sight.plan(detail).fit for detail in ("high", "low")] == [fit, low]
