"""`relaxserve export MODEL --target web`: write a folder of static files with which a browser generates text, for some models also about
images, embeds texts or transcribes speech.

program.json             the model, and a program for each level of WebAssembly features: its module, records of its launches, its shards
wasm-*.wasm              a module per level
weights-*.bin            shards: parts of the weights
tokenizer.json           the model's tokenizer
pieces.bin               the bytes of each token's text
relaxserve.mjs, ...      the runtime, and the page chat.html
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from compiler.backends.wasm.codegen.module import memory_flags
from compiler.driver import Options, compile_module
from compiler.frontend.cutting import LANCZOS
from compiler.frontend.hearing import ENTRY as HEAR
from compiler.frontend.sampler import SAMPLE_ENTRY
from compiler.frontend.seeing import ENTRY as SEE
from compiler.frontend.vision import Vision
from compiler.machine.target import Target, get
from deploy.export.model import NOTHING_SHOWN, cache_shapes, num_pages, pieces
from deploy.export.weights import Shard, write_shards
from deploy.model_loading.known import Progress, silent
from deploy.model_loading.modes import Embedder, Encoder, Generator, Mode, Transcriber
from deploy.model_loading.servable import Servable
from runtime.cache_groups import PAGE_SIZE
from runtime.fits import Tiles
from runtime.flat_program import FlatProgram, flat_program
from runtime.spectrogram import AROUND, HOP
from runtime.units import in_units
from runtime.web import page_files
from server.images.sight import AROUND as AROUND_IMAGE
from server.images.sight import WHOLE, texts_of
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.models.model import sampling_of
from server.speech.languages import name_of
from server.speech.tokens import START, SpeechTokens
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.dialects.dialect import Dialect
from server.text.templates.template import TESTS_NONE, reads_parts

LEVELS = ("wasm-relaxed", "wasm-simd128")  # preferred level first
ADDRESSED = 4 << 30  # largest memory that 32-bit pointers address, in bytes
PROGRAM, PIECES = "program.json", "pieces.bin"


class Level(msgspec.Struct, frozen=True):
    """A program for WebAssembly engines with certain features."""

    target: str  # name of the target, one of LEVELS
    features: tuple[str, ...]  # features of WebAssembly that the module needs
    module: str  # file name
    memory_flags: int  # offset in the module's file of the byte that says whether the memory is shared between threads
    program: FlatProgram
    shards: tuple[Shard, ...]


class WebEmbedding(msgspec.Struct, frozen=True):
    """How the model turns texts into vectors."""

    normalize: bool  # whether vectors are scaled to length 1
    prompts: dict[str, str]  # by name: texts, one of which may be put before each text of a request
    default_prompt: str | None  # name of the prompt for requests that name no prompt; None: these requests get no prompt


class WebSpeechTokens(msgspec.Struct, frozen=True):
    """The special tokens of a speech model: see `server/speech/tokens.py`."""

    end: int
    start: int
    before: int
    no_stamps: int
    tasks: dict[str, int]
    silence: int
    languages: dict[str, int]
    banned: tuple[int, ...]


class WebSpeech(msgspec.Struct, frozen=True):
    """The size of the audio window that the model hears at once, and the tokens with which it writes transcripts."""

    num_hops: int  # hops of a window; the spectrogram has a vector of num_mels numbers for each
    num_frames: int  # vectors that the encoder computes for a window
    num_mels: int  # bands of the spectrogram
    hop: int  # samples of a hop
    around: int  # samples that a piece of audio needs besides `hop` samples for each of its hops
    tokens: WebSpeechTokens
    names: dict[str, str]  # English names of the languages, by code


class WebVision(msgspec.Struct, frozen=True):
    """How images are cut into crops, and written into the prompt: see `server/images`."""

    crop_size: int  # pixels of an edge of a crop
    num_places: int  # vectors of a crop in the encoder: its patches, and a class token if there is one
    num_tokens: int  # image tokens of a crop
    image_token: int  # id of the token that stands for a part of an image
    fit: Tiles  # how an image is resized and cut into tiles
    marker: str  # text that the chat template writes for an image
    begin: str  # text of the token that the tokenizer puts before every text; empty: there is none
    image_text: str  # text of the image token
    around: str  # text of the token around crops
    whole: str  # text of the token before the crop of the whole image


class WebDefaults(msgspec.Struct, frozen=True):
    """The model's defaults for fields that a request omits, besides sampling parameters: see `server/defaults.py`."""

    system: str | None
    has_system: bool  # whether the template writes a system message; if not, `system` is put before the user's first message
    stop: tuple[str, ...]
    max_tokens: int | None
    thinking: dict[str, Any]  # variables of the chat template that say whether and how much the model thinks


