"""Random calls of one operator with hostile sizes, attributes and indices.

`table.py` has a row per operator. A row states a valid call, through the methods of `Draw`. Each method keeps what the row states
with high probability, and otherwise replaces it: an extent by a wrong one, an attribute by one of another kind, an index by one outside its
range. Numbers may become symbolic variables. So a row need not know the rules of its operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan, prod
from random import Random
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.module import IRModule
from compiler.ir.op import OPS, REQUIRED
from compiler.ir.types import ScalarType, ShapeType, TensorType, tensor
from tests.compiler.ops.hostile.indices import INT32, INT64, bad, overwrite
from tests.compiler.random_programs.programs import Unfit

FLOATS = [DType.F32, DType.F32, DType.F32, DType.F16, DType.BF16]
INTEGERS = [DType.I32, DType.I64, DType.I8, DType.U8]
MOST_ELEMENTS = 1 << 14
# attributes of every kind, and integers at the ends of their ranges
STRANGE = [
    -1,
    0,
    1,
    2,
    3,
    7,
    -8,
    int(INT32.max),
    int(INT64.max),
    int(INT64.min),
    1 << 70,
    0.5,
    -1.0,
    nan,
    1e300,
    True,
    None,
    "",
    "f32",
    [],
    [0, 0],
    [1],
]

Make = Callable[[tuple[int, ...]], Any]  # shape -> the elements


@dataclass(slots=True)
class Draw:
    """A random call under construction: `main` with one parameter per tensor, and a shape that defines all symbolic variables."""

    random: Random
    hostile: float = 0.06  # probability with which a number, an element type or an attribute is replaced
    sizes: dict[DimVar, int] = field(default_factory=dict[DimVar, int])
    params: dict[Var, Callable[[Mapping[DimVar, int]], Any]] = field(default_factory=dict[Var, Callable[[Mapping[DimVar, int]], Any]])
    args: tuple[Atom, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict[str, Any])

    # --- numbers ---------------------------------------------------------------------------------------------------------

    def one_of(self, items: Sequence[Any]) -> Any:
        return self.random.choice(items)

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def size(self, *sizes: int) -> int:
        """Draw a valid extent."""
        return self.one_of(sizes or (0, 1, 1, 2, 3, 4, 5, 8, 17))

    def dim(self, wanted: int) -> Dim:
        """Return an extent that is `wanted` or, rarely, another number: as a number or as a symbolic variable with that value."""
        value = max(0, self.one_of([0, 1, wanted - 1, wanted + 1, 2 * wanted])) if self.chance(self.hostile) else wanted
        return self.number(value)

    def number(self, value: int) -> Dim:
        if self.chance(0.5):
            return Dim.of(value)
        known = [v for v, size in self.sizes.items() if size == value]
        if known and self.chance(0.5):
            return Dim.of(self.one_of(known))
        var = DimVar(f"n{len(self.sizes)}", 0)
        self.sizes[var] = value
        return Dim.of(var)

    # --- operands --------------------------------------------------------------------------------------------------------

    def tensor(
        self, shape: Sequence[int], dtypes: Sequence[DType] | DType = FLOATS, make: Make | None = None, attacked: int | None = None
    ) -> Var:
        """Return a parameter of this shape. Its elements are small numbers unless `make` makes them. If they are indices below `attacked`,
        some of them become bad."""
        wanted = [dtypes] if isinstance(dtypes, DType) else dtypes
        dtype = self.one_of(list(DType)) if self.chance(self.hostile / 4) else self.one_of(wanted)
        dims = [self.dim(n) for n in shape]
        if self.chance(self.hostile / 4):
            dims = self.one_of([dims[1:], [*dims, Dim.of(1)]])
        var, numbers = Var(f"x{len(self.params)}", tensor(tuple(dims), dtype)), np.random.default_rng(self.random.getrandbits(32))

        def array(sizes: Mapping[DimVar, int]) -> Any:
            extents = tuple(d.evaluate(sizes) for d in dims)
            if prod(extents) > MOST_ELEMENTS:
                raise Unfit
            with np.errstate(all="ignore"):
                found = np.asarray(make(extents) if make else _elements(numbers, extents, dtype)).astype(dtype.numpy).reshape(extents)
            if attacked is not None and dtype.is_int:
                overwrite(found, attacked, numbers)
            return found

        self.params[var] = array
        return var

    def indices(self, shape: Sequence[int], bound: int, dtypes: Sequence[DType] | DType = (DType.I32, DType.I64)) -> Var:
        """Return a tensor of indices below `bound`. In some draws, some of them are replaced by numbers at the ends of this range or
        outside of it."""
        numbers = np.random.default_rng(self.random.getrandbits(32))
        return self.tensor(shape, dtypes, lambda extents: numbers.integers(0, max(1, bound), extents), self._attacked(bound))

    def listed(self, values: Sequence[int], dtypes: Sequence[DType] | DType = (DType.I32, DType.I64)) -> Var:
        """Return a vector of these numbers, such as the first tokens of sequences. In some draws, some of them are replaced by others."""
        found = np.array([*values, 0], np.int64)
        return self.tensor([len(values)], dtypes, lambda extents: np.resize(found, extents), self._attacked(max(values, default=0) + 1))

    def _attacked(self, bound: int) -> int | None:
        return bound if self.chance(0.4) else None

    def shape(self, shape: Sequence[int]) -> ShapeValue:
        return ShapeValue(tuple(self.dim(n) for n in shape))

    def index(self, bound: int) -> Atom:
        """Return a scalar index below `bound`. In some draws, it is at an end of this range or outside of it."""
        return self._integer(self.random.randrange(bound), bound)

    def scalar(self, value: int) -> Atom:
        """Return `value` as an operand. In some draws, return another integer."""
        return self._integer(value, value + 1)

    def _integer(self, value: int, bound: int) -> Atom:
        """Return a literal, a symbolic variable, or a parameter."""
        found = self.one_of(bad(INT64, bound)) if self.chance(0.2) else value
        if self.chance(0.5):
            return ScalarValue(self.number(found) if found >= 0 else Dim.of(found))
        var = Var(f"x{len(self.params)}", ScalarType(DType.I64))
        self.params[var] = lambda _: found
        return var

    # --- attributes ------------------------------------------------------------------------------------------------------

    def place(self, value: int) -> Any:
        """Return an attribute that may be symbolic: a number or a variable, also of a negative or a large value."""
        if self.chance(3 * self.hostile):
            value = self.one_of([-1, -3, 0, 1, 2, 9, 100])
        dim = self.number(value) if value >= 0 else -self.number(-value)
        return dim.const if dim.is_const else dim

    def places(self, values: Sequence[int]) -> list[Any]:
        return [self.place(v) for v in values]

    def call(self, *args: Atom, **attrs: Any) -> None:
        self.args = args
        self.attrs = {name: self.one_of(STRANGE) if self.chance(self.hostile) else value for name, value in attrs.items()}

    # --- the program -----------------------------------------------------------------------------------------------------

    def module(self, op: str) -> IRModule:
        """Return the program. Raise CompileError if the operator refuses the call."""
        for name, default in OPS[op].attributes.items():  # attributes that the row leaves at their defaults
            if name not in self.attrs and default is not REQUIRED and self.chance(self.hostile):
                self.attrs[name] = self.one_of(STRANGE)
        args = self.args
        if args and self.chance(self.hostile / 4):
            args = self.one_of([args[:-1], (*args, args[0])])
        sizes, builder = Var("sizes", ShapeType(tuple(map(Dim.of, self.sizes)))), Builder()
        with builder.function("main", (*self.params, sizes), pure=OPS[op].pure):
            builder.returns(builder.call(OPS[op], *args, **self.attrs))
        return builder.finish()

    def has(self, dtype: DType) -> bool:
        """Return whether a parameter has this element type."""
        return any(isinstance(var.type, TensorType) and var.type.dtype is dtype for var in self.params)

    def inputs(self, call: int) -> tuple[Any, ...]:
        """Return the arguments of the call with this number. After the first call, some variables have other values."""
        sizes = dict(self.sizes)
        for var, value in sizes.items() if call else ():
            if self.chance(0.3):
                sizes[var] = self.one_of([0, 1, value + 1, max(0, value - 1), 2 * value])
        return (*(make(sizes) for make in self.params.values()), tuple(sizes.values()))


def _elements(numbers: np.random.Generator, extents: tuple[int, ...], dtype: DType) -> Any:
    """Return small numbers whose sums and products are exact, so that no result depends on the order of additions."""
    if dtype is DType.BOOL:
        return numbers.integers(0, 2, extents)
    found = numbers.integers(0 if dtype.is_unsigned else -3, 4, extents)
    return found / 2 if dtype.is_float else found


Row = Callable[[Draw], None]
ROWS: dict[str, Row] = {}


def row(names: str) -> Callable[[Row], Row]:
    """Register the row of the named operators."""

    def add(make: Row) -> Row:
        for name in names.split():
            assert name not in ROWS, f"operator {name} has two rows"
            ROWS[name] = make
        return make

    return add
