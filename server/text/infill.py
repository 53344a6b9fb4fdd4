"""Build fill-in-the-middle prompts. Models trained for this task have three marker tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.interfaces import Tokenizer

MARKERS = (  # markers before the prefix, before the suffix, and before the text to fill in
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
FILES = ("<|file_sep|>", "<file_sep>")  # markers before the name of another file


@dataclass(frozen=True, slots=True)
class Infill:
    """The marker tokens of fill-in-the-middle prompts in one model's vocabulary."""

    before: int  # token before the text that precedes the gap
    suffix: int  # token before the text that follows the gap
    middle: int  # token after which the model fills the gap
    file: int | None = None  # token before the name of another file, which precedes the text; None: there is no such token

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """Return the marker tokens of a vocabulary, or None if it lacks one of the three."""
        for markers in MARKERS:
            ids = [tokenizer.encode(marker, False) for marker in markers]
            if all(len(one) == 1 for one in ids):
                files = (tokenizer.encode(marker, False) for marker in FILES)
                before, suffix, middle = (one[0] for one in ids)
                return cls(before, suffix, middle, next((one[0] for one in files if len(one) == 1), None))
        return None

    def prompt(self, text: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt with which the model writes the text between `text` and `suffix`."""
        return [self.before, *text, self.suffix, *suffix, self.middle]
