"""Which machine this is, and whether code made for a target runs on it."""

from __future__ import annotations

import ctypes
import platform
import sys

import llvmlite.binding as llvm

from runtime.errors import IncompatibleExecutable

ARCH = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())  # as LLVM names it


def features() -> frozenset[str]:
    """What this process may use, as LLVM spells it."""
    found = {name for name, present in llvm.get_host_cpu_features().items() if present}
    return frozenset(found if matrix_tiles_allowed() else {name for name in found if not name.startswith("amx-")})


def matrix_tiles_allowed() -> bool:
    """Linux gives a process the AMX tile registers only when asked (arch_prctl, ARCH_REQ_XCOMP_PERM, tile data); a machine without them
    refuses, and so may a container's policy."""
    return sys.platform == "linux" and ARCH == "x86_64" and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def check_target(target: str) -> None:
    """`target` is "arch:+feature,+feature". An instruction that the machine lacks, or that nobody asked leave for, ends the
    process."""
    arch, _, needed = target.partition(":")
    if arch != ARCH:
        raise IncompatibleExecutable(f"the executable is for {arch}, this machine is {ARCH}; compile the program here")
    here = features()
    if missing := [f for f in needed.replace("+", "").split(",") if f and f not in here]:
        raise IncompatibleExecutable(f"the executable needs {', '.join(missing)}, which this machine lacks; compile the program here")
