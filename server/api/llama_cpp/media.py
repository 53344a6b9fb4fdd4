"""Images and recordings in the prompts of llama.cpp's completions: an object with a text, and with the files for the markers in it."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from server.api.answer.generate import Job
from server.api.context import Caller
from server.api.llama_cpp.body import LlamaCompletionBody, MediaPrompt
from server.api.openai.chat import markers_of
from server.api.request.conversation import text_of
from server.api.request.media import excerpts_of, media_of
from server.api.request.prepare import context_of, invalid, off_loop
from server.api.request.schema import ChatBody, ContentPart, GivenAudio, GivenImage, InputAudio, Message
from server.api.request.texts import encode_prompts
from server.audio.compressed import format_of
from server.audio.wav import is_wav
from server.images.decoding import begins_image
from server.messages import Excerpt
from server.models.model import Loaded, Model
from server.settings import ServerSettings
from server.text.templates.errors import TemplateError

MARKER = "<__media__>"  # stands for a file in a text; /props names it
HEAD_CHARS = 24  # of a file in base64: its first bytes say what it is
EARLIER, LATER = "earlier", "later"  # texts around a file that show what a chat template writes around it


@dataclass(frozen=True, slots=True)
class WrittenPrompts:
    """The prompts of a request as completions take them, and the excerpts of each."""

    prompts: object
    excerpts: tuple[tuple[Excerpt, ...], ...] = ()  # empty: no prompt has files

    def given(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs of the prompts with their excerpts."""
        if not self.excerpts:
            return jobs
        pairs = zip(jobs, self.excerpts, strict=True)
        return [replace(job, submit=msgspec.structs.replace(job.submit, excerpts=excerpts)) for job, excerpts in pairs]


async def with_media(body: LlamaCompletionBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> WrittenPrompts:
    """Return the prompts. Those that are objects become token ids, with the tokens of their images and recordings. Raise ApiError if the
    model reads none of their kind, or if one cannot be decoded."""
    is_one = isinstance(body.prompt, MediaPrompt)
    prompts: list[object] = [body.prompt] if is_one else list(body.prompt) if isinstance(body.prompt, list) else []
    if not any(isinstance(prompt, MediaPrompt) for prompt in prompts):
        return WrittenPrompts(body.prompt)
    excerpts: list[tuple[Excerpt, ...]] = []
    for index, prompt in enumerate(prompts):
        excerpts.append(())
        if isinstance(prompt, MediaPrompt):
            where = "prompt" if is_one else f"prompt[{index}]"
            prompts[index], excerpts[-1] = await _written(prompt, where, body.truncate_prompt_tokens, model, loaded, who, settings)
    return WrittenPrompts(prompts, tuple(excerpts))


async def _written(
    prompt: MediaPrompt, where: str, truncates: int | None, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings
) -> tuple[list[int], tuple[Excerpt, ...]]:
    parts = await _with_surroundings(_parts(prompt, where, loaded), loaded)
    asked = ChatBody.model_construct(messages=[Message.model_construct(role="user", content=parts)], truncate_prompt_tokens=truncates)
    emptied, found = await media_of(asked, model, loaded, who, settings)
    text = text_of(emptied.messages[0].content, where, markers_of(loaded))
    text, ordered = loaded.senses.filled(text, found)
    begins = any(sense.markers.begin and text.startswith(sense.markers.begin) for sense in loaded.senses.senses)
    encode = partial(encode_prompts, [text], loaded.tokenizer, where, special=not begins, context=context_of(loaded))
    (ids,) = await off_loop(len(text), encode)
    return ids, excerpts_of(ordered)


def _parts(prompt: MediaPrompt, where: str, loaded: Loaded) -> list[ContentPart]:
    """Return the texts and the files of a prompt in turn. It begins and ends with a text."""
    texts, files = prompt.prompt_string.split(MARKER), prompt.multimodal_data or []
    if len(texts) != len(files) + 1:
        have = f"{where} has {len(texts) - 1} of the marker {MARKER} and {len(files)} files in multimodal_data"
        raise invalid(f"{where}.multimodal_data", f"{have}; expected a marker in prompt_string for each file")
    parts = [ContentPart(type="text", text=texts[0])]
    for index, (data, text) in enumerate(zip(files, texts[1:], strict=True)):
        parts += [_file(data, f"{where}.multimodal_data[{index}]", loaded), ContentPart(type="text", text=text)]
    return parts


def _file(data: str, place: str, loaded: Loaded) -> ContentPart:
    """Return the part of a file. What is neither an image nor audio is what the model reads, so that the error names the known formats."""
    try:
        head = base64.b64decode(data[:HEAD_CHARS])
    except ValueError:
        head = b""
    is_audio = is_wav(head) or format_of(head) is not None
    if is_audio or (loaded.sight is None and not begins_image(head)):
        return GivenAudio(input_audio=InputAudio(data=data), place=place)
    return GivenImage(image_url=f"data:image;base64,{data}", place=place)


async def _with_surroundings(parts: Sequence[ContentPart], loaded: Loaded) -> list[ContentPart]:
    """Return the parts with the special tokens that the model expects around a file, unless the texts have them already."""
    texts = [part.text or "" for part in parts[::2]]
    markers = markers_of(loaded)
    known = {kind: await _surroundings(markers[kind], loaded) for kind in {part.type for part in parts[1::2]} & markers.keys()}
    for index, part in enumerate(parts[1::2]):
        before, after = known.get(part.type, ("", ""))
        texts[index] += "" if texts[index].endswith(before) else before
        texts[index + 1] = ("" if texts[index + 1].startswith(after) else after) + texts[index + 1]
    return [ContentPart(type="text", text=texts[number // 2]) if number % 2 == 0 else part for number, part in enumerate(parts)]


async def _surroundings(marker: str, loaded: Loaded) -> tuple[str, str]:
    """Return the special tokens that the chat template writes before and after a file that stands between two texts."""
    if loaded.renderer is None:
        return "", ""
    messages = loaded.senses.in_parts([{"role": "user", "content": f"{EARLIER}{marker}{LATER}"}])
    try:
        shown = await loaded.renderer.render(messages, None, add_generation_prompt=False, continue_final_message=False, variables={})
    except TemplateError:
        return "", ""
    special = "|".join(re.escape(text.decode(errors="replace")) for text in loaded.tokenizer.special_texts.values() if text)
    found = re.search(rf"{EARLIER}.*?((?:{special})*){re.escape(marker)}((?:{special})*).*?{LATER}", shown, re.DOTALL)
    return (found[1], found[2]) if found else ("", "")
