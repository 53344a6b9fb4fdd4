"""Write a shared library (`.so`) for Linux and Android. This needs no tools on the user's machine.

The library calls no other library, has no global variables, and its code addresses data relative to itself. So it imports nothing, and a
loader has nothing to relocate. Its segments follow each other in the file without padding to pages; in memory each one begins on another
page:

    DATA     headers, exported symbols, constants
    CODE     instructions
    DYNAMIC  the table that a loader reads first. Some loaders write addresses into it; afterwards they make its pages read-only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from compiler.ir.errors import CompileError
from runtime.objects import elf
from runtime.objects.elf import ALLOC, EXECUTE, HEADER, MACHINES, SECTION, SYMBOL, WRITE, Object
from runtime.objects.link import Places, joined, linked
from runtime.sections import ALIGNMENT, align

PAGE_BYTES: Final = 64 << 10  # size of the largest pages of any machine: systems for AArch64 choose 4, 16 or 64 KiB
DATA, CODE, DYNAMIC = range(3)
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_NUM_SEGMENTS: Final = 6
_LOAD, _DYNAMIC, _STACK, _RELRO = 1, 2, 0x6474E551, 0x6474E552  # types of segments
_READ, _READ_EXECUTE, _READ_WRITE = 4, 5, 6  # access rights of segments
_BITS, _STRINGS, _HASH, _ENTRIES, _SYMBOLS = 1, 3, 5, 6, 11  # types of sections
_SHARED_OBJECT: Final = 3
_GLOBAL_FUNCTION: Final = 0x12
_ENTRY: Final = struct.Struct("<QQ")  # an entry of the dynamic table: a tag and a value
_HASH_AT, _STRINGS_AT, _SYMBOLS_AT, _STRINGS_BYTES, _SYMBOL_BYTES, _NAME = 4, 5, 6, 10, 11, 14  # tags


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the library."""

    name: str
    kind: int  # type of the section
    flags: int  # 0: the section is not loaded
    segment: int  # DATA, CODE or DYNAMIC
    begin: int  # offset in the file
    size: int
    entry_bytes: int = 0
    link: str = ""  # name of the section that this one refers to

    @property
    def end(self) -> int:
        return self.begin + self.size

    @property
    def address(self) -> int:
        """The address in memory, counted from the beginning of the library, or 0 if the section is not loaded."""
        return self.begin + self.segment * PAGE_BYTES if self.flags else 0


def shared_library(objects: Sequence[bytes], arch: str, name: str, exported: Sequence[str]) -> bytes:
    """Link objects into a shared library. Programs can call its functions `exported`, and find the library by `name`. Equal arguments give
    equal bytes. Raise CompileError if no object defines a function that another one calls."""
    whole = joined([elf.read(code, arch) for code in objects])
    if whole.undefined:
        raise CompileError(f"{name} refers to {', '.join(sorted(whole.undefined))}; expected objects that define all functions they call")
    strings = [b"", name.encode(), *(function.encode() for function in exported)]
    starts = [sum(len(s) + 1 for s in strings[:i]) for i in range(len(strings))]
    hashes = _hash_table(strings[2:])
    parts, places = _layout(whole, num_symbols=1 + len(exported), strings_bytes=starts[-1] + len(strings[-1]) + 1, hash_bytes=len(hashes))
    numbers = {part: i for i, part in enumerate(parts, 1)}  # section 0 is the empty section that ELF requires
    image = linked(whole, places, 0, {})
    found = [whole.defined[function] for function in exported]
    symbols = [
        SYMBOL.pack(start, _GLOBAL_FUNCTION, 0, numbers[".text"], places.of_symbol(symbol), symbol.size)
        for start, symbol in zip(starts[2:], found, strict=True)
    ]
    content = {
        ".dynsym": bytes(SYMBOL.size) + b"".join(symbols),
        ".hash": hashes,
        ".dynstr": b"\0".join(strings) + b"\0",
        ".dynamic": _dynamic(parts, starts[1]),
        ".shstrtab": b"\0" + b"".join(part.encode() + b"\0" for part in parts),
    }
    file = bytearray(_header(arch, whole.flags, parts))
    for part in parts.values():
        file += bytes(part.begin - len(file)) + content.get(part.name, image[part.address : part.address + part.size])
    return bytes(file) + bytes(_sections_at(parts) - len(file)) + _section_headers(parts, numbers)


