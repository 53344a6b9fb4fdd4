"""The code of one kernel, as a back end emits it."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.loops.functions import Fn


@dataclass(frozen=True, slots=True)
class PhaseSymbols:
    body: str
    grid: str
    threads: int = 1  # of a block on a GPU
    num_counters: int = 0  # that the blocks of a launch share


@dataclass(frozen=True, slots=True)
class KernelCode:
    name: str
    text: str
    phases: tuple[PhaseSymbols, ...]
    math: frozenset[tuple[Fn, int]]  # functions of vector_math that the text calls, with their lanes
    num_buffers: int
    num_dims: int  # integer variables and scalar parameters
    stack_bytes: int  # of all that is allocated, in the phase that has most
    host: str = ""  # the grids, where the host cannot run the text itself
