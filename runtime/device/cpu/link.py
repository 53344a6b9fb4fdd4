"""Link an object: place its sections in one block and apply its relocations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.device.cpu.elf import Object, Symbol
from runtime.device.cpu.relocate import FAR_JUMP, RULES
from runtime.errors import DamagedCode
from runtime.sections import align


@dataclass(frozen=True, slots=True)
class Places:
    """Offsets in the linked block: the loaded sections by number, then, for each imported function, a jump to it."""

    sections: Mapping[int, int]
    jumps: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, parts: Object) -> Places:
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
        if not symbol.section:
            return self.jumps[symbol.name]
        if symbol.section not in self.sections:
            raise DamagedCode(f"the object code uses symbol {symbol.name!r}, which lies in a section that is not loaded")
        return self.sections[symbol.section] + symbol.value


def linked(parts: Object, places: Places, begin: int, address_of: Callable[[str], int]) -> bytearray:
    """Return the bytes of the block, linked for the address `begin`. `address_of` returns the address of an imported function."""
    image = bytearray(places.num_bytes)
    for i, offset in places.sections.items():
        section = parts.sections[i]
        image[offset : offset + section.size] = parts.code[section.offset : section.offset + section.size]
    jump = FAR_JUMP[parts.arch]
    for name, offset in places.jumps.items():
        image[offset : offset + len(jump) + 8] = jump + address_of(name).to_bytes(8, "little")
    rules = RULES[parts.arch]
    for r in parts.relocations:
        rule = rules.get(r.kind)
        if rule is None:
            raise DamagedCode(
                f"the object code has a relocation of kind {r.kind}; compile it as position-independent code of the small model"
            )
        at = places.sections[r.section] + r.offset
        if r.offset + rule.num_bytes > parts.sections[r.section].size:
            raise DamagedCode(f"a relocation of the object code lies outside its section of {parts.sections[r.section].size} bytes")
        target = begin + places.of_symbol(parts.symbols[r.symbol]) + r.addend
        rule.write(image, at, rule.value(target, begin + at))
    return image
