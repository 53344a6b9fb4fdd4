from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.device import elf
from runtime.device.cpu import ObjectCode, address_of, available_cores, cpu_quota, host_buffer
from runtime.device.host import ARCH
from runtime.errors import DamagedCode, OutOfMemory, RuntimeFault, UnresolvedSymbol

# --- cores -------------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_of_version_2_is_the_least_of_all_enclosing_groups(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/outer/inner\n")
    write(tmp_path / "outer/inner/cpu.max", "max 100000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "outer/cpu.max", "150000 100000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") == 1.5


def test_quota_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "membership", "4:memory:/x\n2:cpu,cpuacct:/group\n")
    write(tmp_path / "cpu/group/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu/group/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "cpu/group/cpu.cfs_quota_us", "300000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") == 3.0


def test_a_small_quota_leaves_one_core(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/\n")
    write(tmp_path / "cpu.max", "20000 100000\n")
    assert len(available_cores(tmp_path, tmp_path / "membership")) == 1


def test_without_control_groups_all_cores_of_the_process_count() -> None:
    given = "import os; print(sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else list(range(os.cpu_count() or 1)))"
    ours = "from pathlib import Path; from runtime.device.cpu import available_cores; print(list(available_cores(Path('-'), Path('-'))))"
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for code in (given, ours)]
    assert said[0] == said[1] != ""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_a_pinned_thread_still_sees_what_the_process_has() -> None:
    cores = available_cores()
    found: list[tuple[int, ...]] = []

    def work() -> None:
        os.sched_setaffinity(0, {cores[-1]})
        found.append(available_cores())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [cores]


# --- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 64, 1000, 5 << 20])
def test_host_buffers_are_aligned_and_zero(num_bytes: int) -> None:
    buffer = host_buffer(num_bytes)
    assert buffer.nbytes == num_bytes and buffer.ctypes.data % 64 == 0 and not buffer.any()
    buffer[:] = 1


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(OutOfMemory, match="host buffer needs"):
        host_buffer(1 << 60)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3),
        np.zeros(0),
        np.zeros(()),
        np.zeros(3, ml_dtypes.bfloat16),
        np.frombuffer(b"read-only", np.uint8),
        np.zeros((4, 4))[1:],
    ],
)
def test_address(array: np.ndarray) -> None:
    assert address_of(array) == array.ctypes.data


# --- code --------------------------------------------------------------------------------------------------------------


def test_code_is_called_by_address(object_code: bytes) -> None:
    code = ObjectCode(object_code)
    grid = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.address("grid"))
    dims = np.array([41], np.int64)
    assert grid(dims.ctypes.data) == 41


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


@pytest.mark.skipif(ARCH != "x86_64", reason="other machines address relative to the code")
def test_absolute_addresses_are_refused() -> None:
    """The loader would end the process: the code lies above what 32 bits can address."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="static", codemodel="small")
    text = """
    @table = internal constant [2 x i64] [i64 3, i64 4]
    define i64 @f(i64 %i) {
      %p = getelementptr i64, ptr @table, i64 %i
      %x = load i64, ptr %p
      ret i64 %x
    }"""
    with pytest.raises(DamagedCode, match="position-independent"):
        ObjectCode(machine.emit_object(llvm.parse_assembly(text)))


def test_code_of_another_machine_is_refused(object_code: bytes) -> None:
    other = object_code[:18] + b"\x02\x00" + object_code[20:]
    with pytest.raises(DamagedCode, match="ELF machine 2"):
        ObjectCode(other)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_typed_error(data: bytes) -> None:
    for code in (data, b"\x7fELF\x02\x01" + data):
        with pytest.raises(RuntimeFault):
            elf.symbols(code)


@given(st.data())
def test_damaged_headers_do_no_harm(object_code: bytes, data: st.DataObject) -> None:
    damaged = bytearray(object_code)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RuntimeFault):
        elf.symbols(bytes(damaged))
