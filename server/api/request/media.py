"""Decode the images and recordings of a conversation, and remove their data from its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from server.api.answer.respond import while_connected
from server.api.context import Caller
from server.api.request.prepare import context_of, invalid
from server.api.request.schema import (
    AUDIO_PART,
    IMAGE_PART,
    MEDIA_PARTS,
    AudioUrl,
    ChatBody,
    ContentPart,
    GivenAudio,
    GivenImage,
    ImageUrl,
    Message,
)
from server.api.request.texts import too_long
from server.audio.clip_decoder import HeardRecording
from server.errors import UNSUPPORTED_CONTENT, ApiError
from server.images.decoder import Picture
from server.messages import Excerpt
from server.models.model import Loaded, Model
from server.settings import ServerSettings

Found = Picture | HeardRecording
Place = tuple[str, ContentPart]  # path of an image or of a recording in the request, and its part
MOST_BYTES = 240 << 20  # most bytes of decoded pixels and samples in a request to a worker: an hour of audio has 220 MiB


async def media_of(body: ChatBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> tuple[ChatBody, list[Found]]:
    """Return the conversation without the data of its images and recordings, and the decoded images and recordings in order. Raise ApiError
    if the model does not read images or recordings, if there are too many, if they are too large for the context or for a message to the
    worker, if the request demands that the prompt is truncated, if an image or a recording cannot be decoded, or if the client leaves."""
    places = list(_media_in(body.messages))
    if not places:
        return body, []
    (found,) = await decoded([places], "messages", body.truncate_prompt_tokens, model, loaded, who, settings)
    return without_data(body), found


async def decoded(
    prompts: Sequence[Sequence[Place]],
    param: str,
    truncates: int | None,
    model: Model,
    loaded: Loaded,
    who: Caller,
    settings: ServerSettings,
) -> list[list[Found]]:
    """Return the images and recordings of each prompt of a request. The limits hold for all prompts together, except the context, which
    limits each prompt. `param`: the field with the prompts. `truncates`: the request's `truncate_prompt_tokens`; with images or recordings,
    only None and -1 are accepted. Raise ApiError as `media_of` does."""
    places = [place for prompt in prompts for place in prompt]
    for where, part in places:
        _require_sense(where, part, model, loaded)
    _require_few(places, param, settings)
    if places and truncates not in (None, -1):
        what = _named([part for _, part in places], "audio")
        message = f"truncate_prompt_tokens is given, and the request has {what}, which cannot be truncated; leave one of them out"
        raise invalid("truncate_prompt_tokens", message)
    return await while_connected(who, _decoded(prompts, param, loaded))


async def _decoded(prompts: Sequence[Sequence[Place]], param: str, loaded: Loaded) -> list[list[Found]]:
    """Return the images and recordings of each prompt. Raise ApiError as soon as those of one prompt have more tokens than the context, or
    those of all prompts have more than MOST_BYTES."""
    found: list[list[Found]] = []
    before: list[ContentPart] = []
    num_bytes, context = 0, context_of(loaded)
    for prompt in prompts:
        found.append([])
        for where, part in prompt:
            one = await (_picture(where, part, loaded) if part.type == IMAGE_PART else _recording(where, part, loaded))
            found[-1].append(one)
            before.append(part)
            num_bytes += sum(excerpt.num_bytes for excerpt in excerpts_of([one]))
            what, less = _named(before, "recordings"), "smaller" if part.type == IMAGE_PART else "shorter"
            if (num_tokens := sum(each.num_tokens for each in found[-1])) > context:
                raise too_long(context, f"the {what} up to {where} alone have {num_tokens} tokens", param)
            if num_bytes > MOST_BYTES:
                has = f"the {what} up to {where} have {num_bytes} bytes when they are decoded"
                raise invalid(param, f"{has}; expected at most {MOST_BYTES}: send fewer, or {less} ones")
    return found


def without_data(body: ChatBody) -> ChatBody:
    """Return a conversation without the data of its images and recordings, because the data would count as text."""
    return body.model_copy(update={"messages": [_emptied(message) for message in body.messages]})


def excerpts_of(found: Sequence[Found]) -> tuple[Excerpt, ...]:
    """Return the crops of images and the clips of recordings, in order."""
    return tuple(chain.from_iterable(one.crops if isinstance(one, Picture) else one.clips for one in found))


def _media_in(messages: list[Message]) -> Iterator[Place]:
    """Yield each image and each recording with its path in the request."""
    for number, message in enumerate(messages):
        if isinstance(message.content, list):
            for index, part in enumerate(message.content):
                if part.type in MEDIA_PARTS:
                    is_converted = isinstance(part, GivenImage | GivenAudio)
                    yield part.place if is_converted else f"messages[{number}].content[{index}]", part


def _require_sense(where: str, part: ContentPart, model: Model, loaded: Loaded) -> None:
    """Raise ApiError if the model does not read parts of this kind. `where`: the path of the part in the body."""
    is_image = part.type == IMAGE_PART
    if (loaded.sight if is_image else loaded.ears) is not None:
        return
    if is_image:
        reads = "only reads text" if loaded.ears is None else "reads text and audio"
        message = f"{where} is an image, and model {model.spec.name!r} {reads}; ask a vision model"
    else:
        reads = "only reads text" if loaded.sight is None else "reads text and images"
        message = f"{where} is audio, and model {model.spec.name!r} {reads}; ask a model that hears audio in conversations, such as Voxtral"
    raise ApiError(UNSUPPORTED_CONTENT, message, param=where if isinstance(part, GivenImage | GivenAudio) else f"{where}.type")


def _require_few(places: Sequence[Place], param: str, settings: ServerSettings) -> None:
    """Raise ApiError if there are more images or recordings than the settings allow."""
    num_images = sum(part.type == IMAGE_PART for _, part in places)
    for count, most, names, limit in (
        (num_images, settings.max_images, "images", "max_images"),
        (len(places) - num_images, settings.max_recordings, "recordings", "max_recordings"),
    ):
        if count > most:
            raise invalid(param, f"the request has {count} {names}; expected at most {most} ({limit}): send fewer")


def _named(parts: Sequence[ContentPart], audio: str) -> str:
    """Return the kinds of the parts in words: "images", the word `audio`, or these joined by "and"."""
    kinds = {part.type == IMAGE_PART for part in parts}
    return " and ".join(name for is_image, name in ((True, "images"), (False, audio)) if is_image in kinds)


async def _picture(where: str, part: ContentPart, loaded: Loaded) -> Picture:
    """Decode an image. Raise ApiError if there is no image, or if it cannot be fetched or decoded."""
    assert loaded.sight is not None
    url, detail, param = _given_image(where, part)
    return await loaded.sight.decoder.decode(url, loaded.sight.plan(detail), param)


def _given_image(where: str, part: ContentPart) -> tuple[str, str | None, str]:
    """Return the URL and the detail of an image, and the path of the URL in the request. Raise ApiError if there is no image."""
    found = part.image_url
    if isinstance(found, ImageUrl):
        return found.url, found.detail, f"{where}.image_url.url"
    if found is None:
        raise invalid(f"{where}.image_url", f"{where}.image_url is absent; expected an object with url")
    return (found, part.detail, where) if isinstance(part, GivenImage) else (found, None, f"{where}.image_url")


async def _recording(where: str, part: ContentPart, loaded: Loaded) -> HeardRecording:
    """Decode the recording of a part, given as a file in base64 or as a URL. Raise ApiError if there is no recording, or if it cannot be
    fetched or decoded."""
    assert loaded.ears is not None
    if part.type == AUDIO_PART:
        if part.input_audio is None:
            raise invalid(f"{where}.input_audio", f"{where}.input_audio is absent; expected an object with data and format")
        param = where if isinstance(part, GivenAudio) else f"{where}.input_audio.data"
        given, is_url = part.input_audio.data, False
    else:
        url = part.audio_url
        if url is None:
            raise invalid(f"{where}.audio_url", f"{where}.audio_url is absent; expected an object with url")
        given, param, is_url = (url.url, f"{where}.audio_url.url", True) if isinstance(url, AudioUrl) else (url, f"{where}.audio_url", True)
    return await loaded.ears.decoder.decode(given, loaded.ears.listening, param, is_url=is_url)


def _emptied(message: Message) -> Message:
    """Return a message without the data of its images and recordings."""
    if not isinstance(message.content, list) or all(part.type not in MEDIA_PARTS for part in message.content):
        return message
    parts = [ContentPart(type=part.type) if part.type in MEDIA_PARTS else part for part in message.content]
    return message.model_copy(update={"content": parts})
