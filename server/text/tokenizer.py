"""Turn text into token ids and back, with a tokenizer that is read from the files beside a model's weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Self

from runtime.files import AGAIN
from server.defaults import Defaults
from server.text.pairs import PairTemplate, TextTemplate
from server.text.templates.built_in import BUILT_IN
from server.text.templates.errors import TemplateError, TemplateUnavailable
from server.text.templates.outside import OutsideTemplate
from server.text.tokenizer_files import ModelFilesError, TokenizerFiles
from server.text.tokenizer_json import Read, read_tokenizer

# The least and the largest value of each recommended parameter. A repetition penalty divides logits, so it cannot be 0.
RANGES = {"temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "typical_p": (1e-6, 1), "repetition_penalty": (0.01, 100)}
UNHEARD_OF = "\U0010fffd \U0010fffc"  # a text that no vocabulary contains


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The recommendations of generation_config.json, or of a GGUF file. A field is None if the file does not set it."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    origin: str | None = None  # the project whose defaults these are, if the model's authors recommend none


class Tokenizer:
    """One model's tokenizer, chat template and declared defaults. Immutable, safe to share between threads."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files` has the contents of files in a model directory, by their names (see `TokenizerFiles`). Raise ModelFilesError if
        tokenizer.json is missing, if a file is damaged or not understood, or if the chat template is broken. Raise TemplateUnavailable if
        no process could compile the template."""
        found = TokenizerFiles(files)
        self._special_tokens = found.special_tokens()
        # None: the model has no chat template. Another process compiles the template while this one reads the vocabulary.
        self.chat_template: OutsideTemplate | None = _chat_template(found, self._special_tokens)
        read = _load_tokenizer(found)
        # vocab_size: the largest id plus 1; max_token_chars: length of the longest token
        self._tokenizer, self.vocab_size, self.max_token_chars = read.tokenizer, read.num_ids, read.max_chars
        # tokenizer.json may contain settings for truncation and padding from the training run. A server neither truncates nor pads a prompt
        # unless asked.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        special = (self._tokenizer.token_to_id(text) for text in self._special_tokens.values())
        padding = self._special_tokens.get("pad_token")  # without one, `pad_id` is None
        self.pad_id: int | None = None if padding is None else self._tokenizer.token_to_id(padding)
        added = self._tokenizer.get_added_tokens_decoder()
        # the added tokens that are declared special, and those that have a role such as eos_token
        self.special_ids: frozenset[int] = frozenset(
            [id for id, token in added.items() if token.special] + [id for id in special if id is not None]
        )
        self.eos_ids: tuple[int, ...] = found.eos_ids(self._tokenizer.token_to_id)  # tokens that end an answer
        self.generation_defaults: GenerationDefaults = _generation_defaults(found.object("generation_config.json"))
        self.defaults: Defaults = found.defaults()
        self.text_template: TextTemplate = self._text_template()
        self.pair_template: PairTemplate = self._pair_template()
        self._added: dict[int, str] = {id: token.content for id, token in added.items()}
        self.special_texts: Mapping[int, bytes] = {  # the texts of `special_ids`
            id: self._tokenizer.decode([id], skip_special_tokens=False).encode() for id in self.special_ids
        }
        decoder = self._tokenizer.decoder
        self._piece_bytes: Callable[[str], bytes] = _piece_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        # In SentencePiece, the character ▁ stands for a space in added tokens, too: Gemma adds runs of spaces. Other tokenizers have the
        # text of an added token unchanged.
        self._added_bytes: Callable[[str], bytes] = _sentencepiece if self._piece_bytes is _sentencepiece else str.encode
        if self.chat_template is not None:
            with _broken_template():
                self.chat_template.check()

    def with_template(self, source: str) -> Self:
        """Return a copy of this tokenizer with another chat template. This waits until the template is compiled. Raise TemplateError if it
        is broken, or if its process fails."""
        other = copy.copy(self)
        other.chat_template = OutsideTemplate(source, self._special_tokens)
        other.chat_template.check()
        return other

    def with_defaults(self, own: Defaults) -> Self:
        """Return a copy of this tokenizer in which the defaults `own` win over those of the files. Raise ModelFilesError if `own` has a
        broken chat template, or TemplateUnavailable if no process could compile it."""
        with _broken_template():
            other = copy.copy(self) if own.template is None else self.with_template(own.template)
        other.defaults = own.over(self.defaults)
        return other

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. `add_special_tokens`: with the special tokens of `text_template` around it."""
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the tokens of several texts. This calls a batch function, because only these functions of the package `tokenizers` release
        the GIL."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens around it."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def _text_template(self) -> TextTemplate:
        """Find the special tokens around a text by encoding one: tokens that do not belong to it are special."""
        (found,) = self._tokenizer.encode_batch(["a"])
        places = [at for at, owner in enumerate(found.sequence_ids) if owner is not None]
        return TextTemplate(tuple(found.ids[: places[0]]), tuple(found.ids[places[-1] + 1 :])) if places else TextTemplate()

    def _pair_template(self) -> PairTemplate:
        """Find the special tokens around two texts by encoding a pair: tokens that belong to neither text are special. If one of the two
        texts has no tokens, none are special."""
        (found,) = self._tokenizer.encode_batch([("a", "b")])
        owners, kinds = found.sequence_ids, found.type_ids
        first, second = ([at for at, owner in enumerate(owners) if owner == text] for text in (0, 1))
        if not first or not second:
            return PairTemplate()
        between = slice(first[-1] + 1, second[0])
        return PairTemplate(
            tuple(found.ids[: first[0]]),
            tuple(found.ids[between]),
            tuple(found.ids[second[-1] + 1 :]),
            kinds[between].count(0) if any(kinds) else None,
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that a token adds to a text, before UTF-8 decoding. Return b"" for special tokens and for ids without a token:
        embedding tables are often padded beyond the vocabulary."""
        if id in self.special_ids:
            return b""
        if (added := self._added.get(id)) is not None:
            return self._added_bytes(added)
        piece = self._tokenizer.id_to_token(id)
        return b"" if piece is None else self._piece_bytes(piece)

    def to_json(self) -> str:
        """Return the tokenizer in the form of a tokenizer.json, without truncation and padding. Exports contain it."""
        return self._tokenizer.to_str()


# --- files --------------------------------------------------------------------------------------------------------------


def _load_tokenizer(files: TokenizerFiles) -> Read:
    """Build the tokenizer. Raise ModelFilesError if tokenizer.json is missing, if the package `tokenizers` does not understand it, or if
    the tokenizer cannot encode unknown text."""
    content = files.tokenizer()
    try:
        read = read_tokenizer(content)
        read.tokenizer.encode(UNHEARD_OF)  # some tokenizers need a token for unknown text and have none
        return read
    except Exception as error:  # the package `tokenizers` raises bare Exception
        raise ModelFilesError(f"tokenizer.json is not understood: {error}; {AGAIN}") from error
    except BaseException as error:
        # A Rust panic is a BaseException whose class is not importable.
        if type(error).__name__ != "PanicException":
            raise
        raise ModelFilesError(f"tokenizer.json is not understood: {error}; {AGAIN}") from error


def _generation_defaults(source: Mapping[str, Any]) -> GenerationDefaults:
    """Read generation_config.json. Raise ModelFilesError if a value has another type than its field, or is outside its range."""
    values: dict[str, Any] = {}
    for field in fields(GenerationDefaults):
        value = source.get(field.name)
        if value is None:
            continue
        if field.name == "origin":
            fits, expected = isinstance(value, str), "a text"
        elif field.name == "do_sample":
            fits, expected = isinstance(value, bool), "true or false"
        elif field.name in ("top_k", "max_new_tokens"):
            fits, expected = type(value) is int and value >= 0, "a non-negative integer"
        else:
            least, most = RANGES[field.name]
            fits, expected = type(value) in (int, float) and least <= value <= most, f"a number from {least:g} to {most:g}"
        if not fits:
            raise ModelFilesError(f"{field.name} in generation_config.json is {value!r}, expected {expected}; correct or remove it")
        values[field.name] = value
    return GenerationDefaults(**values)


def _chat_template(files: TokenizerFiles, special_tokens: Mapping[str, str]) -> OutsideTemplate | None:
    """Return the chat template, or None if the model has none. A template among the model's defaults replaces all others. Otherwise the
    templates `default` and `tool_use` each come from a file of their own (newer models), or else from tokenizer_config.json or
    chat_template.json, which have a string (`default`) or a list of named templates. If there is no `default`, BUILT_IN may have one for
    the model type."""
    declared = files.object("tokenizer_config.json").get("chat_template") or files.object("chat_template.json").get("chat_template")
    named: dict[str, Any] = {}
    if isinstance(declared, str):
        named["default"] = declared
    elif isinstance(declared, list):
        named = {str(entry.get("name")): entry.get("template") for entry in declared if isinstance(entry, dict)}
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if file in files.contents:
            named[name] = files.contents[file].decode(errors="replace")
    if (own := files.defaults().template) is not None:
        named = {"default": own}
    default, tool_use = named.get("default"), named.get("tool_use")
    if default is None:
        default = BUILT_IN.get(str(files.object("config.json").get("model_type")))
    if not isinstance(default, str):
        return None
    return OutsideTemplate(default, special_tokens, tool_source=tool_use if isinstance(tool_use, str) else None)


@contextmanager
def _broken_template() -> Generator[None]:
    """Turn a TemplateError that the `with` block raises into a ModelFilesError. TemplateUnavailable passes unchanged, because it does not
    mean that the template is broken."""
    try:
        yield
    except TemplateUnavailable:
        raise
    except TemplateError as error:
        raise ModelFilesError(f"the chat template is broken: {error}; correct it, or remove it to serve the model without one") from error


# --- bytes of a piece ----------------------------------------------------------------------------------------------------


def _piece_decoder(decoder: object) -> Callable[[str], bytes]:
    """Return the function that turns a piece of the vocabulary into bytes. `decoder` is the description of the tokenizer's decoder."""
    decoders = list(_flatten(decoder))
    kinds = {decoder.get("type") for decoder in decoders}
    if "ByteLevel" in kinds:
        return _byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece
    for decoder in decoders:
        if decoder.get("type") == "WordPiece":
            prefix = str(decoder.get("prefix", "##"))
            return lambda piece: piece.removeprefix(prefix).encode() if piece.startswith(prefix) else b" " + piece.encode()
    return str.encode


def _flatten(decoder: object) -> list[dict[str, Any]]:
    """Return the description of a decoder, and of all decoders in it."""
    if not isinstance(decoder, dict):
        return []
    nested: list[Any] = decoder.get("decoders", [])
    return [decoder, *(inner for child in nested for inner in _flatten(child))]


def _byte_alphabet() -> dict[str, int]:
    """Return the 256 characters that byte-level BPE writes for bytes. Printable Latin-1 bytes are written as themselves; the other bytes,
    in order, as the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a piece of byte-level BPE. A character that stands for no byte is written as itself."""
    return b"".join(bytes([byte]) if (byte := BYTE_ALPHABET.get(char)) is not None else char.encode() for char in piece)


def _sentencepiece(piece: str) -> bytes:
    """Return the bytes of a piece of SentencePiece. A piece such as `<0x0A>` is one byte; the character ▁ stands for a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("▁", " ").encode()
