"""Keep machine code on disk, sealed (runtime/sealed.py), so that it is not compiled again for other programs (models) or at later starts.

On a CPU, a kernel is kept under a digest of its loop nest before it is scheduled. If another program has the same nest, its kernel is
neither scheduled nor emitted nor compiled (compiler/passes/recall_kernels.py). Other machine code is kept under a digest of its LLVM IR.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import llvmlite
import msgspec

from compiler.bytecode.kernel import KernelCode, PhaseSymbols
from compiler.codegen.machine_code import __file__ as machine_code_file
from compiler.codegen.machine_code import emitted
from compiler.codegen.relocatable import KERNEL
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.text.printer import canonical_text
from compiler.machine.target import Target
from compiler.signature import compiler_version
from runtime import sealed
from runtime.errors import RuntimeFault

log = logging.getLogger(__name__)

SUFFIX: Final = ".code"
MOST_BYTES: Final = 256 << 20  # beyond this, the entries that were used least recently are removed


class KeptKernel(msgspec.Struct, frozen=True, array_like=True):
    """A compiled kernel. The names of its functions begin with `kernel`."""

    object: bytes
    signature: str  # the kernel's parameters, with its workspace, as a loop nest without statements; "" if it has no workspace
    phases: tuple[PhaseSymbols, ...]
    num_buffers: int
    num_dims: int
    stack_bytes: int

    def named(self, name: str) -> KernelCode:
        """Return the kernel under the given name. The names of its functions begin with this name, too."""
        phases = _renamed(self.phases, KERNEL, name)
        return KernelCode(name, "", phases, frozenset(), self.num_buffers, self.num_dims, self.stack_bytes, object=self.object)


def kept_kernel(code: KernelCode, compiled: bytes, signature: str) -> KeptKernel:
    """Return the kernel in the form that is kept. `compiled` is its machine code, in which the names of its functions begin with `kernel`.
    For `signature` see `KeptKernel`."""
    return KeptKernel(compiled, signature, _renamed(code.phases, code.name, KERNEL), code.num_buffers, code.num_dims, code.stack_bytes)


def _renamed(phases: tuple[PhaseSymbols, ...], old: str, new: str) -> tuple[PhaseSymbols, ...]:
    """Return symbols whose beginning `old` is replaced by `new`."""
    return tuple(replace(p, body=new + p.body.removeprefix(old), grid=new + p.grid.removeprefix(old)) for p in phases)


class KeptCode:
    """A folder of machine code. Processes may share it."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.num_reused = self.num_emitted = 0  # numbers of kernels and modules whose code was in the folder, and of those compiled anew
        self._most_bytes = most_bytes
        self._can_store = True
        self._found: dict[str, KeptKernel] = {}  # kernels that `recall` found: another process may remove their files afterwards

    def emit(self, text: str, target: Target) -> bytes:
        """Return the machine code of LLVM IR. If the folder does not have it, compile it with `emitted`, and keep it if possible."""
        key = key_of(text, target)
        code = sealed.recall(self._path(key))
        if code is not None:
            self.num_reused += 1
            return code
        code = emitted(text, target)
        self.num_emitted += 1
        self._store(key, code)
        return code

    def recall(self, key: str) -> KeptKernel | None:
        """Return the kernel that is kept under a key. Return None if there is none, or if its file is damaged."""
        if key not in self._found and (content := sealed.recall(self._path(key))) is not None:
            with suppress(msgspec.MsgspecError):  # the key covers the compiler's version, so only a damaged entry fails to decode
                self._found[key] = msgspec.msgpack.decode(content, type=KeptKernel)
        return self._found.get(key)

    def keep(self, key: str, kernel: KeptKernel) -> None:
        """Keep a kernel under a key. If the folder cannot be written, log a warning once, and keep nothing from then on."""
        self._store(key, msgspec.msgpack.encode(kernel))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _store(self, key: str, code: bytes) -> None:
        """Write a file. If that fails, log a warning, and write nothing from then on: later entries are dropped."""
        if not self._can_store:
            return
        path = self._path(key)
        try:
            sealed.require_private(self.folder)
            sealed.store(path, code)
        except (OSError, RuntimeFault) as error:  # a full or read-only disk, or a folder that others can write to
            log.warning("machine code cannot be kept in %s: %s; the next compilation takes longer", self.folder, error)
            self._can_store = False

    def paths(self) -> list[Path]:
        """Return the files of all entries."""
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    def trim(self) -> None:
        """Remove the entries that were used least recently, until the rest has at most `most_bytes`."""
        total = 0
        for _, num_bytes, path in sorted(self._used(), reverse=True):
            total += num_bytes
            if total > self._most_bytes:
                with suppress(OSError):
                    path.unlink()

    def _used(self) -> Iterator[tuple[float, int, Path]]:
        """Yield the time of last use, the size in bytes and the path of each entry."""
        for path in self.paths():
            with suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                yield status.st_mtime, status.st_size, path


def key_of(text: str, target: Target) -> str:
    """Return a digest of everything that determines the machine code of a module: its LLVM IR, the target, and LLVM with its passes."""
    return _digest(text, _stated(target), _version())


def key_of_kernel(prim: PrimFunc, target: Target) -> str:
    """Return a digest of everything that determines the code of a kernel: its loop nest, the target, and the whole compiler."""
    return _digest(canonical_text(KERNEL, prim), _stated(target), compiler_version())


def _digest(*parts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


@lru_cache(maxsize=8)
def _stated(target: Target) -> str:
    """Return the fields of a target as text, which is the same in every process."""
    fields = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(target).items()}
    return msgspec.json.encode(fields).decode()


@lru_cache(maxsize=1)
def _version() -> str:
    """Return the release of LLVM's binding, and a digest of the module that runs LLVM's passes. Everything else that determines the machine
    code also changes the LLVM IR or the target."""
    return f"{llvmlite.__version__} {hashlib.sha256(Path(machine_code_file).read_bytes()).hexdigest()}"
