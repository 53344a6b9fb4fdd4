"""Read a relocatable WebAssembly object that LLVM wrote: the parts that linking needs.

WebAssembly's tool conventions describe the format (Linking.md): the sections of a module, a custom section `linking` with the symbols, and
a custom section `reloc.NAME` for each section with places that the linker fills in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from compiler.ir.errors import CompileError

MAGIC = b"\0asm\1\0\0\0"
NONE = b"\0"  # a section without entries


class Section(IntEnum):
    CUSTOM, TYPE, IMPORT, FUNCTION, TABLE, MEMORY, GLOBAL, EXPORT, START, ELEMENT, CODE, DATA, COUNT = range(13)


class Kind(IntEnum):
    """The kind of an import or an export. The kinds of symbols have other numbers (`SymbolKind`)."""

    FUNCTION, TABLE, MEMORY, GLOBAL = range(4)


class SymbolKind(IntEnum):
    FUNCTION, DATA, GLOBAL, SECTION, TAG, TABLE = range(6)


class Relocation(IntEnum):
    """The relocations that kernels need. Kernels make no indirect calls, so the address of a function is not among them."""

    FUNCTION_INDEX_LEB = 0
    MEMORY_ADDR_LEB = 3
    MEMORY_ADDR_SLEB = 4
    MEMORY_ADDR_I32 = 5
    TYPE_INDEX_LEB = 6
    GLOBAL_INDEX_LEB = 7


WITH_ADDEND = (Relocation.MEMORY_ADDR_LEB, Relocation.MEMORY_ADDR_SLEB, Relocation.MEMORY_ADDR_I32)
_LOCAL_OR_HIDDEN, _UNDEFINED, _EXPLICIT_NAME = 0x06, 0x10, 0x40
_SYMBOL_TABLE = 8


@dataclass(frozen=True, slots=True)
class Import:
    """A symbol that the object imports from `env`."""

    field: str
    kind: Kind
    description: bytes  # the bytes after the kind


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of the object: a function, data, a global, a section, a tag or a table."""

    kind: SymbolKind
    name: str  # empty for a section, and for an imported tag or table without a name of its own
    index: int  # index of the function, global, section, tag or table; for data, index of the segment, or 0 if the data is undefined
    offset: int  # offset of data within its segment
    is_local: bool  # whether the symbol is local or hidden, so that the module does not export it
    is_undefined: bool


@dataclass(frozen=True, slots=True)
class Patch:
    """A place that the linker fills in."""

    section: int  # index of the section
    kind: Relocation
    offset: int  # offset of the place within the section
    index: int  # index of a symbol or of a type
    addend: int  # added to the address of the symbol


@dataclass(frozen=True, slots=True)
class Segment:
    """Data of the object. `begin` is the address of its first byte, counted from the first byte of all data."""

    begin: int
    content: bytes


@dataclass(frozen=True, slots=True)
class WasmObject:
    """The parts of an object that the linker reads: its sections in their order, and the imports, symbols, data and patches in them."""

    sections: tuple[tuple[Section, bytes], ...]
    imports: tuple[Import, ...]
    symbols: tuple[Symbol, ...]
    segments: tuple[Segment, ...]
    patches: tuple[Patch, ...]


