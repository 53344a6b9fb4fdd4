"""Write an archive (`.a`) with a symbol index that GNU's and LLVM's linkers read. This needs no tools on the user's machine."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"!<arch>\n"
_HEADER_BYTES: Final = 60
_LONGEST_NAME: Final = 15  # bytes of the longest name of a member; a slash follows it


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive."""

    content: bytes
    symbols: Sequence[str]  # symbols that the member defines for other objects


def archive(members: Mapping[str, Member]) -> bytes:
    """Return an archive of the members by name. The archive states neither a time nor a user, so equal members give equal bytes. A name
    must have at most 15 characters."""
    names = b"".join(symbol.encode() + b"\0" for member in members.values() for symbol in member.symbols)
    count = sum(len(member.symbols) for member in members.values())
    index_bytes = 4 + 4 * count + len(names)
    at = len(MAGIC) + _HEADER_BYTES + _even(index_bytes)
    places: list[int] = []
    parts: list[bytes] = []
    for name, member in members.items():
        assert len(name) <= _LONGEST_NAME, name
        places += [at] * len(member.symbols)
        parts.append(_member(f"{name}/", member.content))
        at += len(parts[-1])
    index = struct.pack(f">I{count}I", count, *places) + names
    return MAGIC + _member("/", index) + b"".join(parts)


def _member(name: str, content: bytes) -> bytes:
    """Return a member with its header, padded to an even number of bytes."""
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
    assert len(header) == _HEADER_BYTES
    return header + content + b"\n" * (len(content) % 2)


def _even(size: int) -> int:
    return size + size % 2
