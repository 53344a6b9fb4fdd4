"""The CPU features of this machine, and the check that they suffice for a target."""

from __future__ import annotations

import ctypes
import platform
import sys

from runtime.errors import IncompatibleExecutable
from runtime.remembered import remembered

# CPU features that Linux reports to a process on AArch64. Each row of _ARM_BITS has the index of a word, the number of a bit, and
# LLVM's name of the feature. LLVM itself finds only the first two features.
_ARM_WORDS = 16, 26  # AT_HWCAP, AT_HWCAP2
_ARM_BITS = (
    (0, 0, "fp-armv8"),
    (0, 1, "neon"),
    (0, 10, "fullfp16"),
    (0, 20, "dotprod"),
    (1, 13, "i8mm"),
    (1, 14, "bf16"),
)

ARCH = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())  # architecture of this machine as LLVM names it


def features() -> frozenset[str]:
    """Return the CPU features that this process may use, in LLVM's spelling. AMX is among them only if Linux grants its registers."""
    found = {*remembered("features", b"", _told_by_llvm).decode().split()} | _told_by_linux()
    return frozenset(found if matrix_tiles_allowed() else {name for name in found if not name.startswith("amx-")})


def _told_by_llvm() -> bytes:
    import llvmlite.binding as llvm  # imported late: the front imports this module, but does not need LLVM; see also runtime/remembered.py

    return " ".join(sorted(name for name, present in llvm.get_host_cpu_features().items() if present)).encode()


def _told_by_linux() -> set[str]:
    """Return the features that Linux reports to this process on AArch64; none on other machines."""
    if sys.platform != "linux" or ARCH != "aarch64":
        return set()
    words = [_auxiliary(number) for number in _ARM_WORDS]
    return {name for word, bit, name in _ARM_BITS if words[word] >> bit & 1}


def _auxiliary(number: int) -> int:
    """Return an entry of the auxiliary vector, which the kernel passes to a process at its start."""
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(read(number))


def matrix_tiles_allowed() -> bool:
    """Ask Linux for the AMX tile registers and return whether it grants them. Linux gives them to a process only on request (arch_prctl,
    ARCH_REQ_XCOMP_PERM, tile data). The request fails if the machine has no such registers, or if a container's policy forbids it."""
    return sys.platform == "linux" and ARCH == "x86_64" and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def check_target(target: str) -> None:
    """Raise IncompatibleExecutable unless this process can run code for `target`, which is "arch:+feature,+feature". An instruction that
    the machine lacks, or whose registers the system did not grant, would end the process."""
    arch, _, needed = target.partition(":")
    if arch != ARCH:
        raise IncompatibleExecutable(f"the executable is for {arch}, this machine is {ARCH}; compile the program here")
    here = features()
    if missing := [f for f in needed.replace("+", "").split(",") if f and f not in here]:
        raise IncompatibleExecutable(f"the executable needs {', '.join(missing)}, which this machine lacks; compile the program here")
