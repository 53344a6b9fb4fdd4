"""The images of a conversation: decode them, and leave their places in the messages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from server.api.request.prepare import context_of, invalid
from server.api.request.schema import IMAGE_PART, ChatBody, ContentPart, GivenImage, ImageUrl, Message
from server.api.request.texts import too_long
from server.errors import UNSUPPORTED_CONTENT, ApiError
from server.images.decoder import Picture
from server.messages import Crop
from server.models.model import Loaded, Model
from server.settings import ServerSettings


async def pictures_of(body: ChatBody, model: Model, loaded: Loaded, settings: ServerSettings) -> tuple[ChatBody, list[Picture]]:
    """Return the conversation with empty places for its images, and the images in order. Raise ApiError if the model sees none, or if an
    image cannot be decoded."""
    places = list(_images_in(body.messages))
    if not places:
        return body, []
    if (sight := loaded.sight) is None:
        where = places[0][0]
        message = f"{where} is an image, and model {model.spec.name!r} only reads text; ask a vision model"
        raise ApiError(UNSUPPORTED_CONTENT, message, param=where if isinstance(places[0][1], GivenImage) else f"{where}.type")
    if len(places) > settings.max_images:
        raise invalid("messages", f"messages have {len(places)} images; expected at most {settings.max_images} (max_images)")
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens is given, and the messages have images, which cannot be truncated")
    pictures: list[Picture] = []
    num_tokens, context = 0, context_of(loaded)
    for where, part in places:
        url, detail, param = _given(where, part)
        pictures.append(await sight.decoder.decode(url, sight.plan(detail), param))
        num_tokens += pictures[-1].num_tokens
        if num_tokens > context:
            raise too_long(context, f"the images up to {where} alone have {num_tokens} tokens", "messages")
    return body.model_copy(update={"messages": [_emptied(message) for message in body.messages]}), pictures


def crops_of(pictures: list[Picture]) -> tuple[Crop, ...]:
    return tuple(chain.from_iterable(picture.crops for picture in pictures))


def _images_in(messages: list[Message]) -> Iterator[tuple[str, ContentPart]]:
    """Yield each image with its path in the request."""
    for number, message in enumerate(messages):
        if isinstance(message.content, list):
            for index, part in enumerate(message.content):
                if part.type == IMAGE_PART:
                    yield part.place if isinstance(part, GivenImage) else f"messages[{number}].content[{index}]", part


def _given(where: str, part: ContentPart) -> tuple[str, str | None, str]:
    """Return the URL and the detail of an image, and the path of the URL in the request."""
    found = part.image_url
    if isinstance(found, ImageUrl):
        return found.url, found.detail, f"{where}.image_url.url"
    if found is None:
        raise invalid(f"{where}.image_url", f"{where}.image_url is absent; expected an object with url")
    return (found, part.detail, where) if isinstance(part, GivenImage) else (found, None, f"{where}.image_url")


def _emptied(message: Message) -> Message:
    """Return a message without the data of its images, which would count as text."""
    if not isinstance(message.content, list) or all(part.type != IMAGE_PART for part in message.content):
        return message
    parts = [ContentPart(type=IMAGE_PART) if part.type == IMAGE_PART else part for part in message.content]
    return message.model_copy(update={"content": parts})
