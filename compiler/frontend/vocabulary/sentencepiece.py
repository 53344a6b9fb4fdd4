"""tokenizer.model: a vocabulary of sentencepiece, as a message of Protocol Buffers.

Each stretch of a text between special tokens becomes the ids that sentencepiece gives it, with three exceptions. If the configuration says
that the tokenizer is not `legacy`, a text that begins with a space gets no further mark of a space before it. If several ways to split a
text have scores that differ only by rounding, the tokenizer of a unigram model may choose another way than sentencepiece. If a unigram
model has a table of characters, some sequences of combining characters are composed differently.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from compiler.frontend.errors import DamagedFile, ModelError
from compiler.frontend.vocabulary import protobuf
from compiler.frontend.vocabulary.pieces import (
    BYTE,
    SPACE,
    UNUSED,
    USER_DEFINED,
    add_ends,
    merges_by_score,
    tokenizer_of_pieces,
    tokens_in_texts,
)
from compiler.frontend.vocabulary.stated import Stated

UNIGRAM, BPE = 1, 2  # kinds of models
NORMAL = 1
# Tokens that are neither normal nor defined pieces have scores at least this much below those of normal pieces.
# So a text such as "<0x41>" is read as characters.
NEVER = 1000.0
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\n")


@dataclass(slots=True)
class Vocabulary:
    """The content of a tokenizer.model. Piece i has id i, score `scores[i]` and kind `kinds[i]`. The defaults are sentencepiece's."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model: int = UNIGRAM  # or BPE
    unknown_id: int = 0
    begin_id: int = 1
    end_id: int = 2
    pad_id: int = -1
    spaces_are_suffixes: bool = False  # treat_whitespace_as_suffix: the mark of a space ends a word instead of beginning one
    table: bytes = b""  # table of characters that are composed or replaced
    has_prefix: bool = True  # add_dummy_prefix: a space is put before a text
    strips_spaces: bool = True  # remove_extra_whitespaces: spaces at both ends are removed, and repeated spaces become one
    marks_spaces: bool = True  # escape_whitespaces: spaces become marks

    @property
    def ids(self) -> dict[str, int]:
        return {piece: id for id, piece in enumerate(self.pieces)}

    def piece(self, id: int) -> tuple[str, int] | None:
        return (self.pieces[id], id) if 0 <= id < len(self.pieces) else None


def read(content: bytes) -> Vocabulary:
    """Read a tokenizer.model. Raise ModelError if the file is damaged, or has a vocabulary that cannot be read exactly."""
    if TIKTOKEN.match(content):
        raise ModelError("it is a vocabulary of tiktoken, which does not say how a text is split into words")
    found = Vocabulary()
    for number, value in protobuf.fields(memoryview(content)):
        match number:
            case 1:
                _read_piece(found, protobuf.content(value))
            case 2:
                _read_training(found, protobuf.content(value))
            case 3:
                _read_normalization(found, protobuf.content(value))
            case _:  # self-tests, and how to write decoded texts: not read
                pass
    if found.unknown_id not in range(len(found.pieces)) or len(found.ids) != len(found.pieces):
        raise DamagedFile(f"it has {len(found.pieces)} pieces, expected different ones, with one for unknown text")
    if found.model not in (UNIGRAM, BPE):
        raise ModelError(f"its model has the kind {found.model}, expected {UNIGRAM} (unigram) or {BPE} (BPE)")
    if found.spaces_are_suffixes or not found.marks_spaces or UNUSED in found.kinds:
        raise ModelError("it has spaces at the ends of words, spaces without marks, or unused pieces")
    return found


def _read_piece(found: Vocabulary, message: memoryview) -> None:
    """Append the piece that the message describes."""
    piece, score, kind = "", 0.0, NORMAL
    for number, value in protobuf.fields(message):
        match number:
            case 1:
                piece = protobuf.text(value)
            case 2:
                score = protobuf.real(value)
            case 3:
                kind = protobuf.number(value)
            case _:
                pass
    found.pieces.append(piece)
    found.scores.append(score)
    found.kinds.append(kind)


def _read_training(found: Vocabulary, message: memoryview) -> None:
    """Set the fields that depend on how the vocabulary was trained: the kind of model, the ids of special tokens, and where marks of spaces
    are."""
    names = {3: "model", 40: "unknown_id", 41: "begin_id", 42: "end_id", 43: "pad_id"}
    for number, value in protobuf.fields(message):
        if number in names:
            setattr(found, names[number], protobuf.number(value))
        elif number == 24:
            found.spaces_are_suffixes = bool(protobuf.number(value))


def _read_normalization(found: Vocabulary, message: memoryview) -> None:
    """Set the fields that say how a text is normalised before it is split."""
    names = {3: "has_prefix", 4: "strips_spaces", 5: "marks_spaces"}
    for number, value in protobuf.fields(message):
        if number in names:
            setattr(found, names[number], bool(protobuf.number(value)))
        elif number == 2:
            found.table = bytes(protobuf.content(value))


