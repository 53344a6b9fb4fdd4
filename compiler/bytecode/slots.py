"""The shape heap of one function: which slot holds which dimension, and at which match each dimension becomes known."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.bytecode.shapes import emit_shape_function
from compiler.ir.dims import Dim, DimVar
from compiler.ir.types import ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type
from runtime.executable import AnySpec, Bound, DimRef, ScalarSpec, ShapeSpec, Slot, Spec, TensorSpec, TupleSpec


@dataclass(slots=True)
class Slots:
    """Assigns slots to dimensions. A *match point* is the entry of the function (0) or a match_cast. An expression of variables is computed
    at the latest match point of these variables."""

    function: str
    numbers: dict[Dim, int] = field(default_factory=dict[Dim, int])
    points: dict[DimVar, int] = field(default_factory=dict[DimVar, int])
    bounds: list[Bound] = field(default_factory=list[Bound])
    num_points: int = 1

    def of(self, dim: Dim) -> DimRef:
        """Return the value of a constant dimension, or the slot of a symbolic one."""
        if dim.is_const:
            return dim.const
        return Slot(self.numbers.setdefault(dim, len(self.numbers)))

    def new_point(self) -> int:
        self.num_points += 1
        return self.num_points - 1

    def word(self, var: DimVar, point: int) -> Slot:
        """Define a variable that gets its value at this match point and may have any 64-bit value. Return its slot."""
        self.points[var] = point
        slot = self.of(Dim.of(var))
        assert isinstance(slot, Slot)
        return Slot(slot.index, defines=True)

    def define(self, var: DimVar, point: int, *, extent: bool) -> Slot:
        """Define a variable that gets its value at this match point, where its bounds are checked. Return its slot. The extent of a tensor
        is at least 0 anyway, so an `extent` without other bounds needs no check."""
        slot = self.word(var, point)
        upper = self.of(var.upper) if isinstance(var.upper, Dim) else var.upper
        if not extent or var.lower > 0 or upper is not None or var.multiple_of != 1:
            self.bounds.append(Bound(var.name, slot.index, var.lower, upper, var.multiple_of))
        return slot

    def spec(self, type_: Type, point: int) -> Spec:
        """Return the specification to match a value against. A dimension that is a single new variable defines the variable."""
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
        if dim.var is not None and dim.var not in self.points:
            return self.define(dim.var, point, extent=extent)
        return self.of(dim)

    def symbol(self, point: int) -> str | None:
        """Return the name of the shape function of a match point, or None if the point computes no slots."""
        return f"{self.function}.shape{point}" if self._derived(point) else None

    def text(self) -> str:
        variables = {v: self.numbers[Dim.of(v)] for v in self.points}
        parts = [(self.symbol(p), self._derived(p)) for p in range(self.num_points)]
        return "\n\n".join(emit_shape_function(symbol, variables, derived) for symbol, derived in parts if symbol)

    def _derived(self, point: int) -> list[tuple[Dim, int]]:
        return [(d, n) for d, n in self.numbers.items() if d.var is None and max(self.points[v] for v in d.vars()) == point]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(d) for d in self.numbers)
