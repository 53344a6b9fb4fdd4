"""Descriptors of intrinsic tiles: small bodies that code generation emits for a machine, each with a NumPy meaning of its own.

An intrinsic is a frozen dataclass over `TileOp`, declared with `@tile_op`: its fields are what varies between its uses, known when the
program is compiled. The loop level knows no intrinsic by name: it prints, parses, verifies and interprets them by what this class says.
Those of the machines are in compiler/machine/intrinsics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from numpy.typing import NDArray

from compiler.ir.dtypes import DType
from compiler.ir.op import Registry

Array = NDArray[Any]
T = TypeVar("T", bound="type[TileOp]")


@dataclass(frozen=True, slots=True)
class Operand:
    """A place in a buffer, from which a tile reads or to which it writes."""

    name: str
    dtype: DType | None  # of the buffer; None is any
    written: bool = False


class TileOp:
    """One intrinsic."""

    __slots__ = ()
    name: ClassVar[str]

    @property
    def operands(self) -> tuple[Operand, ...]:
        raise NotImplementedError

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the integers that the tile takes when it runs."""
        return ()

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from ()

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        """Write the outputs. The arrays are flat and begin at the elements that the operands name."""
        raise NotImplementedError


TILE_OPS: Registry[type[TileOp]] = Registry("tile intrinsic")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def tile_op(cls: T) -> T:
    """The decorator of all intrinsics. From here on programs may name it."""
    made: Any = dataclass(frozen=True, slots=True)(cls)
    TILE_OPS.add(made.name, made)
    return made


# --- text --------------------------------------------------------------------------------------------------------------

_TYPES = {"int": int, "bool": bool}


def stated_fields(op: TileOp) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    values = {f.name: (getattr(op, f.name), f.default) for f in _fields(type(op))}
    return {name: value for name, (value, default) in values.items() if value != default}


def from_fields(name: str, values: Mapping[str, Any]) -> TileOp:
    """The descriptor that a text states; a `ValueError` says what is wrong with it."""
    op = TILE_OPS[name]
    types = {f.name: _TYPES[str(f.type)] for f in _fields(op)}
    for key, value in values.items():
        if key not in types:
            raise ValueError(f"tile {name} has no field {key}; known: {', '.join(types) or 'none'}")
        if type(value) is not types[key]:
            raise ValueError(f"field {key} of tile {name} is {value!r}, expected {types[key].__name__}")
    if missing := [f.name for f in _fields(op) if f.default is MISSING and f.name not in values]:
        raise ValueError(f"tile {name} lacks {', '.join(missing)}")
    return op(**values)


def _fields(op: type[TileOp]) -> tuple[Any, ...]:
    made: Any = op
    return fields(made)
