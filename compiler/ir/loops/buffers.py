"""Buffers: the arrays of a kernel and their memory scopes."""

from __future__ import annotations

from enum import StrEnum

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.fields import node


class Scope(StrEnum):
    """The kind of memory in which a buffer lies. Buffers outside of global memory have constant extents."""

    GLOBAL = "global"  # a parameter, or workspace that a later pass lifts to a parameter
    LOCAL = "local"  # registers or stack of one thread
    SHARED = "shared"  # on-chip memory of a GPU block
    COUNTERS = "counters"  # integers that all blocks of a GPU launch share; zero when a launch begins, and the kernel must leave them zero


@node
class Buffer:
    """An array, stored in row-major order without gaps."""

    name: str
    shape: tuple[Dim, ...]
    dtype: DType
    scope: Scope = Scope.GLOBAL
