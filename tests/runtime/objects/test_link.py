"""Objects that refer to each other are joined into one. tests/compiler/c_library/test_shared.py calls the code of such objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from runtime.device.cpu.host import ARCH
from runtime.errors import DamagedCode
from runtime.objects import elf
from runtime.objects.link import Places, joined, linked
from tests.runtime.objects.test_relocate import compiled

OUTER = "declare i64 @inner(i64)\ndefine i64 @outer(i64 %x) {\n %y = call i64 @inner(i64 %x)\n ret i64 %y\n}"
INNER = "define i64 @inner(i64 %x) {\n ret i64 %x\n}"


def test_a_name_refers_to_the_other_object_that_defines_it(compile_object: Callable[[str], bytes]) -> None:
    outer, inner = (elf.read(compile_object(text), ARCH) for text in (OUTER, INNER))
    assert outer.undefined == {"inner"}
    for objects in ([outer, inner], [inner, outer]):
        whole = joined(objects)
        assert not whole.undefined and set(whole.defined) == {"outer", "inner"}
    assert joined([outer]).undefined == {"inner"}


def test_two_definitions_of_a_name_are_refused(compile_object: Callable[[str], bytes]) -> None:
    inner = elf.read(compile_object(INNER), ARCH)
    with pytest.raises(DamagedCode, match="two objects define 'inner'; expected one definition"):
        joined([inner, inner])


def test_a_distance_whose_upper_bits_are_nowhere_is_refused() -> None:
    """On RISC-V, two instructions hold a distance. The relocation of the second refers to the first, so it is refused if the relocation of
    the first is missing."""
    parts = compiled("riscv64")
    alone = replace(parts, relocations=[r for r in parts.relocations if r.kind == 24])
    with pytest.raises(DamagedCode, match="no instruction with the upper bits"):
        linked(alone, Places.of(alone), 1 << 20, dict.fromkeys(alone.undefined, 1 << 21))


def test_a_relocation_without_a_symbol_is_refused(compile_object: Callable[[str], bytes]) -> None:
    """Every table of symbols begins with one that stands for none."""
    parts = elf.read(compile_object(OUTER), ARCH)
    assert parts.symbols[0].name == "" and parts.relocations
    alone = replace(parts, relocations=[replace(r, symbol=0) for r in parts.relocations])
    with pytest.raises(DamagedCode, match="uses symbol '', which it neither defines nor imports"):
        linked(alone, Places.of(alone), 1 << 20, dict.fromkeys(alone.undefined, 1 << 21))


def test_a_symbol_ends_in_its_section(compile_object: Callable[[str], bytes]) -> None:
    given = compile_object(INNER)
    sections = elf.read(given, ARCH).sections
    table = next(section for section in sections if section.link and section.kind == 2)
    at = table.offset + table.size - elf.SYMBOL.size  # of the last symbol, which is the function
    name, kind, other, number, *_ = elf.SYMBOL.unpack_from(given, at)
    most = sections[number].size
    for value, size, is_inside in ((0, most, True), (most, 0, True), (most - 1, 1, True), (0, most + 1, False), (most - 1, 2, False)):
        code = bytearray(given)
        elf.SYMBOL.pack_into(code, at, name, kind, other, number, value, size)
        with nullcontext() if is_inside else pytest.raises(DamagedCode, match="belongs to no section"):
            assert elf.read(bytes(code), ARCH).defined["inner"].value == value