class WebThoughts(msgspec.Struct, frozen=True):
    """The markers around a block of thoughts: see `server/text/dialects/thoughts.py`."""

    begin: str
    closing: str
    thinks: bool  # answers may begin with such a block; otherwise they have one only if the prompt opens it


class WebModel(msgspec.Struct, frozen=True):
    """The facts about a model that the runtime in the browser reads."""

    name: str
    kind: str  # "generator", "embedder" (a decoder without a language head), "encoder" or "transcriber"
    embeds: bool  # false for a generator, unless the export asks for its embeddings
    entry: str  # name of the function that runs a step
    vocab_size: int
    hidden_size: int
    max_context: int
    max_tokens: int  # in one step
    page_size: int
    cache_shapes: dict[str, tuple[int, ...]]  # shape of each input that holds keys and values, or states
    eos_ids: tuple[int, ...]
    sampling: dict[str, float]  # sampling parameters of requests that set none
    defaults: WebDefaults
    special_tokens: dict[str, str]  # variables of the chat template
    chat_template: str | None
    tool_template: str | None  # chat template for requests with tools; None if chat_template is used for them, too
    reads_parts: tuple[bool, bool]  # for chat_template, then for requests with tools: whether it reads a content only as a list of parts
    tests_none: tuple[bool, bool]  # for chat_template, then for requests with tools: whether it compares a content with none
    tools: JsonCalls | None  # syntax in which the model writes tool calls; None if the page cannot offer tools
    writes_calls: bool  # whether the chat template writes earlier tool calls and their results; if not, the page refuses messages with them
    thoughts: WebThoughts | None  # None: answers have no block of thoughts
    embedding: WebEmbedding
    speech: WebSpeech | None  # None: the model hears no audio
    vision: WebVision | None  # None: the model reads no images in the browser


class WebProgram(msgspec.Struct, frozen=True):
    """The content of program.json."""

    model: WebModel
    levels: tuple[Level, ...]


def export_web(model: Servable, name: str, folder: Path, progress: Progress = silent, levels: Sequence[str] = LEVELS) -> WebProgram:
    """Write the export of a model to `folder`, and return the content of program.json. Raise LoadError if it cannot be exported."""
    mode, dialect = mode_of_page(model, name), _dialect(model)
    folder.mkdir(parents=True, exist_ok=True)
    programs = tuple(_level(model, mode, get(target), folder, progress) for target in levels)
    program = WebProgram(web_model(model, name), programs)
    (folder / PROGRAM).write_bytes(msgspec.json.encode(program))
    (folder / "tokenizer.json").write_text(model.tokenizer.to_json())
    (folder / PIECES).write_bytes(pieces(model.tokenizer, program.model.vocab_size, NOTHING_SHOWN if dialect is None else dialect.shown))
    for file, content in page_files().items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    return program


def page_sees(vision: Vision) -> bool:
    """Return whether the page can cut images for an encoder. It can only cut them into tiles, as Idefics3 and SmolVLM need."""
    return isinstance(vision.cutting.fit, Tiles) and vision.cutting.filter == LANCZOS


def mode_of_page(model: Servable, name: str) -> Mode:
    """Return the mode of a model that a page can run. Raise LoadError for a model that classifies texts."""
    if model.files.config.classes is not None:
        expected = "expected a model that generates text, computes embeddings or transcribes speech"
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{name} classifies texts; {expected}")
    return model.mode


def _level(model: Servable, mode: Mode, target: Target, folder: Path, progress: Progress) -> Level:
    """Compile the model for one level, and write the module and the weights to `folder`."""
    executable = compile_module(model.module, Options(target, progress=partial(progress, "compile")))
    beside = [SAMPLE_ENTRY] if mode.generates else []
    beside += [HEAR] if isinstance(mode, Transcriber) else []
    beside += [SEE] if _seen(model) is not None else []
    flat = flat_program(executable, mode.entry, beside)
    _require_room(flat, mode)
    module = f"{target.name}.wasm"
    (folder / module).write_bytes(executable.object_code)
    progress("pack", 0.0)
    shards = write_shards(folder, flat, executable, mode.weights)
    return Level(target.name, tuple(sorted(target.features)), module, memory_flags(executable.object_code), flat, shards)


def _require_room(flat: FlatProgram, mode: Mode) -> None:
    """Raise LoadError if weights, arena and cache together exceed what 32-bit pointers can address."""
    cache_bytes = 0 if isinstance(mode, Encoder) else sum(group.bytes_per_page * num_pages(mode, group) for group in mode.groups)
    needed = flat.weights_bytes + flat.arena_bytes + cache_bytes
    if needed > ADDRESSED:
        raise LoadError(
            ErrorCode.INSUFFICIENT_MEMORY,
            f"the model takes {in_units(needed)}; WebAssembly can address {in_units(ADDRESSED)}: "
            "use --quantize 4bit or a lower --max-context",
            needed,
            ADDRESSED,
        )


