"""Count the events of a stream that the client has, so that another replica's stream of the same request can continue after them.

Equal requests with equal open values (`server/open_values.py`) get equal events, so as many events as the client has are left out of the
other stream. The events of each choice are counted separately, because the order in which choices take turns depends on other requests. A
digest of the delivered events makes sure that the other stream begins with them. Comments are not counted, because they depend on time. The
digest leaves out the numbers of tokens found in a prefix cache or not, because these numbers differ between replicas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

# The number of a choice is found by searches for constant bytes, because they run for each token, and one regular expression for both texts
# would take several times as long.
CHOICES, CHOICE = b'"choices":[{"index":', b'data: {"index":'  # the texts before the number of a choice
CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens|input_tokens|cache_n)":\d+')
CACHED_ENDS = b'_tokens":', b'"cache_n":'  # each match of CACHED contains one of these


class Departure(Exception):
    """Raised if the other replica's stream does not begin with the events that the client has."""


class _Hash(Protocol):
    """A hash of hashlib."""

    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


def _new_hash() -> _Hash:
    return blake2b(digest_size=16)


@dataclass(slots=True)
class _Part:
    """The events of one choice."""

    delivered: int = 0  # number of events that the client has
    hash: _Hash = field(default_factory=_new_hash)  # digest of the events that the client has
    again: int = 0  # number of events of the present stream so far
    hash_again: _Hash = field(default_factory=_new_hash)  # digest of these events, up to the last one that the client has


@dataclass(slots=True)
class Progress:
    """The events of one stream that the client has, by choice."""

    parts: dict[bytes, _Part] = field(default_factory=dict[bytes, _Part])

    def again(self) -> None:
        """Expect the stream of another replica, from its first event on."""
        for part in self.parts.values():
            part.again, part.hash_again = 0, _new_hash()

    def takes(self, event: bytes) -> bool:
        """Count an event. Return whether the client lacks it. Raise Departure if the stream does not begin with the events that the client
        has."""
        choice = _choice_of(event)
        part = self.parts.get(choice) or self.parts.setdefault(choice, _Part())
        if part.again < part.delivered:
            part.again += 1
            part.hash_again.update(_lasting(event))
            if part.again == part.delivered and part.hash_again.digest() != part.hash.digest():
                raise Departure(f"the first {part.delivered} events differ from those that the client has")
            return False
        part.delivered += 1
        part.again += 1
        part.hash.update(_lasting(event))
        return True


def _choice_of(event: bytes) -> bytes:
    """Return the digits of the choice's number, or nothing if the event belongs to no choice."""
    if event.startswith(CHOICE):
        begin = len(CHOICE)
    elif (at := event.find(CHOICES)) >= 0:
        begin = at + len(CHOICES)
    else:
        return b""
    end = begin
    while event[end : end + 1].isdigit():
        end += 1
    return event[begin:end]


def _lasting(event: bytes) -> bytes:
    """Return the part of an event that is the same in the stream of every replica."""
    return CACHED.sub(b"", event) if any(end in event for end in CACHED_ENDS) else event
