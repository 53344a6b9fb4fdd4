"""Read the header in which a trusted ingress names the server that has the pages of a request's prompt.

    x-relaxserve-pages: KEY URL            the server at this address holds pages of the prompt
    x-relaxserve-pages: KEY URL compute    the server at this address is to compute the prompt first

KEY is the value of the setting `ingress_key`. Without a key, any client could make this server connect to any address.
"""

from __future__ import annotations

import hmac
import logging
import re
from contextvars import ContextVar

import msgspec

log = logging.getLogger(__name__)

HEADER = "x-relaxserve-pages"
FORM = re.compile(r"http://([\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})( compute)?", re.ASCII)


class Giver(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server that may hold pages of a prompt."""

    host: str
    port: int
    computes: bool = False  # whether the server is to compute the prompt first


GIVER: ContextVar[Giver | None] = ContextVar("giver", default=None)  # the server that the header of the current task's request names


def named(header: str, key: str | None) -> Giver | None:
    """Return the server that an ingress names. Return None if this server has no ingress key, or if the header does not have this key. If
    the rest of the header is malformed, log a warning and return None."""
    given, _, value = header.partition(" ")
    if key is None or not hmac.compare_digest(given.encode(), key.encode()):
        return None
    found = FORM.fullmatch(value)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        log.warning("%s is KEY %.200r; expected KEY http://HOST:PORT, maybe with ' compute' at its end: no pages are taken", HEADER, value)
        return None
    return Giver(found[1].strip("[]"), int(found[2]), found[3] is not None)


def header_of(key: str, url: str, *, computes: bool) -> str:
    """Return the value of the header by which an ingress names a server."""
    return f"{key} {url}{' compute' if computes else ''}"
