"""Join texts with the special tokens that a tokenizer puts around one text, or around two texts, as in the training of rerankers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """The tokens of two texts that a model reads together."""

    ids: list[int]
    second: int | None  # index where the second text begins; None: the tokenizer does not distinguish the two


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """The special tokens around one text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def text_in(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return the index of the text's first token in `ids`, which may lack the special tokens, and the index after its last token."""
        begin = len(self.before) if tuple(ids[: len(self.before)]) == self.before else 0
        end = len(ids) - len(self.after)
        return begin, end if end >= 0 and tuple(ids[end:]) == self.after else len(ids)


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The special tokens around two texts."""

    before: tuple[int, ...] = ()  # tokens before the first text
    between: tuple[int, ...] = ()  # tokens between the two texts
    after: tuple[int, ...] = ()  # tokens after the second text
    num_first: int | None = None  # tokens of `between` that belong to the first text; None: the texts are not distinguished

    @property
    def num_special(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Sequence[int], second: Sequence[int]) -> Pair:
        """Return the tokens of two texts, with the special tokens around them."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        return Pair(ids, None if self.num_first is None else len(self.before) + len(first) + self.num_first)