# The kind of a model in WebModel, by its mode.
KINDS: dict[type[Mode], str] = {Generator: "generator", Embedder: "embedder", Encoder: "encoder", Transcriber: "transcriber"}


def _dialect(model: Servable) -> Dialect | None:
    """Return the format in which a model writes tool calls and reasoning, or None for a model that does not generate text."""
    return Dialect.of(model.tokenizer, None, None) if isinstance(model.mode, Generator) else None


def _offered_calls(dialect: Dialect) -> JsonCalls | None:
    """Return the syntax of the model's tool calls. Return None if the page cannot read this syntax, or if the chat template shows no tools:
    the server then describes the tools in the first message, but the page does not."""
    calls = dialect.format.call_syntax
    return calls if dialect.reads_tools and isinstance(calls, JsonCalls) else None


def _thoughts(dialect: Dialect) -> WebThoughts | None:
    """Return how the model writes thoughts, or None if the format of its answers has no block of thoughts."""
    found = dialect.thoughts
    return None if found is None else WebThoughts(found.begin, found.closing, dialect.thinks)


def _speech(model: Servable, name: str) -> WebSpeech | None:
    """Return what the page needs to transcribe speech, or None if the model hears no audio. Raise LoadError if the tokenizer lacks the
    special tokens."""
    hearing = model.files.config.hearing
    if hearing is None:
        return None
    tokens = SpeechTokens.of(model.tokenizer)
    if tokens is None:
        raise LoadError(
            ErrorCode.LOAD_REFUSED, f"the tokenizer of {name} lacks tokens of Whisper such as {START}; take its own tokenizer.json"
        )
    own = WebSpeechTokens(
        tokens.end, tokens.start, tokens.before, tokens.no_stamps, dict(tokens.tasks), tokens.silence, dict(tokens.languages), tokens.banned
    )
    names = {code: name_of(code) for code in tokens.languages or ("en",)}
    return WebSpeech(hearing.num_hops, hearing.num_frames, hearing.num_mels, HOP, AROUND, own, names)


def _seen(model: Servable) -> tuple[Vision, Tiles] | None:
    """Return the encoder of a model that reads images in the browser, and how images are cut for it. Return None for other models."""
    vision = model.files.config.vision
    if vision is None or not page_sees(vision) or not isinstance(vision.cutting.fit, Tiles):
        return None
    return vision, vision.cutting.fit


def _vision(model: Servable, name: str) -> WebVision | None:
    """Return what the page needs to read images, or None if the model reads none in the browser. Raise LoadError if the tokenizer lacks the
    image token."""
    found = _seen(model)
    if found is None:
        return None
    vision, fit = found
    texts = texts_of(vision.image_token, vision.marker, model.tokenizer)
    if texts is None:
        text = f"the tokenizer of {name} lacks token {vision.image_token}, which stands for images; take its own tokenizer.json"
        raise LoadError(ErrorCode.LOAD_REFUSED, text)
    image_text, markers = texts
    return WebVision(
        vision.crop_size,
        vision.num_places,
        vision.num_rows,
        vision.image_token,
        fit,
        markers.marker,
        markers.begin,
        image_text,
        AROUND_IMAGE,
        WHOLE,
    )


def web_model(model: Servable, name: str) -> WebModel:
    """Return the facts about a model for the page. Raise LoadError if a page cannot run it."""
    mode, dialect = mode_of_page(model, name), _dialect(model)
    config, tokenizer = model.files.config, model.tokenizer
    template, defaults = tokenizer.chat_template, tokenizer.defaults
    plain, with_tools = ("", "") if template is None else (template.source, template.tool_source or template.source)
    embedding = config.embedding
    return WebModel(
        name,
        KINDS[type(mode)],
        model.embeds,
        mode.entry,
        config.vocab_size,
        config.hidden_size,
        mode.max_context,
        mode.bounds.max_tokens,
        PAGE_SIZE,
        {} if isinstance(mode, Encoder) else cache_shapes(mode),
        tokenizer.eos_ids,
        {**sampling_of(tokenizer.generation_defaults), **defaults.sampling},
        WebDefaults(defaults.system, dialect is None or dialect.has_system, defaults.stop or (), defaults.max_tokens, defaults.thinking),
        {} if template is None else template.special_tokens,
        None if template is None else template.source,
        None if template is None else template.tool_source,
        (reads_parts(plain), reads_parts(with_tools)),
        (TESTS_NONE.search(plain) is not None, TESTS_NONE.search(with_tools) is not None),
        None if dialect is None else _offered_calls(dialect),
        dialect is not None and (dialect.reads_tools or dialect.writes_calls),
        None if dialect is None else _thoughts(dialect),
        WebEmbedding(embedding.normalize, dict(embedding.prompts), embedding.default_prompt),
        _speech(model, name),
        _vision(model, name),
    )