def special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    """Return the special tokens that the vocabulary itself names, by role."""
    found = {
        "bos_token": vocabulary.piece(vocabulary.begin_id),
        "eos_token": vocabulary.piece(vocabulary.end_id),
        "unk_token": vocabulary.piece(vocabulary.unknown_id),
        "pad_token": vocabulary.piece(vocabulary.pad_id),
    }
    return {role: piece[0] for role, piece in found.items() if piece is not None}


def tokenizer_json(vocabulary: Vocabulary, stated: Stated) -> bytes:
    """Return the content of tokenizer.json for a vocabulary and the tokens that other files state."""
    is_bpe, has_bytes = vocabulary.model == BPE, BYTE in vocabulary.kinds
    # Transformers writes the mark of a text's beginning after each special token too, or, if `legacy` is false, only at the beginning.
    everywhere = vocabulary.has_prefix and stated.flag("legacy", True)
    at_first = vocabulary.has_prefix and not everywhere and stated.flag("add_prefix_space", True)
    # A text has the mark only at its beginning, so it is split at defined pieces after the mark is added.
    splits_late = is_bpe and vocabulary.has_prefix and USER_DEFINED in vocabulary.kinds
    kinds = [NORMAL if kind == USER_DEFINED and (splits_late or not is_bpe) else kind for kind in vocabulary.kinds]
    ids, added = stated.place(vocabulary.ids, tokens_in_texts(vocabulary.ids, kinds))
    unknown = vocabulary.pieces[vocabulary.unknown_id]
    if is_bpe:
        model: models.Model = models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes, ignore_merges=splits_late)
        tokens: dict[str, Any] = {"vocab": ids, "merges": merges_by_score(vocabulary.ids, vocabulary.kinds, vocabulary.scores)}
    else:
        model = models.Unigram([(unknown, 0.0)], 0, has_bytes)
        tokens = {"vocab": _scored(vocabulary, ids), "unk_id": vocabulary.unknown_id}
    tokenizer = tokenizer_of_pieces(model, has_prefix=everywhere or at_first)
    tokenizer.normalizer = _normalizer(vocabulary, has_prefix=everywhere)
    words: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Metaspace(SPACE, "first", split=False)] if at_first else []
    if splits_late:
        defined = [piece for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True) if kind == USER_DEFINED]
        pattern = "|".join(re.escape(piece) for piece in sorted(defined, key=len, reverse=True))
        words.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    _add_ends(tokenizer, stated, ids)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = added
    fields["model"] |= tokens
    return msgspec.json.encode(fields)


def _normalizer(vocabulary: Vocabulary, *, has_prefix: bool) -> normalizers.Normalizer:
    """Return the steps that change the characters of a text: compose characters, remove spaces at the ends and repeated spaces if the
    vocabulary says so, put a mark first if `has_prefix`, and replace other spaces by marks."""
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(vocabulary.table)] if vocabulary.table else []
    if vocabulary.strips_spaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if has_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if vocabulary.strips_spaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _scored(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, float]]:
    """Return all tokens with their scores, in the order of their ids. As in sentencepiece, the score of a defined piece is so high that it
    is always used. Raise ModelError if ids are missing."""
    texts = {id: text for text, id in ids.items()}
    if len(texts) != max(texts) + 1:
        missing = next(id for id in range(len(texts)) if id not in texts)
        raise ModelError(f"no token has the id {missing}, and a token has the id {max(texts)}")
    normal = [score for score, kind in zip(vocabulary.scores, vocabulary.kinds, strict=True) if kind == NORMAL]
    least, most = min(normal, default=0.0), max(normal, default=0.0)
    scored: list[tuple[str, float]] = []
    for id in range(len(texts)):
        text = texts[id]
        kind = vocabulary.kinds[id] if id < len(vocabulary.pieces) and vocabulary.pieces[id] == text else None
        if kind == NORMAL:
            scored.append((text, vocabulary.scores[id]))
        elif kind == USER_DEFINED:
            scored.append((text, len(text) * most - 0.1))
        else:
            scored.append((text, math.floor(least) - NEVER))
    return scored


def _add_ends(tokenizer: tokenizers.Tokenizer, stated: Stated, ids: dict[str, int]) -> None:
    """Let the tokenizer put the begin token before a text unless the files forbid it, and the end token after a text if they request it."""
    begin, end = (
        (text, ids[text]) if stated.flag(flag, default) and (text := stated.role(role)) is not None and text in ids else None
        for flag, default, role in (("add_bos_token", True, "bos_token"), ("add_eos_token", False, "eos_token"))
    )
    add_ends(tokenizer, begin, end)
