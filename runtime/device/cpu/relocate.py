"""Relocations of position-independent code: what each kind writes, where, and how far it reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.errors import DamagedCode

Value = Callable[[int, int], int]  # from the address of the symbol plus the addend, and the address of the place, to the number written


@dataclass(frozen=True, slots=True)
class Rule:
    value: Value
    num_bytes: int
    num_bits: int = 0  # of the field inside an instruction; 0: the number fills `num_bytes`
    low_bit: int = 0  # where the field begins
    unit: int = 1  # the field counts multiples of this
    is_signed: bool = True

    def write(self, image: bytearray, at: int, number: int) -> None:
        bits = self.num_bits or 8 * self.num_bytes
        counted, rest = divmod(number, self.unit)
        low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if self.is_signed else (0, 1 << bits)
        if rest or not low <= counted < high:
            raise DamagedCode(f"a relocation at byte {at} of the object code must write {number}, which its {bits} bits cannot hold")
        mask = ((1 << bits) - 1) << self.low_bit
        word = int.from_bytes(image[at : at + self.num_bytes], "little") & ~mask | (counted << self.low_bit) & mask
        image[at : at + self.num_bytes] = word.to_bytes(self.num_bytes, "little")


@dataclass(frozen=True, slots=True)
class PageRule(Rule):
    """ADRP: the distance in pages of 4 KiB, its low two bits apart from the others."""

    def write(self, image: bytearray, at: int, number: int) -> None:
        pages = number >> 12
        if not -(1 << 20) <= pages < 1 << 20:
            raise DamagedCode(f"a relocation at byte {at} of the object code reaches {pages} pages; ADRP reaches 2^20")
        word = int.from_bytes(image[at : at + 4], "little") & 0x9F00001F
        word |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
        image[at : at + 4] = word.to_bytes(4, "little")


def _relative(target: int, place: int) -> int:
    return target - place


def _pages(target: int, place: int) -> int:
    return (target & ~0xFFF) - (place & ~0xFFF)


def _in_page(target: int, _place: int) -> int:
    return target & 0xFFF


def _immediate(unit: int) -> Rule:
    """The immediate of ADD, or of a load or store of `unit` bytes."""
    return Rule(_in_page, 4, num_bits=12, low_bit=10, unit=unit, is_signed=False)


def _branch(num_bits: int, low_bit: int) -> Rule:
    return Rule(_relative, 4, num_bits=num_bits, low_bit=low_bit, unit=4)


# By machine and by the kind's number in the ELF supplement of that machine.
RULES: Mapping[str, Mapping[int, Rule]] = {
    "x86_64": {
        2: Rule(_relative, 4),  # PC32
        4: Rule(_relative, 4),  # PLT32
        24: Rule(_relative, 8),  # PC64
    },
    "aarch64": {
        260: Rule(_relative, 8),  # PREL64
        261: Rule(_relative, 4),  # PREL32
        275: PageRule(_pages, 4),  # ADR_PREL_PG_HI21
        277: _immediate(1),  # ADD_ABS_LO12_NC
        278: _immediate(1),  # LDST8_ABS_LO12_NC
        279: _branch(14, 5),  # TSTBR14
        280: _branch(19, 5),  # CONDBR19
        282: _branch(26, 0),  # JUMP26
        283: _branch(26, 0),  # CALL26
        284: _immediate(2),  # LDST16_ABS_LO12_NC
        285: _immediate(4),  # LDST32_ABS_LO12_NC
        286: _immediate(8),  # LDST64_ABS_LO12_NC
        299: _immediate(16),  # LDST128_ABS_LO12_NC
    },
}

# A jump to the address in the eight bytes behind it: functions of the system lie further away than a call reaches.
FAR_JUMP: Mapping[str, bytes] = {
    "x86_64": bytes.fromhex("ff25 00000000"),  # jmp [rip]
    "aarch64": bytes.fromhex("50000058 00021fd6"),  # ldr x16, #8; br x16
}
