"""Remember results of LLVM that are the same at every start on a machine: the features of the CPU, and the machine code of a thread team's
loop.

So a worker that finds its program in the cache need not load LLVM, which takes 80 MB of memory and 60 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from runtime import sealed
from runtime.errors import RuntimeFault

SUFFIX = ".code"
# Lines of /proc/cpuinfo that differ from core to core, or from one moment to the next.
_CHANGING = frozenset({"processor", "cpu MHz", "bogomips", "BogoMIPS", "apicid", "initial apicid", "core id", "physical id"})

_folder: Path | None = None


def remember_in(folder: Path | None) -> None:
    """Use this folder of the cache from now on. Nothing is remembered before the first call, or after a call with None."""
    global _folder
    _folder = folder


def remembered(name: str, depends: bytes, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returned on this machine before, or what it returns now. `depends` encodes everything that this result depends on
    besides the CPU and the release of LLVM."""
    cpu = _cpu()
    if _folder is None or cpu is None:
        return make()
    key = hashlib.sha256(b"\0".join([name.encode(), version("llvmlite").encode(), cpu, depends])).hexdigest()[:32]
    path = _folder / f"{key}{SUFFIX}"
    if (known := sealed.recall(path)) is not None:
        return known
    content = make()
    with suppress(OSError, RuntimeFault):  # a full or read-only disk, or a folder open to others: compiler/codegen/kept.py logs it
        sealed.require_private(_folder)
        sealed.store(path, content)
    return content


@cache
def _cpu() -> bytes | None:
    """Return the lines of /proc/cpuinfo about the first core that never change, or None if there are none."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return None
    lines = [line for line in first.splitlines() if line.partition(":")[0].strip() not in _CHANGING]
    return "\n".join(lines).encode() or None
