"""Code for a CPU architecture other than this machine's is linked by the runtime and run by an emulator."""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from compiler.codegen.machine_code import llvm_machine
from compiler.machine.target import NAMED
from runtime.objects import elf
from runtime.objects.link import Places, linked
from runtime.objects.relocate import RULES

BEGIN = 0x400000
HEADERS_BYTES = 0x1000  # bytes of the executable file before the block of code
START_AT = 0x800
# architecture -> (relocation type of the call, offset of the call, machine code). The code calls a function and exits with its result.
START = {
    "x86_64": (4, 1, bytes.fromhex("e800000000 89c7 b83c000000 0f05")),  # call; mov edi, eax; mov eax, 60; syscall
    "aarch64": (283, 0, bytes.fromhex("00000094 a80b80d2 010000d4")),  # bl; mov x8, #93; svc #0
    "riscv64": (19, 0, bytes.fromhex("97000000 e7800000 9308d005 73000000")),  # auipc ra; jalr ra; li a7, 93; ecall
}

# A program that reads constants of every width and calls a nearby function and an external one.
PROGRAM = """
@bytes = internal constant [4 x i8] [i8 1, i8 2, i8 3, i8 4]
@halves = internal constant [4 x i16] [i16 5, i16 6, i16 7, i16 8]
@words = internal constant [4 x i32] [i32 9, i32 10, i32 11, i32 12]
@longs = internal constant [4 x i64] [i64 13, i64 14, i64 15, i64 16]
@vector = internal constant <4 x i32> <i32 17, i32 18, i32 19, i32 20>

declare void @outside(ptr, i64)

define void @inside(ptr %p, i64 %x) noinline {
  store i64 %x, ptr %p
  ret void
}

define internal i64 @chosen(i64 %i) noinline {
  switch i64 %i, label %other [ i64 0, label %a  i64 1, label %b  i64 2, label %c  i64 3, label %d  i64 4, label %e ]
a: br label %end
b: br label %end
c: br label %end
d: br label %end
e: br label %end
other: br label %end
end:
  %x = phi i64 [ 31, %a ], [ 7, %b ], [ 23, %c ], [ 2, %d ], [ 50, %e ], [ 0, %other ]
  ret i64 %x
}

define i64 @compute() {
  %place = alloca i64
  %v0 = load volatile i8, ptr getelementptr (i8, ptr @bytes, i64 2)
  %v1 = load volatile i16, ptr getelementptr (i16, ptr @halves, i64 2)
  %v2 = load volatile i32, ptr getelementptr (i32, ptr @words, i64 2)
  %v3 = load volatile i64, ptr getelementptr (i64, ptr @longs, i64 2)
  %v4 = load volatile <4 x i32>, ptr @vector
  %w0 = zext i8 %v0 to i64
  %w1 = zext i16 %v1 to i64
  %w2 = zext i32 %v2 to i64
  %lane = extractelement <4 x i32> %v4, i32 2
  %w4 = zext i32 %lane to i64
  %s1 = add i64 %w0, %w1
  %s2 = add i64 %s1, %w2
  %s3 = add i64 %s2, %v3
  %s4 = add i64 %s3, %w4
  %pick = call i64 @chosen(i64 3)
  %sum = add i64 %s4, %pick
  call void @outside(ptr %place, i64 %sum)
  %status = load volatile i64, ptr %place
  ret i64 %status
}
"""
STATUS = 3 + 7 + 11 + 15 + 19 + 2


def compiled(arch: str) -> elf.Object:
    return elf.read(llvm_machine(next(t for t in NAMED.values() if t.arch == arch)).emit_object(llvm.parse_assembly(PROGRAM)), arch)


def program(parts: elf.Object, arch: str) -> bytes:
    """Return an executable file that contains the linked block, mapped at `BEGIN`, and start code. The external name `outside` is resolved
    to the address of `inside`."""
    places = Places.of(parts)
    at = {symbol.name: BEGIN + places.of_symbol(symbol) for symbol in parts.symbols if symbol.is_global}
    image = linked(parts, places, BEGIN, {"outside": at["inside"]})
    kind, place, code = START[arch]
    start = bytearray(code)
    begin = BEGIN - HEADERS_BYTES + START_AT
    rule = RULES[arch][kind]
    addend = -4 if arch == "x86_64" else 0  # x86 counts from the end of the instruction, 4 bytes after the place to relocate
    rule.write(start, place, rule.value(at["compute"] + addend, begin + place))
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, elf.MACHINES[arch], 1, begin, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, BEGIN - HEADERS_BYTES, BEGIN - HEADERS_BYTES, *[HEADERS_BYTES + len(image)] * 2, 0x1000)
    return ((header + segment).ljust(START_AT, b"\0") + start).ljust(HEADERS_BYTES, b"\0") + image


@pytest.mark.parametrize("arch", sorted(RULES))
def test_a_linked_block_runs(arch: str, tmp_path: Path) -> None:
    parts = compiled(arch)
    assert {r.kind for r in parts.relocations} <= RULES[arch].keys()
    file = tmp_path / "program"
    file.write_bytes(program(parts, arch))
    file.chmod(0o755)
    emulator = None if arch == platform.machine() else shutil.which(f"qemu-{arch}-static") or shutil.which(f"qemu-{arch}")
    if emulator is None and arch != platform.machine():
        pytest.skip(f"needs qemu-{arch}: apt install qemu-user-static")
    command = [file] if emulator is None else [emulator, file]
    assert subprocess.run(command, timeout=60, check=False).returncode == STATUS
