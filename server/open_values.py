"""Choose the values that a request leaves open: ids, the time of creation, which a chat template may show, and the seed.

The values are random, except if a trusted ingress names a nonce: then they are computed from the nonce, so that another server of the same
model gives a resubmitted request the same bytes.

    x-relaxserve-open: KEY NONCE CREATED        the key of the setting `ingress_key`, 16 to 64 hexadecimal digits, seconds since 1970
"""

from __future__ import annotations

import hmac
import re
import secrets
import string
import time
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b

HEADER = "x-relaxserve-open"
PLACE_BYTES = 4  # bytes of the nonce with which each hexadecimal id begins, so that an ingress finds the server that made the id
LETTERS = string.ascii_letters + string.digits
FORM = re.compile(r"(\S+) ((?:[0-9a-f]{2}){8,32}) (\d{1,12})", re.ASCII)


@dataclass(slots=True, eq=False)
class OpenValues:
    """The nonce of a request, and how many values were drawn from it."""

    nonce: bytes  # the values of the request are computed from it
    created_s: float  # time of the answer's creation, in seconds since 1970
    choice: int = 0  # the choice for which values are drawn now; the order of the choices may differ from server to server
    drawn: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])  # how many values were drawn, by choice and name

    def draw(self, name: str, num_bytes: int) -> bytes:
        """Return the next value of this name for the present choice, and count it. The order in which values of different names are drawn
        does not matter."""
        at = self.choice, name
        self.drawn[at] += 1
        return blake2b(f"{name} {self.choice} {self.drawn[at]}".encode(), digest_size=num_bytes, key=self.nonce).digest()


OPEN: ContextVar[OpenValues | None] = ContextVar("open_values", default=None)  # the open values of the request that this task serves


def given(header: str, key: str | None) -> OpenValues | None:
    """Return the open values that the header of an ingress determines, or None if the header is malformed or does not have the ingress's
    key."""
    found = FORM.fullmatch(header)
    if key is None or found is None or not hmac.compare_digest(found[1].encode(), key.encode()):
        return None
    return OpenValues(bytes.fromhex(found[2]), int(found[3]))


def new_hex(name: str, num_bytes: int) -> str:
    """Return a new id of `num_bytes` bytes, more than PLACE_BYTES, in hexadecimal digits. `name` says what the id is for."""
    values = OPEN.get()
    if values is None:
        return secrets.token_hex(num_bytes)
    return (values.nonce[:PLACE_BYTES] + values.draw(name, num_bytes - PLACE_BYTES)).hex()


def new_letters(name: str, length: int) -> str:
    """Return a new id of `length` letters and digits. `name` says what the id is for."""
    values = OPEN.get()
    if values is None:
        return "".join(secrets.choice(LETTERS) for _ in range(length))
    number, found = int.from_bytes(values.draw(name, 32)), ""
    for _ in range(length):
        number, at = divmod(number, len(LETTERS))
        found += LETTERS[at]
    return found


def new_seed() -> int:
    """Return a new seed of a sampler."""
    values = OPEN.get()
    return secrets.randbits(63) if values is None else int.from_bytes(values.draw("seed", 8)) >> 1


def created_s() -> float:
    """Return the time of an answer's creation, in seconds since 1970: the present time, unless an ingress has named another."""
    values = OPEN.get()
    return time.time() if values is None else values.created_s


def turn_to(choice: int) -> None:
    """Set the choice of the answer for which the next values are drawn. This has no effect on random values."""
    values = OPEN.get()
    if values is not None:
        values.choice = choice
