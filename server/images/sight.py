"""Write the image tokens of images into the prompt of a vision model.

A marker stands for an image until the prompt is rendered (`server/text/media.py`): the text of the image token or, if the model has a token
that begins an image, the text of that token. Then each marker becomes the tokens of the image's crops, in the form that the model was
trained with:

    Idefics3, SmolVLM   for each crop AROUND, its row and column, its image tokens; a line break after each row of crops; the whole image
    LFM2-VL             a token with the row and column before each tile of a large image, and THUMBNAIL before the whole image
    Llama 4             the image tokens of each crop, BESIDE between two crops of a row, BELOW after each row; the marker; the whole image
    other models        the image tokens of all crops, with texts before, after and between the rows of tokens that the family defines
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runtime.fits import Canvas, Mixed, Tiles
from server.images.cutting import Plan
from server.images.decoder import ImageDecoder, Picture
from server.interfaces import Tokenizer
from server.messages import Vision
from server.text.media import Markers

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
BESIDE, BELOW = "<|tile_x_separator|>", "<|tile_y_separator|>"
THUMBNAIL = "<|img_thumbnail|>"  # precedes the whole image in prompts for LFM2-VL


@dataclass(frozen=True, slots=True)
class Sight:
    """How a model sees images, and how they are written into its prompt."""

    reads: ClassVar = Picture  # class of a decoded image
    vision: Vision
    image_text: str  # text of the image token
    decoder: ImageDecoder
    markers: Markers

    @staticmethod
    def of(vision: Vision, tokenizer: Tokenizer, decoder: ImageDecoder) -> Sight | None:
        """Return the Sight of a model, or None if its vocabulary lacks the image token or the marker."""
        found = texts_of(vision.image_token, vision.marker, tokenizer)
        return None if found is None else Sight(vision, found[0], decoder, found[1])

    @property
    def marker(self) -> str:
        """The text that stands for an image until the prompt is rendered."""
        return self.markers.marker

    def plan(self, detail: str | None) -> Plan:
        """Return how an image is cut. `detail` is the resolution that the client asks for, such as `low`."""
        return plan_of(self.vision, detail)

    def written(self, picture: Picture) -> str:
        """Return the tokens of an image, with the texts around and between them."""
        fit = self.vision.fit
        if isinstance(fit, Mixed) and picture.rows:
            return self._with_places(picture)
        if isinstance(fit, Canvas):
            return self._on_canvas(picture)
        if not isinstance(fit, Tiles):
            begin, end = self.vision.around
            rows = (row for crop in picture.crops for row in [self.image_text * crop.columns] * crop.rows)
            return f"{begin}{self.vision.between.join(rows)}{end}"
        tokens = self.image_text * picture.crops[-1].num_tokens
        rows = [
            "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(picture.columns)) + "\n"
            for row in range(picture.rows)
        ]
        return "".join(rows) + ("\n" if rows else "") + f"{AROUND}{WHOLE}{tokens}{AROUND}"

    def _on_canvas(self, picture: Picture) -> str:
        """Return the tokens of an image for Llama 4. All crops have the same number of tokens."""
        begin, end = self.vision.around
        tokens = self.image_text * picture.crops[-1].num_tokens
        return f"{begin}{(BESIDE.join([tokens] * picture.columns) + BELOW) * picture.rows}{self.marker}{tokens}{end}"

    def _with_places(self, picture: Picture) -> str:
        """Return the tokens of a large image for LFM2-VL: each tile after its row and column, then the whole image, if it is shown."""
        begin, end = self.vision.around
        places = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(picture.rows) for column in range(picture.columns)]
        crops = zip([*places, THUMBNAIL], picture.crops, strict=False)
        return f"{begin}{''.join(place + self.image_text * crop.num_tokens for place, crop in crops)}{end}"


def texts_of(image_token: int, marker: str, tokenizer: Tokenizer) -> tuple[str, Markers] | None:
    """Return the text of the image token and the markers, or None if the vocabulary lacks one of them. `marker` is empty if the image token
    itself is the marker."""
    image = tokenizer.special_texts.get(image_token, b"").decode(errors="replace")
    has_marker = not marker or marker.encode() in tokenizer.special_texts.values()
    if not image or not has_marker:
        return None
    marker = marker or image
    first = tokenizer.encode("", add_special_tokens=True)[:1]
    begin = tokenizer.special_texts.get(first[0], b"").decode(errors="replace") if first else ""
    return image, Markers(marker, "image", "images", "" if begin in (marker, image) else begin)


def plan_of(vision: Vision, detail: str | None = None) -> Plan:
    """Return how an image is cut. With detail `low`, an image is one crop, or is scaled to fewer pixels."""
    fit = vision.fit.low(vision.crop_size) if detail == "low" else vision.fit
    return Plan(vision.crop_size, vision.edge_tokens, fit, vision.filter)
