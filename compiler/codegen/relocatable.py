"""Write one relocatable ELF object from several: their loaded sections, their relocations, their global symbols, and the local symbols to
which relocations refer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from runtime.objects.elf import HEADER, MACHINES, RELOCATION, SECTION, SYMBOL, Object, Section, Symbol, read
from runtime.objects.link import joined
from runtime.sections import align

KERNEL: Final = "kernel"  # name of every kernel while it is compiled, so that its code does not depend on its name
_RELOCATABLE: Final = 1
_BITS, _SYMBOLS, _STRINGS, _RELOCATIONS = 1, 2, 3, 4  # types of sections
_LOCAL, _GLOBAL_FUNCTION, _GLOBAL_UNKNOWN = 0, 0x12, 0x10  # bindings and types of symbols
_ALIGNMENT: Final = 64
_STACK: Final = b".note.GNU-stack"  # an empty section, which tells linkers that no code needs an executable stack
_NAMES: Final = b"\0.rodata\0.text\0.symtab\0.strtab\0.rela\0" + _STACK + b"\0"  # names of sections


def merged(objects: Sequence[tuple[str, bytes]], arch: str) -> bytes:
    """Return one object with the functions of all objects, which are given by name. In the object NAME, `kernel.x` is renamed to `NAME.x`.
    Equal arguments give equal bytes. Raise DamagedCode if two objects define the same global symbol."""
    whole = joined([_renamed(read(code, arch), name) for name, code in objects])
    loaded = [i for i, section in enumerate(whole.sections) if section.is_loaded]
    numbers = {old: new for new, old in enumerate(loaded, 1)}
    symbols = _ordered(whole)
    num_local = 1 + sum(not s.is_global for s in symbols)
    indices = {symbol: i for i, symbol in enumerate(symbols, 1)}
    strings = b"".join(b"\0" + s.name.encode() for s in symbols) + b"\0"
    starts = accumulate((len(s.name.encode()) + 1 for s in symbols), initial=1)
    table = bytes(SYMBOL.size) + b"".join(
        SYMBOL.pack(start, _kind(s), 0, numbers[s.section] if s.section else 0, s.value, s.size)
        for start, s in zip(starts, symbols, strict=False)
    )
    relocations: dict[int, bytearray] = {}
    for r in whole.relocations:
        index = indices[whole.symbols[r.symbol]]
        relocations.setdefault(r.section, bytearray()).extend(RELOCATION.pack(r.offset, index << 32 | r.kind, r.addend))
    # the sections' names and types, flags, contents, links, infos, alignments and sizes of entries
    of_symbols, of_strings = len(loaded) + 1, len(loaded) + 2
    parts = [(*_named(s := whole.sections[i]), s.flags, _content(whole, s), 0, 0, s.alignment, 0) for i in loaded]
    parts.append((_NAMES.index(b".symtab"), _SYMBOLS, 0, table, of_strings, num_local, 8, SYMBOL.size))
    parts.append((_NAMES.index(b".strtab"), _STRINGS, 0, strings, 0, 0, 1, 0))
    parts.append((_NAMES.index(b".strtab"), _STRINGS, 0, _NAMES, 0, 0, 1, 0))
    parts.append((_NAMES.index(_STACK), _BITS, 0, b"", 0, 0, 1, 0))
    parts += [
        (_NAMES.index(b".rela"), _RELOCATIONS, 0, bytes(found), of_symbols, numbers[section], 8, RELOCATION.size)
        for section, found in relocations.items()
    ]
    file, headers = bytearray(HEADER.size), bytearray(SECTION.size)
    for name, kind, flags, content, link, info, alignment, entry_bytes in parts:
        file += bytes(align(len(file), _ALIGNMENT) - len(file))
        headers += SECTION.pack(name, kind, flags, 0, len(file), len(content), link, info, alignment, entry_bytes)
        file += content
    file += bytes(align(len(file), _ALIGNMENT) - len(file))
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    HEADER.pack_into(
        file,
        0,
        ident,
        _RELOCATABLE,
        MACHINES[arch],
        1,
        0,
        0,
        len(file),
        whole.flags,
        HEADER.size,
        0,
        0,
        SECTION.size,
        len(parts) + 1,
        of_strings + 1,
    )
    return bytes(file + headers)


def _renamed(parts: Object, name: str) -> Object:
    """Return an object in which symbols `kernel.x` have the names `name.x`."""
    start = f"{KERNEL}."
    return replace(
        parts, symbols=[replace(s, name=f"{name}.{s.name.removeprefix(start)}") if s.name.startswith(start) else s for s in parts.symbols]
    )


def _ordered(whole: Object) -> list[Symbol]:
    """Return the local symbols that relocations refer to, and then all global symbols: ELF requires this order."""
    used = dict.fromkeys(whole.symbols[r.symbol] for r in whole.relocations)
    return [*(s for s in used if not s.is_global), *dict.fromkeys(s for s in whole.symbols if s.is_global)]


def _kind(symbol: Symbol) -> int:
    """Return the byte that states the binding and the type of a symbol: it is local, a global function that the object defines, or a global
    symbol that the object does not define."""
    if not symbol.is_global:
        return _LOCAL
    return _GLOBAL_FUNCTION if symbol.section else _GLOBAL_UNKNOWN


def _named(section: Section) -> tuple[int, int]:
    """Return the place of a section's name in _NAMES, and its type."""
    return _NAMES.index(b".text" if section.is_code else b".rodata"), _BITS


def _content(whole: Object, section: Section) -> bytes:
    return whole.code[section.offset : section.offset + section.size]
