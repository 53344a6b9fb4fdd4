"""What an ELF object refers to. LLVM's loader ends the process over an unknown name, another machine's code or an address that does
not fit, so all of that is looked for here first."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.device.cpu.host import ARCH
from runtime.errors import DamagedCode

_MACHINES = {"x86_64": 62, "aarch64": 183}
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")

_RELOCATABLE = 1  # kind of file
_SYMBOLS, _RELOCATIONS = 2, 4  # kinds of sections
_ABSOLUTE_32 = {10, 11}  # kinds of relocations on x86-64: an address in 32 bits


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    first_global: int


def symbols(code: bytes) -> tuple[frozenset[str], frozenset[str]]:
    """Names that the object defines, and names that it only uses."""
    try:
        machine, sections = _sections(code)
        if machine == _MACHINES["x86_64"] and _ABSOLUTE_32 & set(_relocation_types(code, sections)):
            raise DamagedCode("the object code holds absolute addresses; compile it as position-independent code")
        named = list(_globals(code, sections))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise DamagedCode(f"the object code is not a valid ELF object: {error}") from error
    return frozenset(n for n, defined in named if defined), frozenset(n for n, defined in named if not defined)


def _sections(code: bytes) -> tuple[int, list[_Section]]:
    ident, kind, machine, _, _, _, table, _, _, _, _, entry, count, _ = _HEADER.unpack_from(code)
    if ident[:6] != b"\x7fELF\x02\x01" or kind != _RELOCATABLE:
        raise DamagedCode("the object code is not a relocatable 64-bit ELF object")
    if machine != _MACHINES.get(ARCH):
        raise DamagedCode(f"the object code is for ELF machine {machine}, this machine is {ARCH}")
    sections: list[_Section] = []
    for i in range(count):
        _, section_kind, _, _, offset, size, link, info, _, _ = _SECTION.unpack_from(code, table + i * entry)
        sections.append(_Section(section_kind, offset, size, link, info))
    return machine, sections


def _globals(code: bytes, sections: list[_Section]) -> Iterator[tuple[str, bool]]:
    """Each global name, and whether the object defines it."""
    for section in sections:
        if section.kind != _SYMBOLS:
            continue
        names = sections[section.link].offset
        for at in range(section.offset + section.first_global * _SYMBOL.size, section.offset + section.size, _SYMBOL.size):
            name, _, _, defined_in, _, _ = _SYMBOL.unpack_from(code, at)
            start = names + name
            yield code[start : code.index(b"\0", start)].decode(), defined_in != 0


def _relocation_types(code: bytes, sections: list[_Section]) -> Iterator[int]:
    for section in sections:
        if section.kind == _RELOCATIONS:
            for at in range(section.offset, section.offset + section.size, _RELOCATION.size):
                _, info, _ = _RELOCATION.unpack_from(code, at)
                yield info & 0xFFFFFFFF
