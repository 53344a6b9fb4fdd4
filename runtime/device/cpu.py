"""The host as a device: the cores a process may use, aligned memory, and machine code made callable."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from runtime.device import elf
from runtime.errors import OutOfMemory, UnresolvedSymbol
from runtime.sections import ALIGNMENT

# --- cores -------------------------------------------------------------------------------------------------------------

# As the process was given them: a thread that was pinned later sees one alone.
_AFFINITY = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def available_cores(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> tuple[int, ...]:
    """Numbers of the cores this process may run on: its affinity, cut to what the quota of its control group pays for."""
    quota = cpu_quota(cgroups, membership)
    return tuple(_AFFINITY if quota is None else _AFFINITY[: max(1, int(quota))])


def cpu_quota(cgroups: Path, membership: Path) -> float | None:
    """Cores' worth of time per period, the least that any enclosing group grants; None without a limit."""
    quotas: list[float] = []
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, group = line.split(":", 2)
        path = Path(group.lstrip("/"))
        for part in (path, *path.parents):  # a container sees its own group as the root, so missing ones are skipped
            if not controllers:
                quotas += _quota(cgroups / part / "cpu.max")
            elif "cpu" in controllers.split(","):
                quotas += _quota(cgroups / "cpu" / part / "cpu.cfs_quota_us", cgroups / "cpu" / part / "cpu.cfs_period_us")
    return min(quotas, default=None)


def _quota(*files: Path) -> list[float]:
    """Version 2 keeps "quota period" in one file, version 1 has a file for each; "max" and -1 mean unlimited."""
    if not all(f.is_file() for f in files):
        return []
    quota, period = " ".join(f.read_text() for f in files).split()
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


# --- memory ------------------------------------------------------------------------------------------------------------

HUGE_PAGE = 2 << 20


def host_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory at a multiple of 64 bytes. Large blocks lie on huge pages where the system has them, and take no memory before
    they are touched."""
    alignment = HUGE_PAGE if num_bytes >= 2 * HUGE_PAGE else ALIGNMENT
    try:
        block = np.zeros(num_bytes + alignment, np.uint8) if alignment == ALIGNMENT else _mapped(num_bytes + alignment)
    except (MemoryError, OSError, ValueError, OverflowError) as error:
        raise OutOfMemory("host buffer", required=num_bytes) from error
    start = -block.ctypes.data % alignment
    return block[start : start + num_bytes]


def _mapped(num_bytes: int) -> NDArray[np.uint8]:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


_first_byte = ctypes.c_char.from_buffer


def address_of(array: NDArray[Any]) -> int:
    """`array.ctypes.data` four times as fast where that works: for memory that is writable and not empty."""
    try:
        return ctypes.addressof(_first_byte(array.data))
    except (TypeError, ValueError, BufferError):
        return array.ctypes.data


# --- code --------------------------------------------------------------------------------------------------------------

# What LLVM may call for a copy of memory, and the name that position-independent code has for a table the loader makes. Everything
# else must be in the object itself.
_FROM_THE_SYSTEM = frozenset({"memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_"})


class ObjectCode:
    """Machine code, loaded. Addresses are valid as long as this object lives."""

    def __init__(self, code: bytes) -> None:
        self._symbols, undefined = elf.symbols(code)
        if missing := sorted(undefined - _FROM_THE_SYSTEM):
            raise UnresolvedSymbol(f"the object code refers to {', '.join(missing)}, which nothing defines")
        self._engine = jit_engine()
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, symbol: str) -> int:
        if symbol not in self._symbols:
            raise UnresolvedSymbol(f"the object code does not define {symbol!r}")
        return self._engine.get_function_address(symbol)


def jit_engine(module: llvm.ModuleRef | None = None) -> Any:
    """LLVM's loader for code of this machine, with `module` compiled into it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(opt=3, jit=True)
    return llvm.create_mcjit_compiler(module or llvm.parse_assembly(""), target)
