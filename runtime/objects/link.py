"""Link objects: join them, place their sections in memory, and apply their relocations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.errors import DamagedCode
from runtime.objects.elf import Object, Relocation, Section, Symbol
from runtime.objects.relocate import FAR_JUMP, RULES, LowerRule, UpperRule
from runtime.sections import align


def joined(objects: Sequence[Object]) -> Object:
    """Join the objects of one machine into one. A symbol that one object only refers to becomes the symbol that another one defines. Raise
    DamagedCode if two objects define the same symbol."""
    code = bytearray()
    sections: list[Section] = []
    symbols: list[Symbol] = []
    relocations: list[Relocation] = []
    defined: dict[str, Symbol] = {}
    for parts in objects:
        first, first_symbol = len(sections), len(symbols)
        own = [replace(s, section=s.section + first) if s.section else s for s in parts.symbols]
        for symbol in own:
            if symbol.is_global and symbol.section and defined.setdefault(symbol.name, symbol) is not symbol:
                raise DamagedCode(f"two objects define {symbol.name!r}; expected one definition")
        symbols += own
        sections += [replace(s, offset=s.offset + len(code)) for s in parts.sections]
        relocations += [replace(r, section=r.section + first, symbol=r.symbol + first_symbol) for r in parts.relocations]
        code += parts.code
    resolved = [defined.get(s.name, s) if s.is_global else s for s in symbols]
    return Object(bytes(code), objects[0].arch, objects[0].flags, sections, resolved, relocations)


@dataclass(frozen=True, slots=True)
class Places:
    """Offsets in the linked block: the loaded sections by number, then, for each imported function, a jump to it."""

    sections: Mapping[int, int]
    jumps: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, parts: Object) -> Places:
        """Place the sections of an object one after another, then the jumps."""
        end = 0
        sections: dict[int, int] = {}
        for i, section in enumerate(parts.sections):
            if section.is_loaded:
                sections[i] = align(end, section.alignment)
                end = sections[i] + section.size
        jumps: dict[str, int] = {}
        for name in sorted(parts.undefined):
            jumps[name] = align(end, 8)
            end = jumps[name] + len(FAR_JUMP[parts.arch]) + 8
        return cls(sections, jumps, max(end, 1))

    def of_symbol(self, symbol: Symbol) -> int:
        """Return the offset of a symbol in the block, or for an imported function the offset of the jump to it. Raise DamagedCode if the
        symbol is neither defined nor imported, or lies in a section that is not loaded."""
        if not symbol.section:
            if symbol.name not in self.jumps:
                raise DamagedCode(f"the object code uses symbol {symbol.name!r}, which it neither defines nor imports")
            return self.jumps[symbol.name]
        if symbol.section not in self.sections:
            raise DamagedCode(f"the object code uses symbol {symbol.name!r}, which lies in a section that is not loaded")
        return self.sections[symbol.section] + symbol.value


def linked(parts: Object, places: Places, begin: int, imports: Mapping[str, int]) -> bytearray:
    """Return the bytes of the block, linked for the address `begin`. `imports` are the addresses of imported functions. Raise DamagedCode
    if a relocation cannot be applied."""
    image = bytearray(places.num_bytes)
    for i, offset in places.sections.items():
        section = parts.sections[i]
        image[offset : offset + section.size] = parts.code[section.offset : section.offset + section.size]
    jump = FAR_JUMP[parts.arch]
    for name, offset in places.jumps.items():
        image[offset : offset + len(jump) + 8] = jump + imports[name].to_bytes(8, "little")
    rules = RULES[parts.arch]

    def ends(r: Relocation) -> tuple[int, int]:
        """Return the address that the relocation refers to, and the address of the bytes that it changes."""
        return begin + places.of_symbol(parts.symbols[r.symbol]) + r.addend, begin + places.sections[r.section] + r.offset

    uppers = {place: target for r in parts.relocations if isinstance(rules.get(r.kind), UpperRule) for target, place in [ends(r)]}
    for r in parts.relocations:
        rule = rules.get(r.kind)
        if rule is None:
            raise DamagedCode(
                f"the object code has a relocation of kind {r.kind}; compile it as position-independent code of the small model"
            )
        if r.offset + rule.num_bytes > parts.sections[r.section].size:
            raise DamagedCode(f"a relocation of the object code lies outside its section of {parts.sections[r.section].size} bytes")
        target, place = ends(r)
        at = place - begin
        if isinstance(rule, LowerRule):
            if target not in uppers:
                raise DamagedCode(
                    f"a relocation at byte {at} of the object code refers to no instruction with the upper bits of its distance"
                )
            target, place = uppers[target], target
        rule.write(image, at, rule.value(target, place))
    return image
