"""Buffers: the arrays of a kernel and their memory scopes."""

from __future__ import annotations

from enum import StrEnum

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.fields import node


class Scope(StrEnum):
    GLOBAL = "global"  # a parameter, or workspace that a later pass lifts to a parameter
    LOCAL = "local"  # registers or stack of one thread; constant size
    SHARED = "shared"  # on-chip memory of a GPU block
    COUNTERS = "counters"  # shared by the blocks of a GPU launch; zero when a launch begins and when it ends


@node
class Buffer:
    """A compact row-major array."""

    name: str
    shape: tuple[Dim, ...]
    dtype: DType
    scope: Scope = Scope.GLOBAL
