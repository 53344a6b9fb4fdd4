"""What a back end is: how programs become kernels of one kind of machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from compiler.bytecode.kernel import KernelCode
from compiler.ir.loops.prim_func import PrimFunc
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline
from runtime.executable import HostCode


class LinkedCode(Protocol):
    @property
    def object(self) -> bytes:
        """What is loaded to run."""
        ...

    @property
    def host(self) -> HostCode | None:
        """What the host runs for it, where it cannot run the object itself."""
        ...

    def optimised(self) -> str:
        """The text of level .ll, as the code generator has improved it."""
        ...

    def assembly(self) -> str:
        """The text of level .s."""
        ...


class Backend(Protocol):
    @property
    def prepares_weights(self) -> bool:
        """Whether its kernels prepare weights when these are bound. Otherwise the host does."""
        ...

    @property
    def phases(self) -> Mapping[str, str]:
        """The phases of the pipeline by name, and the pass with which each ends."""
        ...

    def pipeline(self, target: Target, instruments: tuple[Instrument, ...]) -> Pipeline:
        """The passes from operators to scheduled kernels in planned memory."""
        ...

    def emit(self, name: str, prim: PrimFunc, target: Target) -> KernelCode: ...

    def link(self, kernels: Iterable[KernelCode], target: Target, shape_functions: str) -> LinkedCode:
        """One object of all kernels, and of the functions that compute shapes on the host."""
        ...
