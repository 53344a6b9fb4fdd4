"""Compile a program, or find it in the cache."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from compiler.cache import Cache, Key
from compiler.ir.module import IRModule
from compiler.machine.target import Target, host
from compiler.report import say
from compiler.signature import key_of
from deploy.cache import NOT_CACHED, Kept, kept
from deploy.model_loading.known import Progress, silent
from runtime.executable import Executable
from runtime.session import Session

MOST_HELPERS = 3  # most processes that compile kernels; this process emits LLVM IR about as fast as three of them compile it

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program, and its key in the cache."""

    executable: Executable
    key: str
    identity: str  # digest of everything in the key but the target: equal on all machines
    cache_hit: bool  # whether the cache had the program
    compile_s: float  # 0 if the cache had the program

    def session(self, cache: Kept | None, source: str, number: int, num_ranks: int = 1) -> Session:
        """Open device `number` for the program, or `num_ranks` devices from this one on. A cache keeps the code that a device assembles,
        and remembers `source`, the model that uses the program."""
        if cache is None:
            return Session(self.executable, device_number=number, num_ranks=num_ranks)
        cache.remember_model(self.key, source)
        assembled = cache.assembled_of(self.key)
        return Session(self.executable, device_number=number, num_ranks=num_ranks, assembled=assembled)


def compile_model(module: IRModule, cache: Cache | None, target: Target, progress: Progress = silent) -> Program:
    """Find the program in the cache, or compile it and store it there. If it cannot be stored, only log a warning."""
    progress("compile", 0.0)
    key = key_of(module, target.key)
    found = _found(cache, key)
    started = time.perf_counter()
    executable = _compiled(module, cache, target, progress) if found is None else found
    elapsed = 0.0 if found is not None else time.perf_counter() - started
    if found is None and cache is not None:
        try:
            cache.store(key, executable)
        except OSError as error:  # a full or read-only disk
            log.warning(NOT_CACHED, "the compiled program", cache.folder, error.strerror or error)
    progress("compile", 1.0)
    return Program(executable, key.digest, key.program, found is not None, elapsed)


def compile_here(module: IRModule) -> Executable:
    """Compile a program for this machine's CPU, or find it in the cache."""
    cache = kept()
    return compile_model(module, None if cache is None else cache.executables, host()).executable


def _found(cache: Cache | None, key: Key) -> Executable | None:
    """Look for the program in the cache. If the cache cannot be read, log a warning and return None."""
    try:
        return None if cache is None else cache.find(key)
    except OSError as error:
        log.warning("the cache %s cannot be read: %s; the program is compiled", cache and cache.folder, error.strerror or error)
        return None


def _compiled(module: IRModule, cache: Cache | None, target: Target, progress: Progress) -> Executable:
    """Compile the program. With a cache, reuse the machine code of kernels that other programs have, and keep that of new ones."""
    # imported only here: a start from the cache needs no compiler and is faster without its imports
    from compiler.codegen.kept import KeptCode
    from compiler.driver import Options, compile_module
    from deploy.machine import num_cores

    kernels = None if cache is None else KeptCode(cache.folder.with_name("kernels"))
    options = Options(
        target, progress=lambda fraction: progress("compile", fraction), kept=kernels, num_helpers=min(num_cores() - 1, MOST_HELPERS)
    )
    executable = compile_module(module, options)
    if kernels is not None:
        say(1, f"cache: {kernels.num_reused} of {kernels.num_reused + kernels.num_emitted} modules of machine code are reused")
        kernels.trim()
    return executable
