"""Turn one relocatable object into a WebAssembly module, so that users need no linker.

The module imports from `env` a memory with a maximum size and, if its code uses the stack, the stack pointer. It exports every function
that is neither local nor hidden, and a constant global `__heap_base`: the first multiple of ALIGNMENT at or after the end of its data.
Kernels call no functions from outside, so one object is enough, and the module imports no function.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from compiler.backends.wasm.codegen.object import (
    MAGIC,
    NONE,
    Import,
    Kind,
    Patch,
    Relocation,
    Section,
    Segment,
    Symbol,
    SymbolKind,
    WasmObject,
    read_segments,
)
from compiler.ir.errors import CompileError

HEAP_BASE: Final = "__heap_base"
PAGES: Final = 1 << 16  # maximum number of pages of a memory, because pointers have 32 bits
HAS_MAXIMUM: Final = 1  # flag of an imported memory: its maximum size is stated
DATA_BEGIN: Final = 1024  # first address of data; address 0 stays unused
ALIGNMENT: Final = 64  # `__heap_base` is a multiple of this
_I32, _CONSTANT, _I32_CONST, _END = 0x7F, 0, 0x41, 0x0B
_PADDED: Final = 5  # bytes that the object reserves for an integer which the linker fills in


def linked(source: WasmObject) -> bytes:
    """Turn an object into a module. Raise CompileError if the object calls a function or reads data that it does not define."""
    undefined = [s.name for s in source.symbols if s.is_undefined and s.kind in (SymbolKind.FUNCTION, SymbolKind.DATA)]
    if undefined:
        raise CompileError(
            f"the kernels call {', '.join(undefined)}, which nothing defines; a kernel may only call functions of its own module"
        )
    bodies = [bytearray(body) for _, body in source.sections]
    for patch in source.patches:
        place = _filled_in(source, patch)
        if source.sections[patch.section][0] is not Section.CUSTOM:  # the module has no custom sections, such as debug information
            bodies[patch.section][patch.offset : patch.offset + len(place)] = place
    filled = {kind: bytes(body) for (kind, _), body in zip(source.sections, bodies, strict=True)}
    segments = read_segments(filled.get(Section.DATA, NONE))
    imports = [i for i in source.imports if i.kind is not Kind.TABLE]
    heap_base = -(-max((DATA_BEGIN + s.begin + len(s.content) for s in segments), default=DATA_BEGIN) // ALIGNMENT) * ALIGNMENT
    number = sum(i.kind is Kind.GLOBAL for i in imports)
    exports = [_export(s.name, Kind.FUNCTION, s.index) for s in _exported(source.symbols)]
    written = {
        Section.TYPE: filled.get(Section.TYPE, NONE),
        Section.IMPORT: _vector([_import(i) for i in imports]),
        Section.FUNCTION: filled.get(Section.FUNCTION, NONE),
        Section.GLOBAL: _vector([bytes([_I32, _CONSTANT, _I32_CONST]) + signed(heap_base) + bytes([_END])]),
        Section.EXPORT: _vector([*exports, _export(HEAP_BASE, Kind.GLOBAL, number)]),
        Section.CODE: filled.get(Section.CODE, NONE),
        Section.DATA: _vector([_segment(s) for s in segments]),
    }
    return MAGIC + b"".join(bytes([kind]) + unsigned(len(body)) + body for kind, body in written.items())


def _exported(symbols: Iterable[Symbol]) -> list[Symbol]:
    """Return the functions that the module exports, in the order of their indices."""
    return sorted((s for s in symbols if s.kind is SymbolKind.FUNCTION and not s.is_local), key=lambda s: s.index)


def _filled_in(source: WasmObject, patch: Patch) -> bytes:
    """Return the bytes that are written at the place of a patch: the index of a type, a function or a global, or the address of data."""
    match patch.kind:
        case Relocation.TYPE_INDEX_LEB:
            return _padded(patch.index)
        case Relocation.FUNCTION_INDEX_LEB | Relocation.GLOBAL_INDEX_LEB:
            return _padded(source.symbols[patch.index].index)
        case _:
            symbol = source.symbols[patch.index]
            address = DATA_BEGIN + source.segments[symbol.index].begin + symbol.offset + patch.addend
            return struct.pack("<I", address) if patch.kind is Relocation.MEMORY_ADDR_I32 else _padded(address)


def _import(item: Import) -> bytes:
    """Write an import. A memory must have at least one page; the code that instantiates the module chooses the memory's size."""
    if item.kind is Kind.MEMORY:
        return _memory() + bytes([HAS_MAXIMUM, 1]) + unsigned(PAGES)
    return _name("env") + _name(item.field) + bytes([item.kind]) + item.description


def _memory() -> bytes:
    return _name("env") + _name("memory") + bytes([Kind.MEMORY])


def _export(name: str, kind: Kind, index: int) -> bytes:
    """Write an export: the function or the global with this index."""
    return _name(name) + bytes([kind]) + unsigned(index)


def _segment(segment: Segment) -> bytes:
    return bytes([0, _I32_CONST]) + signed(DATA_BEGIN + segment.begin) + bytes([_END]) + unsigned(len(segment.content)) + segment.content


def _vector(items: Sequence[bytes]) -> bytes:
    return unsigned(len(items)) + b"".join(items)


def _name(text: str) -> bytes:
    return unsigned(len(text.encode())) + text.encode()


def memory_flags(module: bytes) -> int:
    """Return the offset of the byte with the flags of the module's memory. To make threads share the memory, it suffices to write 3 to this
    byte."""
    return module.index(_memory()) + len(_memory())


# --- numbers in LEB128 ---------------------------------------------------------------------------------------------------


def unsigned(number: int) -> bytes:
    """Encode a number that is not negative."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def signed(number: int) -> bytes:
    """Encode a number that may be negative."""
    out = bytearray()
    while not -64 <= number < 64:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number & 0x7F])


def _padded(number: int) -> bytes:
    """Encode a number in five bytes, which the object reserves for it."""
    return bytes(number >> 7 * i & 0x7F | (0x80 if i < _PADDED - 1 else 0) for i in range(_PADDED))
