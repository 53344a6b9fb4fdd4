"""Read the files beside a model's weights that describe its tokenizer.

A worker only needs the tokens that end an answer and the content of tokenizer.json. Both are read without building the tokenizer, which
takes half a second for a vocabulary of 150,000 tokens.

ModelFilesError        a file is missing, damaged or not understood; a ValueError
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from runtime.files import AGAIN, STAND_IN_BYTES, is_there, regular, stand_in
from server.defaults import FILE as DEFAULTS
from server.defaults import BesideModel, DefaultsError

TOKENIZER = "tokenizer.json"
FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    DEFAULTS,
)
MAX_FILE_BYTES = 256 << 20  # the largest tokenizer.json in use has 33 MB
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelFilesError(ValueError):
    """Raised for a file of the model directory that cannot be used."""


def missing(why: str = "") -> ModelFilesError:
    """Return the error of a folder without tokenizer.json. `why`: why the files that are there cannot replace tokenizer.json; empty: there
    are no such files."""
    beside = f", and {why}" if why else ""
    return ModelFilesError(
        f"tokenizer.json is missing{beside}. Download it, or let transformers write it once: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )


class _AddedToken(msgspec.Struct):
    """A token that tokenizer.json adds to the vocabulary."""

    content: str


class _Pieces(msgspec.Struct):
    """The field `model` of tokenizer.json, of which only the vocabulary is read."""

    vocab: dict[str, int] | list[tuple[str, float]]  # ids by piece, or pieces in the order of their ids with their scores


class _Vocabulary(msgspec.Struct):
    """The parts of tokenizer.json that give tokens their ids."""

    model: _Pieces
    added_tokens: list[_AddedToken] = []

    def id_of(self, text: str) -> int | None:
        """Return the id that the package `tokenizers` gives to the token with this text, or None if there is no such token. An added token
        has the id of the piece with its text, or else the next id after the number of pieces. The package ignores the id that the file
        states for an added token."""
        vocab = self.model.vocab
        ids = vocab if isinstance(vocab, dict) else {piece: id for id, (piece, _) in enumerate(vocab)}
        if text in ids or not text:
            return ids.get(text)
        later = dict.fromkeys(token.content for token in self.added_tokens if token.content and token.content not in ids)
        return len(vocab) + [*later].index(text) if text in later else None


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a model directory that describe the tokenizer."""

    contents: Mapping[str, bytes]  # contents of files by their names, which FILES lists; only tokenizer.json is required

    @classmethod
    def from_dir(cls, path: str | Path) -> Self:
        """Read the files of a directory. Raise ModelFilesError if one cannot be read."""
        return cls(read_files(Path(path), FILES))

    def tokenizer(self) -> bytes:
        """Return the content of tokenizer.json. Raise ModelFilesError if the file is missing."""
        if TOKENIZER not in self.contents:
            raise missing()
        return self.contents[TOKENIZER]

    def object(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, or an empty one if the file is missing. Raise ModelFilesError if the file is not JSON,
        or contains no object."""
        if name not in self.contents:
            return {}
        try:
            value = json.loads(self.contents[name])
        except (ValueError, RecursionError) as error:
            raise ModelFilesError(f"{name} is not JSON: {error}; {AGAIN}") from error
        if not isinstance(value, dict):
            raise ModelFilesError(f"{name} holds a {type(value).__name__}, expected an object")
        return value

    def model_config(self) -> dict[str, Any]:
        """Return the part of config.json that describes the language model: `text_config`, or else the whole file. Return an empty object
        if there is no such file."""
        config = self.object("config.json")
        text_config = config.get("text_config")
        return text_config if isinstance(text_config, dict) else config

    def special_tokens(self) -> dict[str, str]:
        """Return the texts of the special tokens by role. A role in tokenizer_config.json wins over special_tokens_map.json. Raise
        ModelFilesError if a text has lone surrogates, or if a file is damaged."""
        found: dict[str, str] = {}
        for source in (self.object("tokenizer_config.json"), self.object("special_tokens_map.json")):
            for role in SPECIAL_ROLES:
                value = source.get(role)
                text = value.get("content") if isinstance(value, dict) else value
                if not isinstance(text, str):
                    continue
                if not _is_unicode(text):
                    raise ModelFilesError(f"{role} is {text!r:.80}, expected a text without lone surrogates")
                found.setdefault(role, text)
        return found

    def defaults(self) -> BesideModel:
        """Return the defaults for requests that the file beside the model sets, or empty ones if there is no such file. Raise
        ModelFilesError if the file is damaged."""
        try:
            return BesideModel.read(self.contents.get(DEFAULTS, b""), DEFAULTS)
        except DefaultsError as error:
            raise ModelFilesError(str(error)) from error

    def eos_ids(self, id_of: Callable[[str], int | None] | None = None) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer. `id_of` gives the id of a token; a caller that has built the tokenizer passes
        it. Otherwise the vocabulary in tokenizer.json is read. Raise ModelFilesError if a file is damaged, or if tokenizer.json is needed
        and missing."""
        text = self.special_tokens().get("eos_token")
        if text is None:
            found = list[int]()
        elif id_of is None:
            found = _listed(self._vocabulary().id_of(text))
        else:
            found = _listed(id_of(text))
        found += _ids(self.object("generation_config.json").get("eos_token_id"), "generation_config.json")
        own = self.model_config().get("eos_token_id")  # multimodal models may state it beside `text_config`
        found += _ids(self.object("config.json").get("eos_token_id") if own is None else own, "config.json")
        return tuple(dict.fromkeys(found))

    def _vocabulary(self) -> _Vocabulary:
        """Read the vocabulary in tokenizer.json. Raise ModelFilesError if it is not understood."""
        try:
            return msgspec.json.decode(self.tokenizer(), type=_Vocabulary)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ModelFilesError(f"tokenizer.json is not understood: {error}; {AGAIN}") from error


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of the files `names` in a folder, by name, without missing files. Raise ModelFilesError if a file cannot be read,
    or if it cannot be found out whether a file is there."""
    found = {name: read_file(folder / name) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def read_file(file: Path) -> bytes | None:
    """Return the content of a file beside the weights, or None if the file is missing. Raise ModelFilesError if it cannot be found out
    whether the file is there, if the file cannot be read or is too large, or if it only stands for the real one (such as a pointer of Git
    LFS)."""
    try:
        if not is_there(file):
            return None
        if (size := regular(file).stat().st_size) > MAX_FILE_BYTES:
            raise ModelFilesError(f"{file.name} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        content = file.read_bytes()
    except OSError as error:
        raise ModelFilesError(f"{file.name} cannot be read: {error.strerror}") from error
    if found := stand_in(content[:STAND_IN_BYTES]):
        raise ModelFilesError(f"{file.name} {found}")
    return content


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded. JSON can contain lone halves of surrogate pairs, which are not characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listed(id: int | None) -> list[int]:
    """Return a list of the id, if there is one."""
    return [] if id is None else [id]


def _ids(value: object, file: str) -> list[int]:
    """Return the ids in a field `eos_token_id` of `file`, which is one id, a list or absent. Raise ModelFilesError if `value` is anything
    else."""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and 0 <= id < 1 << 31 for id in ids):
        raise ModelFilesError(f"eos_token_id in {file} is {value!r}, expected a token id or a list of them")
    return ids
