"""Write images into the prompt of a vision model, and hold the decoder of its images.

In texts and prompts, a marker stands for an image until the prompt is rendered. It is the text of the image token, which no text of a
client may contain. Where a token begins an image, the marker is the text of this token, which the chat template writes. Then each marker
becomes the tokens of the image's crops. Idefics3 and SmolVLM were trained with

    a fake token, the place of the crop, its image tokens; a line break after each row of crops; at last the same for the whole image

LFM2-VL was trained with a place before each crop of a large image, too. Others were trained with the image tokens of all crops, and with
texts before, after and between their rows that the family names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.errors import INVALID_VALUE, ApiError
from server.images.cutting import LOW_EDGE, Plan
from server.images.decoder import ImageDecoder, Picture
from server.interfaces import Tokenizer
from server.messages import Fit, Vision

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
THUMBNAIL = "<|img_thumbnail|>"  # of LFM2-VL


@dataclass(frozen=True, slots=True)
class Sight:
    vision: Vision
    marker: str
    image_text: str  # text of the image token
    decoder: ImageDecoder
    begin: str = ""  # text of the token that the tokenizer puts before every text; empty: there is none

    @staticmethod
    def of(vision: Vision, tokenizer: Tokenizer, decoder: ImageDecoder) -> Sight | None:
        """Return what a model sees, or None if its vocabulary lacks the image token or the marker."""
        image = tokenizer.special_texts.get(vision.image_token, b"").decode(errors="replace")
        has_marker = not vision.marker or vision.marker.encode() in tokenizer.special_texts.values()
        if not image or not has_marker:
            return None
        marker = vision.marker or image
        first = tokenizer.encode("", add_special_tokens=True)[:1]
        begin = tokenizer.special_texts.get(first[0], b"").decode(errors="replace") if first else ""
        return Sight(vision, marker, image, decoder, "" if begin in (marker, image) else begin)

    def plan(self, detail: str | None) -> Plan:
        return plan_of(self.vision, detail)

    def expanded(self, prompt: str, pictures: Sequence[Picture]) -> str:
        """Return a prompt with the tokens of each image in place of its marker. A prompt begins with the token that the tokenizer puts
        before texts, even if the template does not write it: that of LLaVA relies on its processor."""
        pieces = prompt.split(self.marker)
        if len(pieces) != len(pictures) + 1:
            message = (
                f"the chat template writes {len(pieces) - 1} images, and the messages have {len(pictures)}: "
                f"put images only where the template shows them, and {self.marker!r} in no text"
            )
            raise ApiError(INVALID_VALUE, message, param="messages")
        found = [pieces[0]]
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            found += [self._written(picture), piece]
        text = "".join(found)
        return text if text.startswith(self.begin) else self.begin + text

    def _written(self, picture: Picture) -> str:
        if self.vision.fit is Fit.MIXED and picture.rows:
            return self._with_places(picture)
        if self.vision.fit is not Fit.TILES:
            begin, end = self.vision.around
            rows = (row for crop in picture.crops for row in [self.image_text * crop.columns] * crop.rows)
            return f"{begin}{self.vision.between.join(rows)}{end}"
        tokens = self.image_text * picture.crops[-1].num_tokens
        rows = [
            "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(picture.columns)) + "\n"
            for row in range(picture.rows)
        ]
        return "".join(rows) + ("\n" if rows else "") + f"{AROUND}{WHOLE}{tokens}{AROUND}"

    def _with_places(self, picture: Picture) -> str:
        """Return the tokens of a large image of LFM2-VL: before each crop stands its place, and maybe the whole follows."""
        begin, end = self.vision.around
        places = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(picture.rows) for column in range(picture.columns)]
        crops = zip([*places, THUMBNAIL], picture.crops, strict=False)
        return f"{begin}{''.join(place + self.image_text * crop.num_tokens for place, crop in crops)}{end}"

    def in_parts(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return messages in which a content with images is a list of parts, as templates expect: texts, and an image for each marker."""
        return [
            {**message, "content": self._parts(content)}
            if isinstance(content := message.get("content"), str) and self.marker in content
            else {**message}
            for message in messages
        ]

    def _parts(self, content: str) -> list[dict[str, str]]:
        first, *others = content.split(self.marker)
        parts = [{"type": "text", "text": first}] if first else []
        for text in others:
            parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        return parts


def plan_of(vision: Vision, detail: str | None = None) -> Plan:
    """Return how an image is cut. With detail `low`, the model sees only the whole, or an image with fewer pixels."""
    is_low = detail == "low"
    splits = vision.splits and not is_low
    low_edge, longest, most = LOW_EDGE * vision.crop_size, vision.longest_edge, vision.most_pixels
    if is_low and vision.fit is Fit.CAPPED:
        longest = min(longest, low_edge)
    if is_low and vision.fit is Fit.FREE:
        most = min(most, low_edge**2)
    if is_low and vision.fit is Fit.FILLED:
        most = max(most // 4, vision.crop_size**2)
    return Plan(
        crop_size=vision.crop_size,
        edge_tokens=vision.edge_tokens,
        fit=vision.fit,
        filter=vision.filter,
        longest_edge=longest,
        splits=splits,
        most_crops=vision.most_crops,
        least_pixels=min(vision.least_pixels, most),
        most_pixels=most,
        least_crops=vision.least_crops,
        shows_whole=vision.shows_whole,
        tile_edge=vision.tile_edge,
        unsplit_pixels=vision.unsplit_pixels,
    )
