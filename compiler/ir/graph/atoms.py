"""Atoms: the operands of values."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from compiler.ir.dims import Dim
from compiler.ir.fields import node
from compiler.ir.types import Type


@node
class Var:
    """A value, defined once by a parameter or by a binding."""

    name: str
    type: Type


@node
class Constant:
    """A tensor whose elements are known."""

    data: NDArray[Any]  # an array of shape [] is a scalar tensor


@node
class ShapeValue:
    """A list of integers, given as expressions."""

    dims: tuple[Dim, ...]


@node
class ScalarValue:
    """A number of type `dtype`: an integer expression if the type is an integer type, or a literal number."""

    value: Dim | float | bool
    dtype: str = "i64"


@node
class FuncRef:
    """A graph-level function of the module, as a value."""

    name: str


Atom = Var | Constant | ShapeValue | ScalarValue | FuncRef
