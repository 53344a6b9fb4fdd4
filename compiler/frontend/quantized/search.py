"""The program that quantises rows of a matrix: numbers of 4 or 6 bits in groups, whose scales and shifts are integers in units of a float
that several groups share.

    search(x[n, k], importance[k]) -> (q, scale, scale_unit, error) or, with shifts, (q, scale, shift, scale_unit, shift_unit, error)

The results, except for the errors [n, groups], are the parts of a `Form`. `importance` has, for each input of the matrix, the mean square
of the values of this input. The error of a group is the sum of its squared rounding errors, each times the importance of its input and a
factor that is larger for larger elements (`weighed`). So the sum over a row is about the expected squared error of the product, if inputs
are not correlated.

A form may also have codes of 4 bits, which stand for the numbers of a table (IQ4), with scales and without shifts. Since the table is not
symmetric, a scale may be negative.

First a scale and a shift are searched as floats: least squares from several starts, which differ in the fraction of the group's range that
the numbers span, and for tables in the sign of the scale. Then both are rounded to integers, and the neighbours of these integers are
compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiler.frontend.quantized.held import Form, Offset
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import MakeTuple, TupleGet
from compiler.ir.module import IRModule
from compiler.ir.numbers import TABLES
from compiler.ir.op import OpDef
from compiler.ir.types import tensor
from compiler.ops.elementwise import ABS, ADD, CAST, CLIP, DIVIDE, LESS, MAXIMUM, MULTIPLY, NEGATIVE, ROUND, SQRT, SUBTRACT, WHERE
from compiler.ops.manipulate import BROADCAST_TO, RESHAPE
from compiler.ops.products.quantize import DEQUANTIZE
from compiler.ops.products.refine import GROUP_ERRORS, REFINE_GROUPS, ROUND_GROUPS, range_of
from compiler.ops.reduce import MAX, MEAN, MIN, SUM

ENTRY = "search"
MOST_LEVEL = 127  # the largest scale or shift in units
STARTS = 20  # number of scales, after the first, from which a group's search begins
MARGIN = 1.0  # the first start spans this many integers fewer than the range has, and the last start this many more
TABLE_STARTS = 10  # like STARTS, for each sign of the scale, in forms with a table
TABLE_SHARES = 0.62, 1.2  # spans of the first and the last start, relative to the mean of the largest numbers of both signs
NEAR = (-1, 0, 1)  # offsets of the neighbours of an integer that are compared
REPEATS = 2  # number of refinements of the best start
WHOLE = 1 << 20  # maximum number of values that one call quantises


def build_search(form: Form, length: int) -> IRModule:
    """Build the program for rows of this length. Scales and shifts of the form have units."""

    n = DimVar("n", 0, max(1, WHOLE // length))
    x, importance = Var("x", tensor((n, length), DType.F32)), Var("importance", tensor((length,), DType.F32))
    builder = Builder()
    with builder.function(ENTRY, (x, importance)):
        with builder.dataflow():
            found = _Search(builder, form, n, length).run(x, importance)
        builder.returns(found)
    return builder.finish()


@dataclass(frozen=True, slots=True)
class _Pair:
    """Scales and shifts of all groups, and their errors."""

    scale: Var
    shift: Var | None
    error: Var

    @property
    def given(self) -> tuple[Var, ...]:
        return (self.scale,) if self.shift is None else (self.scale, self.shift)


@dataclass(slots=True)
class _Search:
    """The program under construction, for rows of `length` values. `operands` are the weights and the importance of each weight."""

    builder: Builder
    form: Form
    n: DimVar
    length: int
    operands: tuple[Var, ...] = field(default=())

    @property
    def shifted(self) -> bool:
        return self.form.offset is Offset.SHIFT

    @property
    def has_table(self) -> bool:
        return self.form.kind in TABLES

    @property
    def attrs(self) -> dict[str, Any]:
        return {"bits": self.form.bits, "group": self.form.group, "shifted": self.shifted, "kind": str(self.form.kind)}

    def run(self, x: Var, importance: Var) -> Var:
        """Search a scale for each group, and a shift if the form has shifts. Quantise x with them, and return the tuple that the module
        docstring describes."""
        self.operands = x, self.weighed(x, importance)
        best = self.best_of_starts(x)
        steps, scale_units = self.in_units(best.scale)
        if best.shift is None:
            scale, error = self.nearest(steps, scale_units)
            decoded = (self.decoded(scale, scale_units),)
            parts = (scale, scale_units)
        else:
            scale, shift, shift_units, error = self.nearest_pair(best, steps, scale_units)
            decoded = self.decoded(scale, scale_units), self.decoded(shift, shift_units)
            parts = scale, shift, scale_units, shift_units
        q = self.call(ROUND_GROUPS, x, *decoded, **self.attrs)
        return self.builder.emit(MakeTuple((q, *parts, error)))

    def weighed(self, x: Var, importance: Var) -> Var:
        """Return the importance of each element: that of its input, raised for large elements and lowered for small ones. In
        measurements, models that were quantised with these importances predicted a little more like the original models than those that
        were quantised with the importance of the input alone."""
        squares = self.call(MULTIPLY, x, x)
        mean = self.nonzero(self.call(MEAN, squares, axes=1, keepdims=True))
        size = self.call(DIVIDE, self.call(ADD, squares, self.times(mean, 2.0)), self.times(mean, 3.0))
        return self.call(MULTIPLY, self.call(SQRT, size), importance)

    # --- floats --------------------------------------------------------------------------------------------------------

    def best_of_starts(self, x: Var) -> _Pair:
        """Return the best scales and shifts, as floats, that are found from several starts."""

        groups = Dim.of(self.length // self.form.group)
        grouped = self.call(RESHAPE, x, ShapeValue((Dim.of(self.n), groups, Dim.of(self.form.group))))
        low, high = self.call(MIN, grouped, axes=2), self.call(MAX, grouped, axes=2)
        span = self.call(SUBTRACT, high, low) if self.shifted else self.call(MAXIMUM, high, self.call(NEGATIVE, low))
        shift = (self.call(NEGATIVE, low),) if self.shifted else ()
        best: _Pair | None = None
        for scale in self.starts(span):
            found = self.refined(scale, *shift)
            best = found if best is None else self.better(found, best)
        assert best is not None
        for _ in range(REPEATS):
            best = self.better(self.refined(*best.given), best)
        return best

    def starts(self, span: Var) -> Iterator[Var]:
        """Yield the scales from which the search begins. Each scale is the previous scale times a constant factor, so that all starts run
        the same kernels."""
        if self.has_table:
            middle = float(np.abs(TABLES[self.form.kind][[0, -1]].astype(np.float32)).mean())
            (first, last), count, signs = (middle * share for share in TABLE_SHARES), TABLE_STARTS, (1.0, -1.0)
        else:
            least, most = range_of(self.form.bits, self.shifted)
            levels = most - least if self.shifted else -least
            first, last, count, signs = levels - MARGIN, levels + MARGIN, STARTS, (1.0,)
        for sign in signs:
            scale = self.times(span, sign / first)
            yield scale
            for _ in range(count):
                scale = self.times(scale, (first / last) ** (1 / count))
                yield scale

    def refined(self, *given: Var) -> _Pair:
        """Return the scales and shifts that are best, by least squares, for the numbers to which the given scales and shifts round."""
        found = self.call(REFINE_GROUPS, *self.operands, *given, **self.attrs)
        parts = [self.builder.emit(TupleGet(found, i)) for i in range(3 if self.shifted else 2)]
        return _Pair(parts[0], parts[1] if self.shifted else None, parts[-1])

    def better(self, a: _Pair, b: _Pair) -> _Pair:
        """Choose, for each group, the pair with the smaller error. Of equal errors, `b` wins."""
        wins = self.call(LESS, a.error, b.error)
        shift = None if a.shift is None or b.shift is None else self.call(WHERE, wins, a.shift, b.shift)
        return _Pair(self.call(WHERE, wins, a.scale, b.scale), shift, self.call(WHERE, wins, a.error, b.error))

    # --- integers ------------------------------------------------------------------------------------------------------

    def in_units(self, values: Var) -> tuple[Var, Var]:
        """Return the values in units, not rounded, and the units. The largest magnitude among the groups that share a unit is MOST_LEVEL
        units."""
        groups, each = self.length // self.form.group, self.form.per_unit
        parts = self.call(RESHAPE, self.call(ABS, values), ShapeValue((Dim.of(self.n), Dim.of(groups // each), Dim.of(each))))
        top = self.call(MAX, parts, axes=2)
        units = self.times(top, 1.0 / MOST_LEVEL)
        safe = self.call(WHERE, self.call(LESS, ScalarValue(0.0, "f32"), units), units, ScalarValue(1.0, "f32"))
        return self.call(DIVIDE, values, self.per_group(safe)), units

    def per_group(self, units: Var) -> Var:
        """Repeat units so that each group has a unit."""
        groups, each = self.length // self.form.group, self.form.per_unit
        wide = self.call(RESHAPE, units, ShapeValue((Dim.of(self.n), Dim.of(groups // each), Dim.of(1))))
        spread = self.call(BROADCAST_TO, wide, ShapeValue((Dim.of(self.n), Dim.of(groups // each), Dim.of(each))))
        return self.call(RESHAPE, spread, ShapeValue((Dim.of(self.n), Dim.of(groups))))

    def level(self, steps: Var, near: int, least: int) -> Var:
        """Round to integers, add `near`, and limit the result to `least` .. MOST_LEVEL."""
        moved = self.call(ADD, self.call(ROUND, steps), ScalarValue(float(near), "f32")) if near else self.call(ROUND, steps)
        clipped = self.call(CLIP, moved, ScalarValue(float(least), "f32"), ScalarValue(float(MOST_LEVEL), "f32"))
        return self.call(CAST, clipped, dtype="i8")

    def decoded(self, level: Var, units: Var) -> Var:
        """Return integers times their units."""
        return self.call(DEQUANTIZE, level, units, bits=8, group=self.form.per_unit)

    def nearest(self, steps: Var, units: Var) -> tuple[Var, Var]:
        """For a form without shifts, compare the integers next to each scale, and return the best integers with their errors."""
        found: list[tuple[Var, ...]] = []
        for near in NEAR:
            level = self.level(steps, near, -MOST_LEVEL if self.has_table else 0)
            error = self.call(GROUP_ERRORS, *self.operands, self.decoded(level, units), **self.attrs)
            found.append((level, error))
        level, error = self.least(found)
        return level, error

    def nearest_pair(self, best: _Pair, steps: Var, units: Var) -> tuple[Var, Var, Var, Var]:
        """For each integer next to a scale, compare the integers next to the shift that suits this scale. This shift keeps the mean of the
        group: if the scale grows and the numbers stay, the shift grows by the mean of the numbers times the growth of the scale."""
        assert best.shift is not None
        _, shift_units = self.in_units(best.shift)
        x, importance = self.operands
        weight = self.sum_of_groups(importance)
        safe = self.call(WHERE, self.call(LESS, ScalarValue(0.0, "f32"), weight), weight, ScalarValue(1.0, "f32"))
        mean = self.call(DIVIDE, self.sum_of_groups(self.call(MULTIPLY, importance, x)), safe)
        numbers = self.call(DIVIDE, self.call(ADD, mean, best.shift), self.nonzero(best.scale))
        safe_units = self.per_group(self.nonzero(shift_units))
        found: list[tuple[Var, ...]] = []
        for near in NEAR:
            level = self.level(steps, near, 0)
            scale = self.decoded(level, units)
            shift = self.call(SUBTRACT, self.call(MULTIPLY, scale, numbers), mean)
            shift_steps = self.call(DIVIDE, shift, safe_units)
            for beside in NEAR:
                moved = self.level(shift_steps, beside, -MOST_LEVEL)
                error = self.call(GROUP_ERRORS, *self.operands, scale, self.decoded(moved, shift_units), **self.attrs)
                found.append((level, moved, error))
        level, moved, error = self.least(found)
        return level, moved, shift_units, error

    def least(self, found: list[tuple[Var, ...]]) -> tuple[Var, ...]:
        """Choose, for each group, the tuple whose last value, the error, is smallest. Of equal errors, the first wins."""
        best = found[0]
        for other in found[1:]:
            wins = self.call(LESS, other[-1], best[-1])
            best = tuple(self.call(WHERE, wins, a, b) for a, b in zip(other, best, strict=True))
        return best

    # --- helpers -------------------------------------------------------------------------------------------------------

    def sum_of_groups(self, values: Var) -> Var:
        groups = self.length // self.form.group
        grouped = self.call(RESHAPE, values, ShapeValue((Dim.of(self.n), Dim.of(groups), Dim.of(self.form.group))))
        return self.call(SUM, grouped, axes=2)

    def nonzero(self, values: Var) -> Var:
        """Return the values, with 1 in place of those below 1e-30 in magnitude."""
        is_zero = self.call(LESS, self.call(ABS, values), ScalarValue(1e-30, "f32"))
        return self.call(WHERE, is_zero, ScalarValue(1.0, "f32"), values)

    def times(self, values: Var, factor: float) -> Var:
        return self.call(MULTIPLY, values, ScalarValue(factor, "f32"))

    def call(self, op: OpDef, *args: Atom, **attrs: Any) -> Var:
        return self.builder.call(op, *args, **attrs)
