"""Read the wire format of Protocol Buffers: the fields of a message, without a description of the message. All functions raise DamagedFile
for a message that violates the format, or a value that has another type than the function returns."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from compiler.frontend.errors import DamagedFile

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
MOST_VARINT_BYTES = 10


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each field: an integer, or the bytes of a text, a message or a float."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, at = _varint(message, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise DamagedFile(f"a field has the wire type {kind}, expected 0, 1, 2 or 5")
        if at + size > len(message):
            raise DamagedFile(f"a field has {size} bytes, expected at most the {len(message) - at} that are left")
        yield key >> 3, message[at : at + size]
        at += size


def number(value: int | memoryview) -> int:
    """Return an integer field as a signed number of 64 bits."""
    if not isinstance(value, int):
        raise DamagedFile("a field holds bytes, expected an integer")
    return value - (1 << 64) if value >> 63 else value


def content(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise DamagedFile(f"a field is {value}, expected bytes")
    return value


def text(value: int | memoryview) -> str:
    try:
        return bytes(content(value)).decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(f"a text is not UTF-8: {error}") from error


def real(value: int | memoryview) -> float:
    if len(found := content(value)) != 4:
        raise DamagedFile(f"a float has {len(found)} bytes, expected 4")
    return struct.unpack("<f", found)[0]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the integer of variable length at index `at`, of which the lowest 64 bits count, and the index after it. Raise DamagedFile if
    the integer does not end within the message or within MOST_VARINT_BYTES."""
    value = 0
    for count, byte in enumerate(message[at : at + MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value & ((1 << 64) - 1), at + count + 1
    raise DamagedFile("an integer does not end")
