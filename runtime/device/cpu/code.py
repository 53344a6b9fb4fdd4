"""Load machine code of this machine and make it callable."""

from __future__ import annotations

import ctypes
import mmap
import os

from runtime.device.cpu.host import ARCH
from runtime.errors import DeviceFault, UnresolvedSymbol
from runtime.objects import elf
from runtime.objects.link import Places, linked
from runtime.sections import align

COPIES = frozenset({"memcpy", "memmove", "memset"})  # functions to which LLVM may insert calls

_libc = ctypes.CDLL(None, use_errno=True)


class ObjectCode:
    """Loaded machine code. Addresses are valid as long as this object lives.

    All sections are in one block of memory. LLVM's own loader maps each section wherever there is free space, and ends the process if two
    sections are too far apart for a relative address.
    """

    def __init__(self, code: bytes, imports: frozenset[str] = COPIES) -> None:
        """Load the object, which may call the functions of the C library in `imports`. Raise DamagedCode if it is damaged, or unlike
        what our compiler writes, UnresolvedSymbol if it needs another function, and DeviceFault if the system allows no new code."""
        parts = elf.read(code, ARCH)
        if missing := sorted(parts.undefined - imports):
            raise UnresolvedSymbol(f"the object code refers to {', '.join(missing)}, which nothing defines")
        places = Places.of(parts)
        self._block = mmap.mmap(-1, align(places.num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        self._block[: places.num_bytes] = linked(parts, places, self._begin, {name: _function_of_libc(name) for name in parts.undefined})
        if _libc.mprotect(ctypes.c_void_p(self._begin), ctypes.c_size_t(len(self._block)), mmap.PROT_READ | mmap.PROT_EXEC):
            refusal = os.strerror(ctypes.get_errno())
            raise DeviceFault(
                f"memory for code cannot be made executable: {refusal}; allow this process to do that (systemd: "
                "MemoryDenyWriteExecute=no; SELinux: execmem)"
            )
        self._offsets = {name: places.of_symbol(symbol) for name, symbol in parts.defined.items()}

    def address(self, symbol: str) -> int:
        """Return the address of a symbol. Raise UnresolvedSymbol if the code does not define it."""
        if symbol not in self._offsets:
            raise UnresolvedSymbol(f"the object code does not define {symbol!r}")
        return self._begin + self._offsets[symbol]


def _function_of_libc(name: str) -> int:
    """Return the address of a function of the C library."""
    address = ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value
    assert address is not None
    return address
