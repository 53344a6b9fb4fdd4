"""Descriptors of intrinsic tiles: small operations that code generation emits as machine instructions, each with a meaning in NumPy.

An intrinsic is a frozen dataclass derived from `TileOp` and declared with `@tile_op`. Its fields are the compile-time parameters of one
use. The printer, the parser, the verifier and the interpreter have no code for single intrinsics: they handle every intrinsic through
`TileOp`. The intrinsics are in compiler/machine/intrinsics.
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
    """An operand of a tile: the place in a buffer from which the tile reads or to which it writes."""

    name: str
    dtype: DType | None  # element type of the buffer; None: any type
    written: bool = False


class TileOp:
    """An intrinsic with its compile-time parameters."""

    __slots__ = ()
    name: ClassVar[str]

    @property
    def operands(self) -> tuple[Operand, ...]:
        raise NotImplementedError

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the integers that are passed to the tile at run time."""
        return ()

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid field."""
        yield from ()

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        """Do in NumPy what the instructions do: write into the arrays of the written operands. `arrays` has one array per operand; each is
        flat and begins at the element that its operand names. `dims` has the values of the integers in `dims`."""
        raise NotImplementedError


TILE_OPS: Registry[type[TileOp]] = Registry("tile intrinsic")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def tile_op(cls: T) -> T:
    """Decorate an intrinsic and register it, so that programs may use it."""
    made: Any = dataclass(frozen=True, slots=True)(cls)
    TILE_OPS.add(made.name, made)
    return made


# --- printing and parsing ----------------------------------------------------------------------------------------------

_TYPES = {"int": int, "bool": bool, "str": str, "float": float}


def stated_fields(op: TileOp) -> dict[str, Any]:
    """Return the fields that have no default, or whose values differ from their defaults."""
    values = {f.name: (getattr(op, f.name), f.default) for f in _fields(type(op))}
    return {name: value for name, (value, default) in values.items() if value != default}


def from_fields(name: str, values: Mapping[str, Any]) -> TileOp:
    """Create the descriptor of the intrinsic `name` from its parsed fields. Raise UnknownName if there is no such intrinsic, and ValueError
    if a field is unknown, missing or of the wrong type."""
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
