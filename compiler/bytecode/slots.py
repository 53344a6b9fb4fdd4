"""The shape heap of one function: which slot holds which dimension, and at which match each dimension becomes known."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from compiler.bytecode.shapes import emit_shape_function
from compiler.ir.dims import Dim, DimVar
from compiler.ir.types import ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type
from runtime.executable import AnySpec, Bound, DimRef, ScalarSpec, ShapeSpec, Slot, Spec, TensorSpec, TupleSpec


@dataclass(slots=True)
class Slots:
    """Assigns slots to dimensions. A *match point* is the entry of the function (0), a match_cast, or the binding of a scalar whose value
    no annotation states. An expression is computed at the latest of the match points that define its variables. If the expression is used
    in places where other match points define its variables, each of these points computes it.

    A variable that a match_cast of a branch defines is known only in that branch. Another branch, or the code after the If, may define it
    again, at another match point. All its definitions fill the same slot."""

    function: str
    numbers: dict[Dim, int] = field(default_factory=dict[Dim, int])  # the slot of each dimension
    known: dict[DimVar, int] = field(default_factory=dict[DimVar, int])  # for each variable known so far, the match point that defines it
    derived: list[dict[Dim, int]] = field(default_factory=lambda: [dict[Dim, int]()])  # for each point, the expressions that it computes
    bounds: list[Bound] = field(default_factory=list[Bound])

    def of(self, dim: Dim) -> DimRef:
        """Return the value of a constant dimension, or the slot of a symbolic one, which gets a slot when it is first used. If the
        dimension is not a single variable, let a match point compute its slot."""
        if dim.is_const:
            return dim.const
        number = self.numbers.setdefault(dim, len(self.numbers))
        if dim.var is None:
            latest = len(self.derived) - 1  # the specification of this point may use a variable before it defines the variable
            self.derived[max(self.known.get(v, latest) for v in dim.vars())][dim] = number
        return Slot(number)

    def new_point(self) -> int:
        """Add a match point, and return its number."""
        self.derived.append({})
        return len(self.derived) - 1

    @contextmanager
    def branch(self) -> Generator[None]:
        """Forget, when the `with` ends, which variables were defined inside it."""
        outer = dict(self.known)
        yield
        self.known = outer

    def word(self, var: DimVar, point: int) -> Slot:
        """Define a variable that gets its value at this match point and may have any 64-bit value. Return its slot."""
        self.known[var] = point
        slot = self.of(Dim.of(var))
        assert isinstance(slot, Slot)
        return Slot(slot.index, defines=True)

    def define(self, var: DimVar, point: int, *, extent: bool) -> Slot:
        """Define a variable that gets its value at this match point, where its bounds are checked. Return its slot. The extent of a tensor
        is at least 0 anyway, so an `extent` without other bounds needs no check."""
        slot = self.word(var, point)
        upper = self.of(var.upper) if isinstance(var.upper, Dim) else var.upper
        if not extent or var.lower > 0 or upper is not None or var.multiple_of != 1:
            bound = Bound(var.name, slot.index, var.lower, upper, var.multiple_of)
            if bound not in self.bounds:
                self.bounds.append(bound)
        return slot

    def spec(self, type_: Type, point: int) -> Spec:
        """Return the specification to match a value against. A dimension that is a single new variable defines the variable. For a type
        whose values are not checked, return AnySpec."""
        match type_:
            case TensorType(shape=shape, dtype=dtype, ndim=ndim):
                return TensorSpec(self._dims(shape, point, extents=True), dtype and str(dtype), ndim)
            case ShapeType(dims=dims, ndim=ndim):
                return ShapeSpec(self._dims(dims, point, extents=False), ndim)
            case ScalarType(dtype=dtype, value=value):
                return ScalarSpec(dtype and str(dtype), None if value is None else self._dim(value, point, extent=False))
            case TupleType(fields=fields):
                return TupleSpec(tuple(self.spec(f, point) for f in fields))
            case ObjectType():
                return AnySpec()
            case _:
                return AnySpec()

    def _dims(self, dims: tuple[Dim, ...] | None, point: int, *, extents: bool) -> tuple[DimRef, ...] | None:
        return None if dims is None else tuple(self._dim(d, point, extent=extents) for d in dims)

    def _dim(self, dim: Dim, point: int, *, extent: bool) -> DimRef:
        if dim.var is not None and dim.var not in self.known:
            return self.define(dim.var, point, extent=extent)
        return self.of(dim)

    def symbol(self, point: int) -> str | None:
        """Return the name of the shape function of a match point, or None if the point computes no slots."""
        return f"{self.function}.shape{point}" if self.derived[point] else None

    def text(self) -> str:
        """Return the LLVM IR of the shape functions of all match points that have one."""
        variables = {dim.var: number for dim, number in self.numbers.items() if dim.var is not None}
        points = [(self.symbol(point), [*derived.items()]) for point, derived in enumerate(self.derived)]
        return "\n\n".join(emit_shape_function(symbol, variables, derived) for symbol, derived in points if symbol)

    @property
    def names(self) -> tuple[str, ...]:
        """The expression that each slot holds, as text."""
        return tuple(str(d) for d in self.numbers)
