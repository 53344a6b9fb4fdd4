"""The memory of a kernel: arrays, and where they are."""

from __future__ import annotations

from enum import StrEnum

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.fields import node


class Scope(StrEnum):
    GLOBAL = "global"  # a parameter, or workspace that lifting will make one
    LOCAL = "local"  # registers or stack of one thread: constant size
    SHARED = "shared"  # on-chip memory of a GPU block
    COUNTERS = "counters"  # zero when a launch on a GPU begins and ends; its blocks share them


@node
class Buffer:
    """A compact row-major array."""

    name: str
    shape: tuple[Dim, ...]
    dtype: DType
    scope: Scope = Scope.GLOBAL
