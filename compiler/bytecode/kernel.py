"""The code of one kernel, as a back end emits it."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.loops.functions import Fn


@dataclass(frozen=True, slots=True)
class PhaseSymbols:
    """The symbols of one phase of a kernel (runtime/executable.py), and what a launch of the phase needs."""

    body: str  # the function that runs iterations or blocks
    grid: str  # the function that returns the number of iterations or blocks
    threads: int = 1  # number of threads per block on a GPU
    num_counters: int = 0  # number of counters that the blocks of a launch share
    shared_bytes: int = 0  # number of bytes of a block's shared memory that a launch must request
    # The numbers of the buffers that the phase may read before earlier launches have ended. The phase waits for their end before it
    # accesses any other buffer. None: it does not wait.
    early: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A kernel as LLVM IR, or as machine code if it was kept. Its symbols are in `phases`."""

    name: str
    text: str  # LLVM IR
    phases: tuple[PhaseSymbols, ...]
    math: frozenset[tuple[Fn, int]]  # functions of vector_math that `text` calls, each with its number of lanes
    num_buffers: int
    num_dims: int  # number of integer variables and scalar parameters
    stack_bytes: int  # bytes of local allocations: the maximum over all phases
    host: str = ""  # LLVM IR of the functions that return the number of blocks, if they run on the host and `text` does not
    object: bytes = b""  # machine code under the name `kernel`, if it was kept (compiler/codegen/kept.py); then there is no `text`

    @property
    def early(self) -> frozenset[int] | None:
        """The numbers of the buffers that phases read before earlier launches have ended. None: some phase does not wait for the end of
        earlier launches, so the launch must not begin before that end."""
        found = [phase.early for phase in self.phases]
        return None if None in found else frozenset(number for early in found if early is not None for number in early)
