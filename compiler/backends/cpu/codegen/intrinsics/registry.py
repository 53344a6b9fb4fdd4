"""Tile intrinsics: small bodies that are emitted for the machine, each with a NumPy meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from compiler.llvm.ssa import Code
from compiler.machine.target import Target


@dataclass(frozen=True, slots=True)
class Operands:
    """A tile's arguments as LLVM sees them: a pointer per operand, an integer per dimension, and the attributes."""

    pointers: tuple[str, ...]
    dims: tuple[int | str, ...]
    attrs: Mapping[str, Any]


Meaning = Callable[[tuple[NDArray[Any], ...], tuple[int, ...], Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """`meaning` takes flat arrays that begin at the operands' elements, then dimensions and attributes, and writes the first array."""

    doc: str
    meaning: Meaning
    runs_on: Callable[[Target], bool]
    emit: Callable[[Code, Operands, Target], None]
