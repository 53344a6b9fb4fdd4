"""Interpret sentencepiece's vocabularies: pieces with kinds and scores, which tokenizer.model and GGUF files store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from compiler.frontend.errors import DamagedFile

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # kinds of pieces; 1 is a normal one
SPACE = "▁"  # stands for a space
MAX_SPLIT_CHARS = 1 << 25  # maximum number of characters read to derive merges, 2 s of work; Gemma's 262 144 pieces need 2e7
PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False}


def tokenizer_of_pieces(model: models.Model, *, has_prefix: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer that writes spaces as the mark SPACE. If `has_prefix`, it also begins a text with a mark, and decodes tokens
    without the space at their beginning."""
    tokenizer = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces] if has_prefix else [spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def merges_by_score(ids: Mapping[str, int], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Derive merges from scores. Sentencepiece merges the two neighbours whose joined piece has the best score. So each way to split a
    piece into two other pieces could be a merge, but only one of these ways ever occurs: until the piece is complete, no merge crosses its
    bounds, so its characters are merged as if they stood alone. Only this way becomes a merge. Gemma has 2.2 ways per piece, and a
    tokenizer with a merge for each way takes a third longer to build. Raise DamagedFile if deriving the merges would take too long."""
    if (work := sum(len(piece) ** 2 for piece in ids)) > MAX_SPLIT_CHARS:
        raise DamagedFile(f"the pieces are too long: deriving merges would read {work} characters, expected at most {MAX_SPLIT_CHARS}")
    ids = {piece: id for piece, id in ids.items() if kinds[id] not in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)}
    by_id = np.fromiter(ids.values(), np.int64, len(ids))
    pieces = [*ids]
    best_first = [pieces[at] for at in np.lexsort((by_id, -np.asarray(scores, np.float64)[by_id])).tolist()]
    ranks = {piece: rank for rank, piece in enumerate(best_first)}
    is_merged = {piece for piece in ids if len(piece) == 1}.issuperset
    return [(piece[:cut], piece[cut:]) for piece in best_first if is_merged(piece) and (cut := _last_cut(piece, ranks))]


def _last_cut(piece: str, ranks: Mapping[str, int]) -> int:
    """Merge the characters of a piece as sentencepiece does, until two parts are left. Return the length of the left part, or 0 if merging
    ends with more parts or there is only one character. Of several pairs that make the same piece, merge the pair with the longest left
    part, or the leftmost of such pairs. Sentencepiece merges the leftmost pair, with the same result for runs of one character."""
    if len(piece) < 3:
        return len(piece) - 1
    rank_of, never = ranks.get, len(ranks)
    bounds = [*range(len(piece) + 1)]  # part i is piece[bounds[i] : bounds[i + 1]]
    found = [rank_of(piece[at : at + 2], never) for at in range(len(piece) - 1)]  # rank of the piece that parts i and i + 1 make
    while len(found) > 1:
        best = min(found)
        if best == never:
            return 0
        at = found.index(best)
        if found.count(best) > 1:
            at = max((i for i, rank in enumerate(found) if rank == best), key=lambda i: (bounds[i + 1] - bounds[i], -i))
        del bounds[at + 1], found[at]
        if at < len(found):
            found[at] = rank_of(piece[bounds[at] : bounds[at + 2]], never)
        if at:
            found[at - 1] = rank_of(piece[bounds[at - 1] : bounds[at + 1]], never)
    return bounds[1]


def tokens_in_texts(ids: Mapping[str, int], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tokens that are recognised in a text before it is split into words. Control tokens and the unknown token are special
    tokens. `ids` has the id of each token, `kinds` the kind of each id."""
    added: list[dict[str, Any]] = []
    for piece, id in ids.items():
        special = kinds[id] in (CONTROL, UNKNOWN)
        if piece and (special or kinds[id] == USER_DEFINED):
            # Spaces are replaced by the mark before a token that contains the mark is matched.
            normalized = not special and SPACE in piece
            added.append({"id": id, "content": piece, **PLAIN_TOKEN, "normalized": normalized, "special": special})
    return added


def add_ends(tokenizer: tokenizers.Tokenizer, before: tuple[str, int] | None, after: tuple[str, int] | None) -> None:
    """Let a tokenizer put special tokens, each a text with its id, before and after a text. If both are None, change nothing."""
    ends = [end for end in dict.fromkeys((before, after)) if end is not None]
    if not ends:
        return
    single = [] if before is None else [before[0]]
    single += ["$A"] if after is None else ["$A", after[0]]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
