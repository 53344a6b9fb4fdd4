"""Read the images and recordings of llama.cpp's completions. A prompt with files is an object: a text with markers, and a file for each
marker."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from server.api.answer.generate import Job
from server.api.context import Caller
from server.api.llama_cpp.body import LlamaCompletionBody, MediaPrompt
from server.api.openai.chat import markers_of
from server.api.openai.completions import check_num_choices
from server.api.request.conversation import text_of
from server.api.request.media import Found, Place, decoded, excerpts_of
from server.api.request.prepare import context_of, invalid, off_loop, require_generator
from server.api.request.schema import ContentPart, GivenAudio, GivenImage, InputAudio
from server.api.request.texts import encode_prompts
from server.audio.compressed import format_of
from server.audio.wav import is_wav
from server.errors import TEMPLATE_NOT_RENDERED, ApiError
from server.images.decoding import begins_image
from server.messages import Excerpt
from server.models.model import Loaded, Model
from server.settings import ServerSettings
from server.text.templates.errors import TemplateError, TemplateUnavailable

MARKER = "<__media__>"  # stands for a file in a text; /props reports this marker
HEAD_CHARS = 24  # characters of a file in base64 that are decoded to find its format
EARLIER, LATER = "earlier", "later"  # texts of a test message, between which the chat template shows a file


@dataclass(frozen=True, slots=True)
class WrittenPrompts:
    """The prompts of a request in the form that completions take, and the images and recordings of each prompt, as excerpts."""

    prompts: object  # a text, token ids, or a list of texts and of lists of token ids
    excerpts: tuple[tuple[Excerpt, ...], ...] = ()  # empty: no prompt has files

    def given(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs of the prompts with their excerpts."""
        if not self.excerpts:
            return jobs
        pairs = zip(jobs, self.excerpts, strict=True)
        return [replace(job, submit=msgspec.structs.replace(job.submit, excerpts=excerpts)) for job, excerpts in pairs]


@dataclass(frozen=True, slots=True)
class _Divided:
    """A prompt with files: texts and files in turn. The first and the last part are texts."""

    where: str  # path of the prompt's text in the request
    texts: list[str]
    files: list[Place]


Around = Mapping[str, tuple[str, str]]  # special tokens before and after a file, by the type of the file's content part


async def with_media(body: LlamaCompletionBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> WrittenPrompts:
    """Return the prompts of a request. An object with files becomes token ids, with the tokens of its images and recordings; an object
    without files becomes its text. Raise ApiError if there are too many prompts, if a prompt has more or fewer markers than files, or for
    the reasons of `media_of`."""
    is_one = isinstance(body.prompt, MediaPrompt)
    prompts: list[object] = [body.prompt] if is_one else list(body.prompt) if isinstance(body.prompt, list) else []
    if not any(isinstance(prompt, MediaPrompt) for prompt in prompts):
        return WrittenPrompts(body.prompt)
    require_generator(model, loaded)
    check_num_choices(len(prompts) * (body.n_cmpl or 1), settings)
    divided: dict[int, _Divided] = {}
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, MediaPrompt):
            continue
        if prompt.multimodal_data or MARKER in prompt.prompt_string:
            divided[index] = _divided(prompt, "prompt" if is_one else f"prompt[{index}]", loaded)
        else:
            prompts[index] = prompt.prompt_string
    files = [one.files for one in divided.values()]
    media = await decoded(files, "prompt", body.truncate_prompt_tokens, model, loaded, who, settings)
    around = await _around({part.type for one in files for _, part in one}, loaded)
    excerpts: list[tuple[Excerpt, ...]] = [()] * len(prompts)
    for (index, one), found in zip(divided.items(), media, strict=True):
        prompts[index], excerpts[index] = await _written(one, found, around, loaded)
    return WrittenPrompts(prompts, tuple(excerpts))


async def _written(one: _Divided, found: Sequence[Found], around: Around, loaded: Loaded) -> tuple[list[int], tuple[Excerpt, ...]]:
    """Return the tokens of a prompt, and the excerpts of its files. `one` is the prompt, and `found` has its decoded files in order. The
    tokenizer puts its special tokens around the text, unless the text begins already with the special token that a prompt with files
    needs."""
    text, ordered = loaded.senses.filled(_joined(one, around, loaded), found)
    begins = any(sense.markers.begin and text.startswith(sense.markers.begin) for sense in loaded.senses.senses)
    encode = partial(encode_prompts, [text], loaded.tokenizer, one.where, special=not begins, context=context_of(loaded))
    (ids,) = await off_loop(len(text), encode)
    return ids, excerpts_of(ordered)


