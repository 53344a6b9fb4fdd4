"""What tile intrinsics compute, by name. Code generation, which emits them, adds the meaning of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from compiler.ir.op import Registry

# Takes flat arrays that begin at the operands' elements, then dimensions and attributes, and writes into the arrays.
Meaning = Callable[[tuple[NDArray[Any], ...], tuple[int, ...], Mapping[str, Any]], None]

TILES: Registry[Meaning] = Registry("meaning of tile intrinsic")
