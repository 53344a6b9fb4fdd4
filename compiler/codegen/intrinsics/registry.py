"""Tile intrinsics: small bodies that are emitted for the machine, each with a NumPy meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compiler.codegen.ssa import Code
from compiler.ir.op import Registry
from compiler.target import Target


@dataclass(frozen=True, slots=True)
class Operands:
    """A tile's arguments as LLVM sees them: a pointer per operand, an integer operand per dimension, and the attributes."""

    pointers: tuple[str, ...]
    dims: tuple[int | str, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """`meaning` works on flat arrays that start at the operands' elements; `emit` writes the body for a target that `runs_on`."""

    doc: str
    meaning: Callable[..., None]
    runs_on: Callable[[Target], bool]
    emit: Callable[[Code, Operands, Target], None]


INTRINSICS: Registry[Intrinsic] = Registry("tile intrinsic")
