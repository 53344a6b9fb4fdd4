"""vocab.json and merges.txt: a vocabulary of byte-level BPE, and the order in which its tokens are merged.

The files do not say how a text is split into words. For most models, the tokenizer's class determines this. Many models name GPT-2's class;
then the merges show whether digits are split one by one, since no merge makes a token that spans two words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from compiler.frontend.errors import DamagedFile, ModelError
from compiler.frontend.vocabulary.pieces import add_ends
from compiler.frontend.vocabulary.stated import MOST_TOKENS, Stated
from compiler.frontend.vocabulary.words import QWEN2_WORDS, QWEN35_WORDS, as_gpt2, as_gpt2_with_single_digits, by_expressions

VOCABULARY, MERGES = "vocab.json", "merges.txt"
HEADER = "#version"
END = "<|endoftext|>"

Splitting = Callable[[bool], pre_tokenizers.PreTokenizer]  # makes the splitter; the argument says whether a space is added before a text


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of tokenizers."""

    splittings: tuple[Splitting, ...]  # the finest splitting first
    special_tokens: Mapping[str, str | dict[str, Any]]  # by role, for roles that the files do not state; each a text, or fields of a token
    composes: bool = False  # characters are composed first (NFC)
    is_roberta: bool = False  # puts special tokens around texts and pairs of texts


_MASK = {"content": "<mask>", "lstrip": True}
_GPT2: tuple[Splitting, ...] = (
    lambda prefix: as_gpt2_with_single_digits(add_prefix_space=prefix),
    lambda prefix: as_gpt2(add_prefix_space=prefix),
)
_QWEN = {"eos_token": END, "unk_token": END, "pad_token": END}
_ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
KINDS: Mapping[str, Kind] = {
    "GPT2Tokenizer": Kind(_GPT2, {"bos_token": END, "eos_token": END, "unk_token": END}),
    "CodeGenTokenizer": Kind(_GPT2, {"bos_token": END, "eos_token": END, "unk_token": END}),
    "Qwen2Tokenizer": Kind((lambda _: by_expressions(QWEN2_WORDS),), _QWEN, composes=True),
    "Qwen3_5Tokenizer": Kind((lambda _: by_expressions(QWEN35_WORDS),), _QWEN, composes=True),
    "RobertaTokenizer": Kind(_GPT2[1:], {**_ROBERTA, "mask_token": _MASK}, is_roberta=True),
}


def tokenizer_json(vocabulary: bytes, merges: bytes, kind: Kind, stated: Stated) -> bytes:
    """Return the content of tokenizer.json, made from the contents of vocab.json and merges.txt. Raise ModelError if these files are
    damaged, or do not show how a text is split into words."""
    own = _vocabulary(vocabulary)
    pairs = _merges(merges, own)
    ids, added = stated.place(own, [])
    unknown = stated.role("unk_token")
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=unknown if unknown in ids else None))
    tokenizer.normalizer = normalizers.NFC() if kind.composes else None  # type: ignore[assignment]  # the package takes None
    tokenizer.pre_tokenizer = _splitting(kind, [left + right for left, right in pairs])(stated.flag("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, kind, stated, ids)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = added
    fields["model"] |= {"vocab": ids, "merges": pairs}
    return msgspec.json.encode(fields)


def _vocabulary(content: bytes) -> dict[str, int]:
    """Return the id of each token. Raise DamagedFile if the content is no JSON object of ids, or if ids are repeated or out of range."""
    try:
        found = msgspec.json.decode(content, type=dict[str, int])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedFile(f"{VOCABULARY} is damaged: {error}") from error
    if len(set(found.values())) != len(found) or not all(0 <= id < MOST_TOKENS for id in found.values()):
        raise DamagedFile(f"{VOCABULARY} is damaged: expected an id of its own for each token, from 0 to {MOST_TOKENS - 1}")
    return found


def _merges(content: bytes, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges in order, each as its two tokens. Raise DamagedFile if a line is not two tokens that make a third."""
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{MERGES} is damaged: {error}") from error
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith(HEADER)):
            continue
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise DamagedFile(f"{MERGES} is damaged: line {number} is {line!r:.80}, expected two tokens that make a third")
        pairs.append((left, right))
    return pairs


def _splitting(kind: Kind, joined: Sequence[str]) -> Splitting:
    """Return the splitting of a class. If the class has several, return the first that divides none of the tokens `joined` that merges
    make. Raise ModelError if each splitting divides one of them."""
    if len(kind.splittings) == 1:
        return kind.splittings[0]
    plain = decoders.ByteLevel()
    texts = [text for token in joined if not _shows_nothing(text := plain.decode([token]))]
    broken = ""
    for splitting in kind.splittings:
        words = splitting(False)
        broken = next((text for text in texts if len(words.pre_tokenize_str(text)) > 1), "")
        if not broken:
            return splitting
    raise ModelError(f"they do not say how a text is split into words, and the token {broken!r:.80} shows that it is not as usual")


def _shows_nothing(text: str) -> bool:
    """Return whether the text of a token shows nothing about the splitting: every splitting keeps it whole (letters after at most one
    space), or it begins or ends inside a character."""
    return text.removeprefix(" ").isalpha() or "\ufffd" in text


def _add_ends(tokenizer: tokenizers.Tokenizer, kind: Kind, stated: Stated, ids: Mapping[str, int]) -> None:
    """Let the tokenizer put the begin token before a text if the files say so, or RoBERTa's tokens around texts and pairs of texts."""
    roles = {role: (text, ids[text]) for role in stated.roles if (text := stated.role(role)) in ids and text is not None}
    if not kind.is_roberta:
        add_ends(tokenizer, roles.get("bos_token") if stated.flag("add_bos_token", False) else None, None)
    elif "sep_token" not in roles or "cls_token" not in roles:
        raise DamagedFile(f"{VOCABULARY} lacks {stated.role('cls_token')!r} or {stated.role('sep_token')!r}, which stand around a text")
    else:
        prefix = stated.flag("add_prefix_space", False)
        tokenizer.post_processor = processors.RobertaProcessing(roles["sep_token"], roles["cls_token"], add_prefix_space=prefix)
