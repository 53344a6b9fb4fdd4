"""Relocations of position-independent code. Each kind of relocation has a rule, which determines the value to write, the bits that receive
the value, and the range of values that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.errors import DamagedCode

Value = Callable[[int, int], int]  # computes the number to write from the symbol's address plus the addend, and the address to write to


@dataclass(frozen=True, slots=True)
class Rule:
    """Writes a number into a field of an instruction, or into a whole word."""

    value: Value
    num_bytes: int
    num_bits: int = 0  # bits of the field inside an instruction; 0: the number fills `num_bytes`
    low_bit: int = 0  # lowest bit of the field inside the instruction
    unit: int = 1  # the field counts in units of this many bytes
    is_signed: bool = True

    def write(self, image: bytearray, at: int, number: int) -> None:
        """Write a number into the bytes of the image that begin at `at`. Raises DamagedCode if the field cannot hold the number."""
        bits = self.num_bits or 8 * self.num_bytes
        counted, rest = divmod(number, self.unit)
        low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if self.is_signed else (0, 1 << bits)
        if rest or not low <= counted < high:
            raise DamagedCode(f"a relocation at byte {at} of the object code must write {number}, which its {bits} bits cannot hold")
        _put(image, at, counted << self.low_bit, ((1 << bits) - 1) << self.low_bit, self.num_bytes)


@dataclass(frozen=True, slots=True)
class PageRule(Rule):
    """ADRP: the distance in pages of 4 KiB. The instruction stores the lowest two bits of the distance separately."""

    def write(self, image: bytearray, at: int, number: int) -> None:
        pages = number >> 12
        if not -(1 << 20) <= pages < 1 << 20:
            raise DamagedCode(f"a relocation at byte {at} of the object code reaches {pages} pages; ADRP reaches at most 2^20 pages")
        _put(image, at, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5, ~0x9F00001F)


@dataclass(frozen=True, slots=True)
class UpperRule(Rule):
    """AUIPC: the distance without its lowest twelve bits, which a following instruction adds as a signed number."""

    def write(self, image: bytearray, at: int, number: int) -> None:
        if not -(1 << 31) <= number + 0x800 < 1 << 31:
            raise DamagedCode(f"a relocation at byte {at} of the object code must write {number}, which AUIPC cannot reach")
        _put(image, at, number + 0x800, ~0xFFF)


@dataclass(frozen=True, slots=True)
class CallRule(UpperRule):
    """The distance of a call. AUIPC adds its upper bits, and JALR, the next instruction, its lowest twelve bits."""

    def write(self, image: bytearray, at: int, number: int) -> None:
        UpperRule.write(self, image, at, number)
        _put(image, at + 4, number << 20, ~0xFFFFF)


@dataclass(frozen=True, slots=True)
class LowerRule(Rule):
    """The lowest twelve bits of a distance. The relocation's symbol is the AUIPC, whose own relocation states the distance."""

    def write(self, image: bytearray, at: int, number: int) -> None:
        _put(image, at, number << 20, ~0xFFFFF)


@dataclass(frozen=True, slots=True)
class SumRule(Rule):
    """Add the number to the word in place. Two such relocations write the difference of two symbols."""

    def write(self, image: bytearray, at: int, number: int) -> None:
        _put(image, at, int.from_bytes(image[at : at + 4], "little") + number)


def _put(image: bytearray, at: int, bits: int, mask: int = -1, num_bytes: int = 4) -> None:
    """Replace the bits of a number in the image that are set in the mask."""
    number = int.from_bytes(image[at : at + num_bytes], "little") & ~mask | bits & mask
    image[at : at + num_bytes] = (number & ((1 << 8 * num_bytes) - 1)).to_bytes(num_bytes, "little")


def _relative(target: int, place: int) -> int:
    return target - place


def _pages(target: int, place: int) -> int:
    return (target & ~0xFFF) - (place & ~0xFFF)


def _plus(target: int, _place: int) -> int:
    return target


def _minus(target: int, _place: int) -> int:
    return -target


def _in_page(target: int, _place: int) -> int:
    return target & 0xFFF


def _immediate(unit: int) -> Rule:
    """Make the rule for the immediate of ADD, or of a load or store of `unit` bytes."""
    return Rule(_in_page, 4, num_bits=12, low_bit=10, unit=unit, is_signed=False)


def _branch(num_bits: int, low_bit: int) -> Rule:
    """Make the rule for the distance in a branch, in instructions of 4 bytes."""
    return Rule(_relative, 4, num_bits=num_bits, low_bit=low_bit, unit=4)


# Rules by machine, then by the number that the machine's ELF supplement gives to a kind of relocation.
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
    "riscv64": {
        19: CallRule(_relative, 8),  # CALL_PLT
        23: UpperRule(_relative, 4),  # PCREL_HI20
        24: LowerRule(_relative, 4),  # PCREL_LO12_I
        35: SumRule(_plus, 4),  # ADD32
        39: SumRule(_minus, 4),  # SUB32
        57: Rule(_relative, 4),  # 32_PCREL
    },
}

# Code that jumps to the address stored in the eight bytes after it. A call cannot reach functions of the system, which are too far away.
FAR_JUMP: Mapping[str, bytes] = {
    "x86_64": bytes.fromhex("ff25 00000000"),  # jmp [rip]
    "aarch64": bytes.fromhex("50000058 00021fd6"),  # ldr x16, #8; br x16
    "riscv64": bytes.fromhex("17030000 03330301 67000300 13000000"),  # auipc t1, 0; ld t1, 16(t1); jr t1; nop
}
