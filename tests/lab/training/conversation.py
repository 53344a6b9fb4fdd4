"""The unit of the corpus: a turn about one topic. Its key decides whether the model is trained on the turn or examined on it."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Message = dict[str, Any]  # a message of the Chat Completions API, but with parsed tool arguments
Tool = dict[str, Any]

_HELD_OUT_SHARE = 16  # one key in 16 is held out: the model is never trained on turns with this key


class Split(Enum):
    TRAIN = "train"
    HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's question and its answer, possibly with tool calls before the answer, possibly with a follow-up."""

    skill: str
    key: str  # the meaning of the question, which decides whether the turn is held out
    messages: tuple[Message, ...]
    also_right: tuple[str, ...] = ()  # other final answers that count as correct

    @property
    def split(self) -> Split:
        # CRC-32 is unsuitable: it is linear, so keys that follow one pattern would all fall into the same split.
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
    """Make an assistant message. `given` is the beginning of `text` if a schema forces it; in training, these tokens have the low weight of
    prompt tokens."""
    return {"role": "assistant", "content": text, **({"given": given} if given else {})}


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in named]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def result(value: object) -> Message:
    return {"role": "tool", "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def draw(rng: random.Random, split: Split, make: Callable[[random.Random], Turn]) -> Turn:
    """Draw turns from `make` until a turn belongs to this split (training or held out)."""
    while (turn := make(rng)).split is not split:
        pass
    return turn