class Reader:
    """Reads values of WebAssembly's encoding one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.data)

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def unsigned(self) -> int:
        return self._leb128()[0]

    def signed(self) -> int:
        value, bits, last = self._leb128()
        return value - (1 << bits) if last & 0x40 else value

    def name(self) -> str:
        return self.take(self.unsigned()).decode()

    def _leb128(self) -> tuple[int, int, int]:
        """Read a number in LEB128, seven bits per byte, the lowest first. Return it as if it had no sign, with the number of its bits and
        its last byte."""
        value = bits = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << bits
            bits += 7
            if byte < 0x80:
                return value, bits, byte


def read_object(data: bytes) -> WasmObject:
    """Read an object. Raise CompileError if `data` is not WebAssembly, if the symbols have an unknown version, or if there are relocations
    or data segments of a kind that no kernel needs."""
    if not data.startswith(MAGIC):
        raise CompileError(f"the object begins with {data[:8]!r}; expected a WebAssembly object, which begins with {MAGIC!r}")
    reader = Reader(data[len(MAGIC) :])
    sections: list[tuple[Section, bytes]] = []
    custom: dict[str, bytes] = {}
    while not reader.is_done:
        kind, body = Section(reader.byte()), reader.take(reader.unsigned())
        sections.append((kind, body))
        if kind is Section.CUSTOM:
            within = Reader(body)
            name = within.name()
            custom[name] = body[within.at :]
    found = dict(sections)
    imports = tuple(_imports(Reader(found.get(Section.IMPORT, NONE))))
    return WasmObject(
        tuple(sections),
        imports,
        tuple(_symbols(Reader(custom["linking"]), imports)),
        read_segments(found.get(Section.DATA, NONE)),
        tuple(patch for name, body in custom.items() if name.startswith("reloc.") for patch in _patches(name, Reader(body))),
    )


def _imports(reader: Reader) -> Iterator[Import]:
    """Read the imports. The bytes after the kind of an import depend on the kind, and are kept as they are."""
    for _ in range(reader.unsigned()):
        reader.name()  # the module, always `env`
        field, kind, begin = reader.name(), Kind(reader.byte()), reader.at
        match kind:
            case Kind.FUNCTION:
                reader.unsigned()
            case Kind.GLOBAL:
                reader.take(2)
            case Kind.TABLE | Kind.MEMORY:
                if kind is Kind.TABLE:
                    reader.byte()
                has_most = reader.unsigned() & 1
                reader.unsigned()
                if has_most:
                    reader.unsigned()
        yield Import(field, kind, reader.data[begin : reader.at])


def _symbols(reader: Reader, imports: tuple[Import, ...]) -> Iterator[Symbol]:
    """Read the symbols from the section `linking`. `imports` name the symbols that have no name of their own. Raise CompileError if the
    section has another version than 2."""
    version = reader.unsigned()
    if version != 2:
        raise CompileError(f"the symbols of an object have version {version}; expected 2")
    names = {kind: [i.field for i in imports if i.kind is kind] for kind in Kind}
    while not reader.is_done:
        kind, size = reader.byte(), reader.unsigned()
        body = Reader(reader.take(size))
        if kind == _SYMBOL_TABLE:
            for _ in range(body.unsigned()):
                yield _symbol(body, names)


def _symbol(reader: Reader, imported: dict[Kind, list[str]]) -> Symbol:
    """Read one symbol. `imported` has the names of the imports of each kind: an imported function or global without a name of its own gets
    the name of its import."""
    kind, flags = SymbolKind(reader.byte()), reader.unsigned()
    is_undefined, name, index, offset = bool(flags & _UNDEFINED), "", 0, 0
    if kind is SymbolKind.DATA:
        name = reader.name()
        if not is_undefined:
            index, offset = reader.unsigned(), reader.unsigned()
            reader.unsigned()  # the size of the data
    else:
        index = reader.unsigned()
        if kind is not SymbolKind.SECTION and (not is_undefined or flags & _EXPLICIT_NAME):
            name = reader.name()
        elif kind in (SymbolKind.FUNCTION, SymbolKind.GLOBAL):
            name = imported[Kind.FUNCTION if kind is SymbolKind.FUNCTION else Kind.GLOBAL][index]
    return Symbol(kind, name, index, offset, bool(flags & _LOCAL_OR_HIDDEN), is_undefined)


def read_segments(section: bytes) -> tuple[Segment, ...]:
    """Read the data section of an object or of a module, without its header. Raise CompileError if a segment has no constant address."""
    return tuple(_segments(Reader(section)))


def _segments(reader: Reader) -> Iterator[Segment]:
    """Read the segments of a data section. Raise CompileError if a segment has no constant address."""
    for _ in range(reader.unsigned()):
        if (reader.unsigned(), reader.byte()) != (0, 0x41):  # active in memory 0, at an i32.const
            raise CompileError("a data segment of the object has no constant address; expected an i32.const in memory 0")
        begin = reader.signed()
        reader.byte()  # end of the expression
        yield Segment(begin, reader.take(reader.unsigned()))


def _patches(name: str, reader: Reader) -> Iterator[Patch]:
    """Read the relocations of one section from the custom section `name`, such as `reloc.CODE`. Messages contain `name`. Raise CompileError
    for a kind of relocation that kernels do not need."""
    section = reader.unsigned()
    for _ in range(reader.unsigned()):
        number, offset, index = reader.byte(), reader.unsigned(), reader.unsigned()
        if number not in Relocation.__members__.values():
            raise CompileError(f"{name} has a relocation of kind {number}; known are {', '.join(map(str, Relocation))}")
        kind = Relocation(number)
        yield Patch(section, kind, offset, index, reader.signed() if kind in WITH_ADDEND else 0)
