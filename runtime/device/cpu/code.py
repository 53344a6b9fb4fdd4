"""Machine code of this machine, loaded and made callable."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm

from runtime.device.cpu import elf
from runtime.errors import UnresolvedSymbol

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