def _divided(prompt: MediaPrompt, where: str, loaded: Loaded) -> _Divided:
    """Divide a prompt at its markers. `where` is the path of the prompt in the request. Raise ApiError if the prompt has more or fewer
    files than markers, or if its text has a marker that the model's template uses."""
    files, text_at = prompt.multimodal_data or [], f"{where}.prompt_string"
    texts = text_of(prompt.prompt_string, text_at, markers_of(loaded)).split(MARKER)
    if len(texts) != len(files) + 1:
        have = f"{where} has {len(texts) - 1} of the marker {MARKER} and {len(files)} files in multimodal_data"
        raise invalid(f"{where}.multimodal_data", f"{have}; expected a marker in prompt_string for each file")
    places = [f"{where}.multimodal_data[{index}]" for index in range(len(files))]
    return _Divided(text_at, texts, [(place, _file(data, place, loaded)) for place, data in zip(places, files, strict=True)])


def _file(data: str, place: str, loaded: Loaded) -> ContentPart:
    """Return the content part for a file. A file that is neither an image nor audio counts as an image, or as audio if the model sees no
    images, so that the error names the known formats."""
    try:
        head = base64.b64decode(data[:HEAD_CHARS])
    except ValueError:
        head = b""
    is_audio = is_wav(head) or format_of(head) is not None
    if is_audio or (loaded.sight is None and not begins_image(head)):
        return GivenAudio(input_audio=InputAudio(data=data), place=place)
    return GivenImage(image_url=f"data:image;base64,{data}", place=place)


def _joined(one: _Divided, around: Around, loaded: Loaded) -> str:
    """Return the text with a marker for each file, and with the special tokens that the model expects around a file, unless the text has
    them already."""
    texts, markers = list(one.texts), markers_of(loaded)
    for index, (_, part) in enumerate(one.files):
        before, after = around[part.type]
        texts[index] += ("" if texts[index].endswith(before) else before) + markers[part.type]
        texts[index + 1] = ("" if texts[index + 1].startswith(after) else after) + texts[index + 1]
    return "".join(texts)


async def _around(kinds: Collection[str], loaded: Loaded) -> Around:
    """Return the special tokens before and after a file of each kind."""
    markers = markers_of(loaded)
    return {kind: await _surroundings(markers[kind], loaded) for kind in kinds}


async def _surroundings(marker: str, loaded: Loaded) -> tuple[str, str]:
    """Return the special tokens that the chat template writes before and after a file that stands between two texts. Return empty texts if
    the template refuses a message with these texts and the file, or does not show them in this order. Raise ApiError if no process could
    render the message."""
    if loaded.renderer is None:
        return "", ""
    messages = loaded.senses.in_parts([{"role": "user", "content": f"{EARLIER}{marker}{LATER}"}])
    try:
        shown = await loaded.renderer.render(messages, None, add_generation_prompt=False, continue_final_message=False, variables={})
    except TemplateUnavailable as error:  # without the template's tokens, the answer would be different
        raise ApiError(TEMPLATE_NOT_RENDERED, str(error)) from error
    except TemplateError:
        return "", ""
    _, _, shown = shown.partition(EARLIER)
    before, _, after = shown.partition(marker)
    after, is_between, _ = after.partition(LATER)
    if not is_between:
        return "", ""
    special = {text.decode(errors="replace") for text in loaded.tokenizer.special_texts.values()}
    return specials_at_end(before, special), specials_at_begin(after, special)


def specials_at_end(text: str, special: Collection[str]) -> str:
    """Return the text of the special tokens at the end of a text. For each length of a special token, look up the end of the text that has
    this length: a vocabulary has thousands of special tokens, but these have few lengths."""
    lengths, begin = sorted({len(one) for one in special if one}, reverse=True), len(text)
    while found := next((size for size in lengths if size <= begin and text[begin - size : begin] in special), 0):
        begin -= found
    return text[begin:]


def specials_at_begin(text: str, special: Collection[str]) -> str:
    """Return the text of the special tokens at the beginning of a text."""
    return specials_at_end(text[::-1], {one[::-1] for one in special})[::-1]
