"""Build the tokenizer of the package `tokenizers` from the content of tokenizer.json.

To read a BPE model from JSON, the package makes two copies of the vocabulary and of the merges. From a dictionary and pairs, the package
builds the same tokenizer sooner (docs/decisions/0178-starts-read-less.md). So this module reads the vocabulary and the merges itself. A
file that has another model, or is not exactly as the package writes it, is left to the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, models

EMPTY = msgspec.Raw(b'{"type":"BPE","vocab":{},"merges":[]}')
VERSION = "#version"  # the package skips a merge that begins with this text


@dataclass(frozen=True, slots=True)
class Read:
    """A tokenizer that was read."""

    tokenizer: tokenizers.Tokenizer
    num_ids: int  # the largest id plus 1; ids may have gaps
    max_chars: int  # length of the longest token


class _Bpe(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="BPE"):
    """The BPE model in tokenizer.json, if it has exactly the fields that the package writes."""

    vocab: dict[str, int]
    merges: msgspec.Raw
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False

    def build(self) -> models.BPE:
        """Build the model. Raise an Exception of any class if its merges are not understood."""
        others = {name: value for name in self.__struct_fields__[2:] if (value := getattr(self, name)) is not None}
        merges = _merges_of(self.merges)
        _require_prefix(self.continuing_subword_prefix, merges)
        return models.BPE(self.vocab, merges, **others)


class _Joining(msgspec.Struct):
    """The fields of a model with which the package joins the two parts of a merge."""

    continuing_subword_prefix: str | None = None
    merges: list[str | tuple[str, str]] = []


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    """An added token, as the package writes it."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool

    def build(self) -> AddedToken:
        """Return the token as an object of the package."""
        flags = {name: getattr(self, name) for name in self.__struct_fields__[2:]}
        return AddedToken(self.content, **flags)


class _Joined(Sequence[Any]):
    """Pairs that are written as texts like `a b`. Each pair is made when it is read, because 500,000 pairs would take 80 MB. The package
    refuses a text that is no pair."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def __iter__(self) -> Iterator[Any]:
        return (tuple(text.split(" ")) for text in self._texts)


def read_tokenizer(content: bytes) -> Read:
    """Build a tokenizer. Raise an Exception of any class if the content is not understood."""
    return _assembled(content) or _read_by_package(content)


def _assembled(content: bytes) -> Read | None:
    """Build a tokenizer with a BPE model from its parts, in the order in which the package does. Return None if there is another model, or
    if a part is not understood: the package then says why."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(fields["model"], type=_Bpe)
        added = msgspec.json.decode(fields["added_tokens"], type=list[_Added])
        tokenizer = tokenizers.Tokenizer.from_buffer(msgspec.json.encode({**fields, "model": EMPTY, "added_tokens": []}))
        tokenizer.model = model.build()
    except Exception:  # the package `tokenizers` raises bare Exception, too
        return None
    tokenizer.add_tokens([token.build() for token in added])
    ids = max(model.vocab.values(), default=-1), *tokenizer.get_added_tokens_decoder()
    lengths = max(map(len, model.vocab), default=0), *(len(token.content) for token in added)
    return Read(tokenizer, max(ids) + 1, max(1, *lengths))


def _merges_of(written: msgspec.Raw) -> Sequence[tuple[str, str]]:
    """Return the merges as pairs. The file has them as pairs or, if it is older, as texts. Raise ValueError if they are neither, or if one
    is a comment (VERSION)."""
    with suppress(msgspec.ValidationError):
        texts = msgspec.json.decode(written, type=list[str])
        if any(text.startswith(VERSION) for text in texts):
            raise ValueError(f"merges begin with {VERSION}")
        return _Joined(texts)
    return msgspec.json.decode(written, type=list[tuple[str, str]])


def _require_prefix(prefix: str | None, merges: Iterable[Sequence[str]]) -> None:
    """Raise ValueError if the prefix of parts that continue a word is not ASCII, or if the right part of a merge lacks it. The package cuts
    off as many bytes of the right part as the prefix has characters, whatever these bytes are. So it may cut a character in two, and then
    aborts the process."""
    if not prefix:
        return
    if not prefix.isascii():
        raise ValueError(f"continuing_subword_prefix is {prefix!r:.80}, expected ASCII characters")
    if (wrong := next((pair for pair in merges if not pair[-1].startswith(prefix)), None)) is not None:
        raise ValueError(f"the right part of the merge {wrong!r:.200} does not begin with continuing_subword_prefix {prefix!r:.80}")


def _require_joinable(content: bytes) -> None:
    """Raise ValueError for merges that may abort the process in the package. The package joins the parts of merges before it has read the
    rest of a file. If the file names the field `model` twice, the package joins the merges of both. So the file must be JSON, and name each
    field once."""
    model = _fields_of(_fields_of(content).get("model", EMPTY))
    try:
        found = msgspec.json.decode(msgspec.json.encode(model), type=_Joining)
    except msgspec.ValidationError:
        return  # the package refuses such types before it joins anything
    pairs = (one.split(" ") if isinstance(one, str) else one for one in found.merges)
    _require_prefix(found.continuing_subword_prefix, (pair for pair in pairs if not pair[0].startswith(VERSION)))


def _fields_of(content: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object by name. Return an empty dictionary if the JSON value is not an object. Raise ValueError if the
    object has two fields of the same name, or writes a name with escapes that it does not need."""
    compact = msgspec.json.format(bytes(content), indent=-1)
    try:
        fields = msgspec.json.decode(compact, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return {}
    if len(msgspec.json.encode(fields)) != len(compact):
        raise ValueError(f"an object names a field twice, or with escapes; its fields are {', '.join(fields):.200}")
    return fields


def _read_by_package(content: bytes) -> Read:
    """Let the package read the whole file. Raise an Exception of any class if the content is not understood."""
    _require_joinable(content)
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    return Read(tokenizer, *_extent(tokenizer))


def _extent(tokenizer: tokenizers.Tokenizer) -> tuple[int, int]:
    """Return the number of ids up to the largest one, and the length of the longest token. Make a dictionary of the vocabulary only if the
    ids of the model have gaps, because it would take 40 MB for a moment, and a fifth of the time of a load."""
    added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
    count, piece_of = tokenizer.get_vocab_size(with_added_tokens=False), tokenizer.model.id_to_token
    num_found, longest = 0, max(map(len, added.values()), default=1)
    for piece in map(piece_of, range(count)):
        if piece is not None:
            num_found += 1
            longest = max(longest, len(piece))
    if num_found < count:  # some piece has an id from `count` on, or the id of another piece
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        count, longest = max(vocabulary.values()) + 1, max(map(len, vocabulary))
    return max(count, *(id + 1 for id in added), 0), longest
