"""Shared libraries: the system's loader finds their functions, and the system's tools read them without a warning."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from compiler.c_library.shared import shared_library
from compiler.codegen.machine_code import llvm_machine
from compiler.ir.errors import CompileError
from compiler.machine.target import NAMED
from runtime.device.cpu.host import ARCH

TARGETS = {target.arch: target for target in reversed(NAMED.values())}
ARCHITECTURES = ("x86_64", "aarch64", "riscv64")
OUTER = """
declare hidden i64 @inner(i64)
@table = internal constant [3 x i64] [i64 5, i64 6, i64 7]
define i64 @outer(i64 %i) {
  %p = getelementptr i64, ptr @table, i64 %i
  %x = load i64, ptr %p
  %place = alloca ptr
  store volatile ptr @inner, ptr %place
  %callee = load volatile ptr, ptr %place
  %y = call i64 %callee(i64 %x)
  ret i64 %y
}"""
INNER = """
@table = internal constant [3 x i64] [i64 BASE0, i64 BASE1, i64 BASE2]
define i64 @inner(i64 %x) {
  %i = sub i64 %x, 5
  %p = getelementptr i64, ptr @table, i64 %i
  %y = load i64, ptr %p
  ret i64 %y
}"""


def compiled(text: str, arch: str = ARCH) -> bytes:
    machine = llvm_machine(TARGETS[arch])
    return machine.emit_object(llvm.parse_assembly(text))


def written(folder: Path, name: str, objects: list[bytes], exported: list[str], arch: str = ARCH) -> Path:
    (folder / name).write_bytes(shared_library(objects, arch, name, exported))
    return folder / name


def example(arch: str = ARCH, base: str = "") -> list[bytes]:
    return [compiled(OUTER, arch), compiled(INNER.replace("BASE", base), arch)]


def test_objects_call_each_other_and_read_their_own_constants(tmp_path: Path) -> None:
    for name, objects in (("a.so", example(base="4")), ("b.so", example(base="4")[::-1])):
        outer = ctypes.CDLL(str(written(tmp_path, name, objects, ["outer"]))).outer
        assert [outer(i) for i in range(3)] == [40, 41, 42]


def test_libraries_with_the_same_names_do_not_meet(tmp_path: Path) -> None:
    """A library calls its own functions, even if another library offers functions of the same names to the whole process."""
    first, second = (
        ctypes.CDLL(str(written(tmp_path, f"lib{base}.so", example(base=base), ["outer", "inner"])), mode=ctypes.RTLD_GLOBAL)
        for base in ("1", "2")
    )
    assert [first.outer(1), second.outer(1), first.inner(5), second.inner(5)] == [11, 21, 10, 20]


@pytest.mark.parametrize("count", [1, 2, 250])
def test_every_exported_function_is_found_by_its_name_and_no_other(count: int, tmp_path: Path) -> None:
    names = [f"function_{i * i}" for i in range(count)]
    text = "\n".join(f"define i64 @{name}() {{\n ret i64 {i}\n}}" for i, name in enumerate([*names, "inside"]))
    library = ctypes.CDLL(str(written(tmp_path, "many.so", [compiled(text)], names)))
    assert [library[name]() for name in names] == list(range(count))
    for name in ("inside", "function_", "function_2"):
        with pytest.raises(AttributeError, match=name):
            library[name]


def test_no_page_of_a_loaded_library_is_writable(tmp_path: Path) -> None:
    path = written(tmp_path, "rights.so", example(), ["outer"])
    library = ctypes.CDLL(str(path))
    with open("/proc/self/maps") as maps:
        rights = [line.split()[1] for line in maps if line.rstrip().endswith(str(path))]
    assert library.outer(0) == 0
    assert set(rights) - {"---p"} == {"r--p", "r-xp"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_readelf_finds_nothing_to_complain_about(arch: str, tmp_path: Path) -> None:
    """For each machine, readelf prints no warning and finds nothing to relocate, no imports, no executable stack, and no segment that is
    both writable and executable."""
    tool = shutil.which("readelf") or pytest.skip("needs readelf: install binutils")
    path = written(tmp_path, "libx.so", example(arch), ["outer"], arch)
    done = subprocess.run([tool, "-aW", path], capture_output=True, check=True)
    assert not done.stderr
    text = done.stdout.decode()
    assert "There are no relocations" in text and "Library soname: [libx.so]" in text
    assert "NEEDED" not in text and "TEXTREL" not in text and "UND outer" not in text
    segments = [line.split() for line in text.splitlines() if line.startswith(("  LOAD", "  GNU_STACK"))]
    assert [" ".join(s[6:-1]) for s in segments] == ["R", "R E", "RW", "RW"]
    assert {s[-1] for s in segments if s[0] == "LOAD"} == {"0x10000"}


def test_equal_objects_give_equal_bytes() -> None:
    assert shared_library(example(), ARCH, "libx.so", ["outer"]) == shared_library(example(), ARCH, "libx.so", ["outer"])


def test_a_function_that_no_object_defines_is_named() -> None:
    with pytest.raises(CompileError, match=r"libx\.so refers to inner; expected objects that define"):
        shared_library(example()[:1], ARCH, "libx.so", ["outer"])
