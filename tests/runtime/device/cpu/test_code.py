from __future__ import annotations

import contextlib
import ctypes
import errno
from itertools import pairwise
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.device.cpu import code
from runtime.device.cpu.code import ObjectCode
from runtime.device.cpu.host import ARCH
from runtime.errors import DamagedCode, DeviceFault, RuntimeFault, UnresolvedSymbol
from runtime.objects import elf
from runtime.objects.link import Places, linked
from runtime.objects.relocate import RULES

TABLE = f"""
@table = internal constant [9 x i64] [{", ".join(f"i64 {i * i + 3}" for i in range(9))}]
define i64 @f(i64 %i) {{
  %p = getelementptr i64, ptr @table, i64 %i
  %x = load i64, ptr %p
  ret i64 %x
}}"""


def test_code_is_called_by_address(object_code: bytes) -> None:
    code = ObjectCode(object_code)
    grid = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.address("grid"))
    dims = np.array([41], np.int64)
    assert grid(dims.ctypes.data) == 41


def test_a_system_that_refuses_executable_memory_is_named(object_code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> int:
        ctypes.set_errno(errno.EACCES)
        return -1

    monkeypatch.setattr(code, "_libc", SimpleNamespace(mprotect=refuse))
    with pytest.raises(DeviceFault, match="executable: Permission denied; allow this process to do that"):
        ObjectCode(object_code)


def test_a_block_holds_all_sections_of_an_object(compile_object) -> None:
    """All sections of an object file are mapped in one block of memory. Code addresses its constants relative to itself by 32 bits, which
    could not reach a separate mapping."""
    parts = elf.read(compile_object(TABLE), ARCH)
    assert sum(section.is_loaded for section in parts.sections) > 1
    places = Places.of(parts)
    for begin in (1 << 16, 1 << 46):
        assert linked(parts, places, begin, {}) == linked(parts, places, 1 << 20, {})
    ends = sorted((offset, offset + parts.sections[i].size) for i, offset in places.sections.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends)) and ends[-1][1] <= places.num_bytes
    assert all(offset % parts.sections[i].alignment == 0 for i, offset in places.sections.items())
    code = ObjectCode(parts.code)
    get = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address("f"))
    assert [get(i) for i in range(9)] == [i * i + 3 for i in range(9)]


def test_code_is_not_writable(object_code: bytes) -> None:
    code = ObjectCode(object_code)
    page = f"{code.address('grid') >> 12:x}"
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[:2] for line in maps]
    [rights] = [r for span, r in ranges for low, high in [span.split("-")] if int(low, 16) >> 12 <= int(page, 16) < int(high, 16) >> 12]
    assert rights == "r-xp"


def test_an_unknown_symbol_is_named(object_code: bytes) -> None:
    with pytest.raises(UnresolvedSymbol, match="'nothing'"):
        ObjectCode(object_code).address("nothing")


def test_what_code_needs_must_be_in_it(compile_object) -> None:
    text = "declare float @expf(float)\ndefine float @f(float %x) {\n %y = call float @expf(float %x)\n ret float %y\n}"
    with pytest.raises(UnresolvedSymbol, match="expf"):
        ObjectCode(compile_object(text))


def test_copies_of_memory_may_come_from_the_system(compile_object) -> None:
    text = """
    declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
    define void @fill(ptr %p, i64 %n) {
      call void @llvm.memset.p0.i64(ptr %p, i8 7, i64 %n, i1 false)
      ret void
    }"""
    code = ObjectCode(compile_object(text))
    data = np.zeros(1000, np.uint8)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(code.address("fill"))(data.ctypes.data, 1000)
    assert (data == 7).all()


@pytest.mark.skipif(ARCH != "x86_64", reason="only x86-64 code may contain absolute addresses of 32 bits")
def test_absolute_addresses_are_refused() -> None:
    """An object file with absolute 32-bit addresses is refused, because code is mapped above the addresses that 32 bits can hold."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="static", codemodel="small")
    with pytest.raises(DamagedCode, match="position-independent"):
        ObjectCode(machine.emit_object(llvm.parse_assembly(TABLE)))


def test_code_of_another_machine_is_refused(object_code: bytes) -> None:
    other = object_code[:18] + b"\x02\x00" + object_code[20:]
    with pytest.raises(DamagedCode, match="ELF machine 2"):
        ObjectCode(other)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_typed_error(data: bytes) -> None:
    for object_file in (data, b"\x7fELF\x02\x01" + data):
        with pytest.raises(RuntimeFault):
            elf.read(object_file, ARCH)


@given(st.data())
def test_damaged_headers_do_no_harm(object_code: bytes, data: st.DataObject) -> None:
    damaged = bytearray(object_code)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RuntimeFault):
        parts = elf.read(bytes(damaged), ARCH)
        linked(parts, Places.of(parts), 1 << 40, dict.fromkeys(parts.undefined, 1 << 41))


def test_code_with_data_of_its_own_is_refused(compile_object) -> None:
    with pytest.raises(DamagedCode, match="writable"):
        ObjectCode(compile_object("@x = global i64 3\ndefine i64 @f() {\n %x = load i64, ptr @x\n ret i64 %x\n}"))


@pytest.mark.parametrize(
    ("arch", "kind", "number"),
    [("x86_64", 2, 1 << 31), ("x86_64", 2, -(1 << 31) - 1), ("riscv64", 23, (1 << 31) - 0x800), ("aarch64", 275, 1 << 32)],
)
def test_an_address_too_far_away_is_refused(arch: str, kind: int, number: int) -> None:
    with pytest.raises(DamagedCode, match=r"32 bits cannot hold|cannot reach|reaches at most"):
        RULES[arch][kind].write(bytearray(4), 0, number)


def test_a_page_before_the_code_is_addressed() -> None:
    """ADRP stores a negative distance in two fields, which do not overlap."""
    image = bytearray.fromhex("00000090")  # adrp x0, 0
    RULES["aarch64"][275].write(image, 0, -4 << 12)
    assert image.hex() == "e0ffff90"  # adrp x0, -4 pages
