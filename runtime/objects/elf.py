"""Read ELF objects: sections to load, symbols, relocations. If an object is damaged, `read` or `link.py` raises DamagedCode before any code
of the object is loaded."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.errors import DamagedCode

MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")

_RELOCATABLE = 1  # type of a relocatable file
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8  # types of sections
WRITE, ALLOC, EXECUTE = 1, 2, 4  # flags of sections: writable, takes memory, contains instructions
_ABSOLUTE_NUMBER = 0xFFF1  # section number of a symbol that is in no section
_MOST_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Section:
    """An entry of the section table. `link` and `info` are fields of ELF, whose meaning depends on `kind`."""

    kind: int
    flags: int
    offset: int  # offset in the file, in bytes
    size: int
    link: int
    info: int
    alignment: int

    @property
    def is_loaded(self) -> bool:
        return bool(self.flags & ALLOC) and self.size > 0

    @property
    def is_code(self) -> bool:
        return bool(self.flags & EXECUTE)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name for a place in a section, or for a function that another object defines."""

    name: str
    section: int  # section that contains the symbol; 0: the object only refers to the symbol
    value: int  # offset of the symbol in its section
    size: int
    is_global: bool


@dataclass(frozen=True, slots=True)
class Relocation:
    """Bytes of the code that depend on the address of a symbol. They are written when sections have addresses."""

    section: int  # section whose bytes the relocation changes
    offset: int  # offset of these bytes in the section
    kind: int  # number of its rule in relocate.RULES
    symbol: int  # index in the symbols of the object
    addend: int  # number that is added to the address of the symbol


@dataclass(frozen=True, slots=True)
class Object:
    """An ELF object, parsed. Symbols and relocations refer to sections by their index."""

    code: bytes
    arch: str
    flags: int  # the machine's flags, which state the calling convention
    sections: Sequence[Section]
    symbols: Sequence[Symbol]
    relocations: Sequence[Relocation]

    @property
    def defined(self) -> dict[str, Symbol]:
        """The symbols that other objects may refer to, by name."""
        return {s.name: s for s in self.symbols if s.is_global and s.section}

    @property
    def undefined(self) -> frozenset[str]:
        """The names of the symbols that another object, or the system, must define."""
        return frozenset(s.name for s in self.symbols if s.is_global and not s.section)


def read(code: bytes, arch: str) -> Object:
    """Parse the object in `code`. Raise DamagedCode if it is not a relocatable ELF object for `arch`, if a section lies outside the object
    or may not be loaded, if a symbol lies outside its section, or if a relocation refers to a symbol that does not exist. `link.py` checks
    the offsets of relocations."""
    try:
        flags, sections = HEADER.unpack_from(code)[7], list(_sections(code, arch))
        symbols = [symbol for section in sections if section.kind == _SYMBOLS for symbol in _symbols(code, section, sections)]
        relocations = [r for section in sections if section.kind == _RELOCATIONS for r in _relocations(code, section, sections)]
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise DamagedCode(f"the object code is not a valid ELF object: {error}") from error
    if any(not 0 <= r.symbol < len(symbols) for r in relocations):
        raise DamagedCode("a relocation of the object code refers to a symbol that the object code does not have")
    return Object(code, arch, flags, sections, symbols, relocations)


def _sections(code: bytes, arch: str) -> Iterator[Section]:
    """Yield the sections. Raise DamagedCode if the object or a section fails a check that `read` describes."""
    ident, kind, machine, _, _, _, table, _, _, _, _, entry, count, _ = HEADER.unpack_from(code)
    if ident[:6] != b"\x7fELF\x02\x01" or kind != _RELOCATABLE:
        raise DamagedCode("the object code is not a relocatable 64-bit ELF object")
    if machine != MACHINES.get(arch):
        raise DamagedCode(f"the object code is for ELF machine {machine}; expected {arch}")
    for i in range(count):
        _, section_kind, flags, _, offset, size, link, info, alignment, _ = SECTION.unpack_from(code, table + i * entry)
        section = Section(section_kind, flags, offset, size, link, info, max(alignment, 1))
        if section_kind != _NO_BITS and offset + size > len(code):
            raise DamagedCode(f"section {i} of the object code ends at byte {offset + size}, but the object has {len(code)} bytes")
        if section.is_loaded:
            if flags & WRITE or section_kind == _NO_BITS:
                raise DamagedCode(f"section {i} of the object code is writable; kernels have no data of their own")
            if section.alignment & (section.alignment - 1) or section.alignment > _MOST_ALIGNMENT:
                raise DamagedCode(
                    f"section {i} of the object code is aligned to {alignment}; expected a power of two up to {_MOST_ALIGNMENT}"
                )
        yield section


def _symbols(code: bytes, table: Section, sections: Sequence[Section]) -> Iterator[Symbol]:
    """Yield the symbols of the section `table`. Raise DamagedCode if a symbol lies outside its section."""
    names = sections[table.link].offset
    for i, at in enumerate(range(table.offset, table.offset + table.size, SYMBOL.size)):
        name, _, _, section, value, size = SYMBOL.unpack_from(code, at)
        if section < len(sections):
            inside = section == 0 or not sections[section].is_loaded or value + size <= sections[section].size
        else:
            inside = section == _ABSOLUTE_NUMBER and i < table.info  # the symbol with the name of the source file is in no section
        if not inside:
            raise DamagedCode(f"symbol {i} of the object code belongs to no section")
        start = names + name
        yield Symbol(code[start : code.index(b"\0", start)].decode(), section, value, size, i >= table.info)


def _relocations(code: bytes, table: Section, sections: Sequence[Section]) -> Iterator[Relocation]:
    """Yield the relocations of the section `table`, but not those of a section that is not loaded, such as debug information."""
    if not sections[table.info].is_loaded:
        return  # skip relocations of debug information
    for at in range(table.offset, table.offset + table.size, RELOCATION.size):
        offset, info, addend = RELOCATION.unpack_from(code, at)
        yield Relocation(table.info, offset, info & 0xFFFFFFFF, info >> 32, addend)
