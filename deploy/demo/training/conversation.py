"""The unit of the corpus: one turn of talk about one thing, and whether it may be trained on."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Message = dict[str, Any]  # as in the Chat Completions API, tool arguments already parsed
Tool = dict[str, Any]

_HELD_OUT_SHARE = 16  # one key in so many is never trained on


class Split(Enum):
    TRAIN = "train"
    HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user asks and how it should be answered, perhaps with tools between, perhaps with a follow-up."""

    skill: str
    key: str  # the meaning of the question; it alone decides the split
    messages: tuple[Message, ...]
    also_right: tuple[str, ...] = ()  # other final answers that are as good as the one given

    @property
    def split(self) -> Split:
        # A checksum would not do: CRC-32 is linear, so keys of one pattern fall to one side together.
        digest = hashlib.blake2b(self.key.encode(), digest_size=8).digest()
        return Split.HELD_OUT if int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0 else Split.TRAIN


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    system: str | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def messages(self) -> list[Message]:
        opening: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + [message for turn in self.turns for message in turn.messages]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, *, given: str = "") -> Message:
    """`given`: what `text` begins with because a schema demands it; no more is learnt of it than of a question."""
    return {"role": "assistant", "content": text, **({"given": given} if given else {})}


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in named]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def result(value: object) -> Message:
    return {"role": "tool", "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def draw(rng: random.Random, split: Split, make: Callable[[random.Random], Turn]) -> Turn:
    """The first turn that `make` comes up with on this side of the split."""
    while (turn := make(rng)).split is not split:
        pass
    return turn