def _layout(whole: Object, *, num_symbols: int, strings_bytes: int, hash_bytes: int) -> tuple[dict[str, Part], Places]:
    """Choose the places of all sections in the file and, for the sections of objects, in memory."""
    parts: dict[str, Part] = {}
    end = HEADER.size + _NUM_SEGMENTS * _SEGMENT.size

    def add(name: str, kind: int, flags: int, segment: int, size: int, entry_bytes: int = 0, link: str = "") -> None:
        nonlocal end
        parts[name] = Part(name, kind, flags, segment, align(end), size, entry_bytes, link)
        end = parts[name].end

    add(".dynsym", _SYMBOLS, ALLOC, DATA, num_symbols * SYMBOL.size, SYMBOL.size, ".dynstr")
    add(".hash", _HASH, ALLOC, DATA, hash_bytes, 4, ".dynsym")
    add(".dynstr", _STRINGS, ALLOC, DATA, strings_bytes)
    sections: dict[int, int] = {}
    for name, flags, segment in ((".rodata", ALLOC, DATA), (".text", ALLOC | EXECUTE, CODE)):
        begin = at = align(end)
        for i, section in enumerate(whole.sections):
            if section.is_loaded and section.is_code == (segment == CODE):
                at = align(at, section.alignment)
                sections[i] = at + segment * PAGE_BYTES
                at += section.size
        add(name, _BITS, flags, segment, at - begin)
    places = Places(sections, {}, parts[".text"].address + parts[".text"].size)
    add(".dynamic", _ENTRIES, ALLOC | WRITE, DYNAMIC, 7 * _ENTRY.size, _ENTRY.size, ".dynstr")
    add(".shstrtab", _STRINGS, 0, DYNAMIC, 1 + sum(len(name) + 1 for name in [*parts, ".shstrtab"]))
    return parts, places


def _hash_table(names: Sequence[bytes]) -> bytes:
    """Return the table by which loaders find a symbol by its name. Symbols are numbered from 1; 0 ends a chain."""
    buckets, chains = [0] * len(names), [0] * (len(names) + 1)
    for i, name in enumerate(names, 1):
        bucket = symbol_hash(name) % len(names)
        chains[i], buckets[bucket] = buckets[bucket], i
    return struct.pack(f"<{2 + len(buckets) + len(chains)}I", len(buckets), len(chains), *buckets, *chains)


def symbol_hash(name: bytes) -> int:
    """Return ELF's hash of a symbol's name."""
    found = 0
    for byte in name:
        found = (found << 4) + byte
        high = found & 0xF0000000
        found = (found ^ high >> 24) & ~high
    return found


def _dynamic(parts: dict[str, Part], name_at: int) -> bytes:
    """Return the table that a loader reads first. `name_at` is the place of the library's name in `.dynstr`."""
    entries = [
        (_NAME, name_at),
        (_HASH_AT, parts[".hash"].address),
        (_STRINGS_AT, parts[".dynstr"].address),
        (_SYMBOLS_AT, parts[".dynsym"].address),
        (_STRINGS_BYTES, parts[".dynstr"].size),
        (_SYMBOL_BYTES, SYMBOL.size),
        (0, 0),
    ]
    return b"".join(_ENTRY.pack(*entry) for entry in entries)


def _header(arch: str, flags: int, parts: dict[str, Part]) -> bytes:
    """Return the file header and the headers of the segments."""
    text, dynamic = parts[".text"], parts[".dynamic"]
    padded = align(dynamic.address + dynamic.size, PAGE_BYTES) - dynamic.address  # loaders protect whole pages
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    counts = (HEADER.size, _SEGMENT.size, _NUM_SEGMENTS, SECTION.size, len(parts) + 1, len(parts))
    segments = [
        (_LOAD, _READ, 0, 0, parts[".rodata"].end, parts[".rodata"].end, PAGE_BYTES),
        (_LOAD, _READ_EXECUTE, text.begin, text.address, text.size, text.size, PAGE_BYTES),
        (_LOAD, _READ_WRITE, dynamic.begin, dynamic.address, dynamic.size, padded, PAGE_BYTES),
        (_DYNAMIC, _READ_WRITE, dynamic.begin, dynamic.address, dynamic.size, dynamic.size, 8),
        (_RELRO, _READ, dynamic.begin, dynamic.address, dynamic.size, padded, 1),
        (_STACK, _READ_WRITE, 0, 0, 0, 0, 16),
    ]
    return HEADER.pack(ident, _SHARED_OBJECT, MACHINES[arch], 1, 0, HEADER.size, _sections_at(parts), flags, *counts) + b"".join(
        _SEGMENT.pack(kind, rights, begin, address, address, size, memory, alignment)
        for kind, rights, begin, address, size, memory, alignment in segments
    )


def _sections_at(parts: dict[str, Part]) -> int:
    """Return the offset in the file of the headers of sections, which come last."""
    return align(parts[".shstrtab"].end)


def _section_headers(parts: dict[str, Part], numbers: dict[str, int]) -> bytes:
    """Return the headers of all sections, beginning with the empty header of section 0. `numbers` has the number of each section by
    name."""
    headers = bytes(SECTION.size)
    name_at = 1
    for part in parts.values():
        link, first_global = numbers.get(part.link, 0), int(part.kind == _SYMBOLS)
        place = (part.address, part.begin, part.size)
        headers += SECTION.pack(name_at, part.kind, part.flags, *place, link, first_global, ALIGNMENT, part.entry_bytes)
        name_at += len(part.name) + 1
    return headers
