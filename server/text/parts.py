"""The kinds of parts into which the text of a chat answer is parsed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call. Its arguments follow in parts with the same index."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are JSON."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments
