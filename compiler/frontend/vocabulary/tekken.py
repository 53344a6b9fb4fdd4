"""tekken.json: Mistral's file of a vocabulary of byte-level BPE. It has the bytes of each token by rank, the expression by which a text is
split into words, and the special tokens, whose ids are smaller than all others."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import tokenizers
from tokenizers import decoders, models

from compiler.frontend.errors import DamagedFile
from compiler.frontend.vocabulary.pieces import PLAIN_TOKEN, add_ends, merges_by_score
from compiler.frontend.vocabulary.stated import MOST_TOKENS, Stated
from compiler.frontend.vocabulary.words import by_expressions

TEKKEN = "tekken.json"
SPECIAL_TOKENS: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that byte-level BPE writes as themselves
OTHERS = (byte for byte in range(256) if byte not in PRINTABLE)
CHARACTERS = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(0x100 + number) for number, byte in enumerate(OTHERS)}


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The content of a tekken.json, without tokens beyond the vocabulary size that the file states."""

    pattern: str  # expression that matches a word
    special: Mapping[str, int]  # ids of special tokens
    pieces: Mapping[str, int]  # ids of other tokens by their bytes as characters, in the order in which they are merged


def read(content: bytes) -> Vocabulary:
    """Read a tekken.json. Raise DamagedFile if it violates the format, or states no special tokens."""
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(f"{TEKKEN} is damaged: {error}") from error
    num_special, size = file.config.default_num_special_tokens, file.config.default_vocab_size
    if file.special_tokens is None:
        raise DamagedFile(f"{TEKKEN} has no special_tokens, which older files leave to Mistral's own code; expected a list of them")
    special = {f"<SPECIAL_{id}>": id for id in range(len(file.special_tokens), min(num_special, MOST_TOKENS))}
    special |= {token.token_str: token.rank for token in file.special_tokens}
    pieces = {_text(token): num_special + token.rank for token in file.vocab if token.rank < size - num_special}
    ids = sorted((*special.values(), *pieces.values()))
    if ids != list(range(min(size, MOST_TOKENS))):
        raise DamagedFile(f"{TEKKEN} is damaged: expected {size} tokens with ids of their own, {num_special} of them special")
    return Vocabulary(file.config.pattern, special, dict(sorted(pieces.items(), key=lambda pair: pair[1])))


def tokenizer_json(vocabulary: Vocabulary, stated: Stated) -> bytes:
    """Return the content of tokenizer.json for a vocabulary and the tokens that other files state."""
    pieces = vocabulary.pieces
    every = {**vocabulary.special, **pieces}
    own = [{"id": id, "content": text, **PLAIN_TOKEN, "normalized": False, "special": True} for text, id in vocabulary.special.items()]
    ids, added = stated.place(every, own)
    scores = [-float(id) for id in range(len(every))]  # tokens of a low rank are merged first
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = by_expressions(vocabulary.pattern)
    tokenizer.decoder = decoders.ByteLevel()
    begin = stated.role("bos_token")
    add_ends(tokenizer, None if begin is None or begin not in ids else (begin, ids[begin]), None)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = added
    fields["model"] |= {"vocab": ids, "merges": merges_by_score(pieces, [1] * len(every), scores)}
    return msgspec.json.encode(fields)


def _text(token: _Token) -> str:
    """Return the bytes of a token as characters, as byte-level BPE writes them."""
    try:
        return "".join(CHARACTERS[byte] for byte in base64.b64decode(token.token_bytes, validate=True))
    except (binascii.Error, ValueError) as error:
        raise DamagedFile(f"{TEKKEN} is damaged: the bytes of rank {token.rank} are no base64") from error
