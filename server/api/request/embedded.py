"""Separate the images of an embedding request from its texts, and decode them.

An image is an object `{"image": ...}` in `input`, as in Jina's API, or the only part of a conversation, as in vLLM's. The index of its
vector is the index of the image among the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from server.api.answer.respond import while_connected
from server.api.context import Caller
from server.api.request.prepare import invalid
from server.api.request.schema import IMAGE_PART, EmbeddingBody, ImageUrl, InputPart, Message
from server.errors import UNSUPPORTED_CONTENT, ApiError
from server.images.sight import plan_of
from server.messages import Crop
from server.models.model import Loaded, Model
from server.settings import ServerSettings

Item = tuple[str, str, bool]  # path in the request; a text, or the URL or base64 of an image; whether it is an image
BARE = "data:image;base64,"  # makes a URL of base64 that follows


async def separated(
    body: EmbeddingBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings
) -> tuple[EmbeddingBody, dict[int, Crop]]:
    """Return the request with only its texts as `input` and without messages, and its images by the index of their vectors. A request with
    only texts and token ids is returned as it is; if the model embeds no images, so is a request with messages. Raise ApiError if an input
    is not a text or an image, if the request has images and the model embeds none, if there are too many images, if an image cannot be
    decoded, or if the client leaves."""
    items = list(_items(body, loaded))
    if not items:
        return body, {}
    images = [item for item in items if item[2]]
    if images and (loaded.image_decoder is None or loaded.ready.vision is None):
        where = images[0][0]
        text = f"{where} is an image, and model {model.spec.name!r} embeds only texts; ask a model that embeds images, such as CLIP"
        raise ApiError(UNSUPPORTED_CONTENT, text, param=where)
    if len(images) > settings.max_images:
        raise invalid("input", f"input has {len(images)} images; expected at most {settings.max_images} (max_images)")
    crops = await while_connected(who, _crops(items, loaded))
    texts = [content for _, content, is_image in items if not is_image]
    return body.model_copy(update={"input": texts, "messages": None}), crops


def _items(body: EmbeddingBody, loaded: Loaded) -> Iterator[Item]:
    """Yield the inputs of a request; messages are one input. Yield nothing if there are only texts and token ids, which need no separation,
    if the request has messages and the model embeds no images, or if the request has both input and messages, which is refused later. Raise
    ApiError if an object does not have exactly one of text and image, or for the reasons of `_conversation`."""
    if body.messages is not None:
        if body.input is None and loaded.image_decoder is not None:
            yield _conversation(body.messages)
        return
    if not isinstance(body.input, list) or not any(isinstance(part, InputPart) for part in body.input):
        return
    for index, part in enumerate(body.input):
        where = f"input[{index}]"
        if isinstance(part, str):
            yield where, part, False
        elif isinstance(part, InputPart):
            if (part.text is None) == (part.image is None):
                raise invalid(where, f"{where} has {'neither' if part.text is None else 'both'} text and image; expected one of them")
            yield (f"{where}.image", part.image, True) if part.image is not None else (where, part.text or "", False)


def _conversation(messages: list[Message]) -> Item:
    """Return the only image of a conversation, or its texts joined. Raise ApiError if the conversation has several images, both images and
    texts, or a part that is neither an image nor a text."""
    texts: list[str] = []
    images: list[Item] = []
    for number, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        texts += [message.content] if isinstance(message.content, str) else []
        for index, part in enumerate(parts):
            where = f"messages[{number}].content[{index}]"
            if part.text is not None:
                texts.append(part.text)
            elif part.type == IMAGE_PART and part.image_url is not None:
                url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
                images.append((f"{where}.image_url", url, True))
            else:
                raise ApiError(UNSUPPORTED_CONTENT, f"{where}.type is {part.type!r}; expected text or {IMAGE_PART}", param=f"{where}.type")
    if len(images) + bool("".join(texts)) > 1:
        text = f"messages have {len(images)} images and {len(texts)} texts; expected one image or only texts, because each has a vector"
        raise invalid("messages", text)
    return images[0] if images else ("messages", "".join(texts), False)


async def _crops(items: Sequence[Item], loaded: Loaded) -> dict[int, Crop]:
    """Decode the images among the inputs, one after the other. Return their crops, by the index of the image among the inputs."""
    return {index: await _crop(item, loaded) for index, item in enumerate(items) if item[2]}


async def _crop(item: Item, loaded: Loaded) -> Crop:
    """Decode an image, given as a URL or in base64. Raise ApiError if the image cannot be decoded."""
    where, url, _ = item
    assert loaded.image_decoder is not None and loaded.ready.vision is not None
    given = url if ":" in url[:16] else BARE + url
    picture = await loaded.image_decoder.decode(given, plan_of(loaded.ready.vision), where)
    return picture.crops[0]
