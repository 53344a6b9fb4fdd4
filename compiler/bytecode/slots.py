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
    """Assigns slots to dimensions. A *match point* is the entry of the function (0) or a match_cast. An expression of variables is computed
    at the latest match point of these variables.

    A variable that a match_cast of a branch defines is known only in that branch. Another branch, or the code after the If, may define it
    again, at another match point. All its definitions fill the same slot."""

    function: str
    numbers: dict[Dim, int] = field(default_factory=dict[Dim, int])
    known: set[DimVar] = field(default_factory=set[DimVar])  # the variables that are defined before this place of the function
    defined: list[set[DimVar]] = field(default_factory=lambda: [set[DimVar]()])  # for each match point, the variables that it defines
    before: list[frozenset[DimVar]] = field(default_factory=lambda: [frozenset[DimVar]()])  # and those that are defined before it
    bounds: list[Bound] = field(default_factory=list[Bound])

    def of(self, dim: Dim) -> DimRef:
        """Return the value of a constant dimension, or the slot of a symbolic one."""
        if dim.is_const:
            return dim.const
        return Slot(self.numbers.setdefault(dim, len(self.numbers)))

    def new_point(self) -> int:
        self.defined.append(set())
        self.before.append(frozenset(self.known))
        return len(self.defined) - 1

    @contextmanager
    def branch(self) -> Generator[None]:
        """Forget, when the `with` ends, which variables were defined inside it."""
        outer = set(self.known)
        yield
        self.known = outer

    def word(self, var: DimVar, point: int) -> Slot:
        """Define a variable that gets its value at this match point and may have any 64-bit value. Return its slot."""
        self.known.add(var)
        self.defined[point].add(var)
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
        if dim.var is not None and dim.var not in self.known:
            return self.define(dim.var, point, extent=extent)
        return self.of(dim)

    def symbol(self, point: int) -> str | None:
        """Return the name of the shape function of a match point, or None if the point computes no slots."""
        return f"{self.function}.shape{point}" if self._derived(point) else None

    def text(self) -> str:
        variables = {v: self.numbers[Dim.of(v)] for defined in self.defined for v in defined}
        parts = [(self.symbol(p), self._derived(p)) for p in range(len(self.defined))]
        return "\n\n".join(emit_shape_function(symbol, variables, derived) for symbol, derived in parts if symbol)

    def _derived(self, point: int) -> list[tuple[Dim, int]]:
        new, known = self.defined[point], self.defined[point] | self.before[point]
        return [(d, n) for d, n in self.numbers.items() if d.var is None and not new.isdisjoint(d.vars()) and known.issuperset(d.vars())]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(d) for d in self.numbers)
