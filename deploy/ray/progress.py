"""Which events of a stream the client has, so that another replica's stream of the same request goes on behind them.

Equal requests with equal open values get equal events, so the events that were delivered are counted and the same number is left out.
The events of each choice are counted for themselves, because choices take turns in an order that depends on other requests. A digest of
the delivered events makes sure that the other stream begins with them. Comments do not count: they depend on time. Neither do the numbers
of tokens found in a prefix cache: they differ between replicas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b

CHOICE = re.compile(rb'(?:"choices":\[|\Adata: )\{"index":(\d+)')
CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens|input_tokens|cache_n)":\d+')


class Departure(Exception):
    """The other replica's stream does not begin with the events that the client has."""


@dataclass(slots=True)
class _Part:
    """The events of one choice."""

    delivered: int = 0
    digest: bytes = b""
    again: int = 0  # events of the present stream that were left out
    digest_again: bytes = b""


@dataclass(slots=True)
class Progress:
    parts: dict[bytes, _Part] = field(default_factory=dict[bytes, _Part])

    def again(self) -> None:
        """Begin with the stream of another replica."""
        for part in self.parts.values():
            part.again, part.digest_again = 0, b""

    def takes(self, event: bytes) -> bool:
        """Count an event. Return whether the client does not have it yet. Raise Departure if the stream is not the same."""
        found = CHOICE.search(event)
        part = self.parts.setdefault(b"" if found is None else found[1], _Part())
        if part.again < part.delivered:
            part.again += 1
            part.digest_again = _next(part.digest_again, event)
            if part.again == part.delivered and part.digest_again != part.digest:
                raise Departure(f"the first {part.delivered} events differ from those that the client has")
            return False
        part.delivered += 1
        part.again += 1
        part.digest = _next(part.digest, event)
        return True


def _next(digest: bytes, event: bytes) -> bytes:
    return blake2b(digest + CACHED.sub(b"", event), digest_size=16).digest()


class Events:
    """Splits the bytes of a stream into whole events, each with its end."""

    def __init__(self, media_type: str) -> None:
        self._end = b"\n" if "ndjson" in media_type else b"\n\n"
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + data).split(self._end)
        return [event + self._end for event in whole]


def is_comment(event: bytes) -> bool:
    return event.startswith(b":")
