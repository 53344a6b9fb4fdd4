"""Make tokenizer.json from the other files of a model's folder that hold a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compiler.frontend.errors import ModelError
from compiler.frontend.vocabulary import byte_level, sentencepiece, tekken
from compiler.frontend.vocabulary.byte_level import KINDS, MERGES, VOCABULARY
from compiler.frontend.vocabulary.stated import ADDED, CONFIG, SPECIAL, Stated, stated
from compiler.frontend.vocabulary.tekken import TEKKEN

PIECES = "tokenizer.model"
OTHERS = ("spiece.model", "sentencepiece.bpe.model", "vocab.txt")  # not read
NAMES = (PIECES, VOCABULARY, MERGES, TEKKEN, *OTHERS, CONFIG, SPECIAL, ADDED, "config.json")
# Classes of tokenizers whose ids are those of tokenizer.model.
OF_PIECES = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer"})
# The class of a model's tokenizer, by the beginning of its `model_type`.
BY_MODEL = {"qwen3_5": "Qwen3_5Tokenizer", "qwen": "Qwen2Tokenizer", "roberta": "RobertaTokenizer", "xlm": "XLMRobertaTokenizer"}


class Unreadable(ModelError):
    """Raised if files hold a vocabulary from which tokenizer.json cannot be made exactly. The message says which files, and why."""


def tokenizer_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the contents of tokenizer.json and of special_tokens_map.json, by name, made from the other files of a folder. `files` has
    their contents by name; other names than NAMES are ignored. Return an empty mapping if no file holds a vocabulary. Raise Unreadable if
    files hold a vocabulary in an unknown format, or one that cannot be converted exactly."""
    whole = ((PIECES,), (VOCABULARY, MERGES), (TEKKEN,))
    found = next((names for names in whole if files.keys() >= {*names}), tuple(name for name in (VOCABULARY, MERGES) if name in files))
    if not found:
        others = [name for name in OTHERS if name in files]
        if others:
            raise Unreadable(f"{' and '.join(others)} cannot replace it")
        return {}
    try:
        make = {TEKKEN: _of_tekken, PIECES: _of_pieces}.get(found[0], _of_merges)
        made, tokens = make(files)
    except ModelError as error:
        raise Unreadable(f"{' and '.join(found)} cannot replace it: {error}") from error
    except Exception as error:  # the package raises bare Exception for invalid input
        raise Unreadable(f"{' and '.join(found)} cannot replace it: they describe no valid tokenizer: {error}") from error
    special = {role: token["content"] for role, token in tokens.roles.items()}
    return {"tokenizer.json": made, SPECIAL: json.dumps(special).encode()}


def _of_pieces(files: Mapping[str, bytes]) -> tuple[bytes, Stated]:
    """Make tokenizer.json from a tokenizer.model of SentencePiece. Return tokenizer.json, and the tokens that the files state. Raise
    ModelError if the class of the tokenizer is not in OF_PIECES, or if a file cannot be read exactly."""
    if (name := _class_of(files)) is not None and name not in OF_PIECES:
        raise ModelError(f"tokenizer_class is {name!r}; expected one of {', '.join(sorted(OF_PIECES))}")
    vocabulary = sentencepiece.read(files[PIECES])
    tokens = stated(files, sentencepiece.special_tokens(vocabulary))
    return sentencepiece.tokenizer_json(vocabulary, tokens), tokens


def _of_tekken(files: Mapping[str, bytes]) -> tuple[bytes, Stated]:
    tokens = stated(files, tekken.SPECIAL_TOKENS)
    return tekken.tokenizer_json(tekken.read(files[TEKKEN]), tokens), tokens


def _of_merges(files: Mapping[str, bytes]) -> tuple[bytes, Stated]:
    """Make tokenizer.json from a vocabulary and its merges. Return tokenizer.json, and the tokens that the files state. Raise ModelError if
    one of the two files is missing, if the class of the tokenizer is unknown, or if a file cannot be read exactly."""
    if missing := [name for name in (VOCABULARY, MERGES) if name not in files]:
        raise ModelError(f"{missing[0]} is missing")
    name = _class_of(files) or "GPT2Tokenizer"
    if name not in KINDS:
        raise ModelError(f"tokenizer_class is {name!r}; expected one of {', '.join(sorted(KINDS))}")
    kind = KINDS[name]
    tokens = stated(files, kind.special_tokens)
    return byte_level.tokenizer_json(files[VOCABULARY], files[MERGES], kind, tokens), tokens


def _class_of(files: Mapping[str, bytes]) -> str | None:
    """Return the name of the tokenizer's class, without the ending `Fast`: the one that tokenizer_config.json names, or else the usual one
    of the model's type, or None if the type is not in BY_MODEL either. For Qwen 3.5, the type decides: the tokenizers of all models of Qwen
    name one class, but those of Qwen 3.5 split texts in their own way."""
    kind = _field(files, "config.json", "model_type")
    usual = next((name for start, name in BY_MODEL.items() if isinstance(kind, str) and kind.startswith(start)), None)
    name = _field(files, CONFIG, "tokenizer_class")
    if not isinstance(name, str) or usual == "Qwen3_5Tokenizer":
        return usual
    return name.removesuffix("Fast")


def _field(files: Mapping[str, bytes], file: str, name: str) -> Any:
    """Return a field of a JSON file, or None if the field or the file is absent, or if the file holds no object of JSON."""
    try:
        value = json.loads(files.get(file, b"{}"))
    except (ValueError, RecursionError):
        return None  # `stated` and the reader of the configuration report the error
    return value.get(name) if isinstance(value, dict) else None
