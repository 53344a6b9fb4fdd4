"""Softmax, and whatever else sums exp(x - max x): both folds in one walk along the row, block after block.

With the sum behind the maximum, a row waits first for memory alone and then for arithmetic alone. Here the exponentials of a block are
taken while the next block comes from memory for its maximum, and so the next row is not fetched ahead. They are relative to the largest
element so far; where that rises, the sum so far shrinks. Kept exponentials are set right by the last stage, by a factor for each block.
At most MOST factors wait for that, so the blocks of a longer row are larger.

A row of one block has the bits of the separate folds. Elements are compared with the lowest finite number too, which is then subtracted:
a block of -inf alone adds 0, a row of nothing else ends as 0 / 0. A NaN that the maximum loses comes back with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from compiler.backends.cpu.schedule.nests import below, halves, lanes, loop, named, seq, sweep, unroll, when
from compiler.backends.cpu.schedule.pieces import exp_of_difference, larger, local, mul, plus, to_all_lanes
from compiler.backends.cpu.schedule.spatial import SpatialNest, store_at, vectors
from compiler.forms.nest import PerfectNest, allocated
from compiler.forms.rows import PARTS, RowProgram, RowStage
from compiler.forms.same import same_scalar
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Const, DimScalar, Fn, Let, Load, Reduce, ReduceFn, Scalar, Stmt, Store, dtype_of
from compiler.ir.prove import prove_divisible, prove_le
from compiler.ir.visit_loops import loads, map_scalar, rewrite_dims

BLOCK = 512  # elements: from its maximum to its exponentials a block waits in the first cache
MOST = 64  # blocks of a row
LOWEST = Const(float(np.finfo(np.float32).min), DType.F32)
ZERO = Dim.of(0)


@dataclass(frozen=True, slots=True)
class Softmax:
    top: PerfectNest  # max x
    total: RowStage  # of the sum of exp(x - max x)
    last: RowStage

    def row(self, point: list[Dim], width: int, numbers: Mapping[Buffer, Buffer]) -> Stmt:
        buffers = local("most", width), local("top", width), local("change", width), local("sums", PARTS, width), local("tops", MOST)
        length = self.top_fold.axes[0][1].substitute(dict(zip(self.top.vars, point, strict=False)))
        return in_blocks(length, lambda size, full: _Row(self, point, width, numbers, length, size, full, *buffers).body())

    @property
    def top_fold(self) -> Reduce:
        assert isinstance(self.top.store.value, Reduce)
        return self.top.store.value


def match_softmax(program: RowProgram) -> Softmax | None:
    if len(program.stages) != 3 or program.stages[-1].inner is None or program.parts is not None:
        return None
    first, second, last = program.stages
    top, total = first.nest.store, second.nest.store
    match top.value, second.folds:
        case (
            Reduce(fn=ReduceFn.MAX, axes=((axis, length),), value=value),
            (Reduce(fn=ReduceFn.SUM, axes=((other, _),), value=Apply(fn=Fn.EXP, args=(Apply(fn=Fn.SUB, args=(shifted, Load() as by)),))),),
        ):
            names = {**dict(zip(second.nest.vars, map(Dim.of, first.nest.vars), strict=True)), other: Dim.of(axis)}
        case _:
            return None
    if (length.is_const and length.const <= BLOCK) or dtype_of(value) is not DType.F32:
        return None
    largest = by.buffer is top.buffer and by.indices == tuple(map(Dim.of, second.nest.vars))
    inside = {top.buffer, total.buffer} <= set(program.temporaries) and any(s.buffer is total.buffer for s in loads(last.nest.store))
    return Softmax(first.nest, second, last) if largest and inside and same_scalar(value, rewrite_dims(shifted, names)) else None


def in_blocks(length: Dim, body: Callable[[Dim, Dim], Stmt]) -> Stmt:
    """`body(size, number of full blocks)`."""

    def full(size: Dim) -> Stmt:
        return named("full", length // size, length, lambda count: body(size, count))

    if length.is_const or prove_le(length, BLOCK * MOST):
        return full(Dim.of(BLOCK) * dim_max(1, ceil_div(length, BLOCK * MOST)))
    stretch = DimVar("stretch", 1)
    return Let(stretch, DimScalar(dim_max(1, ceil_div(length, BLOCK * MOST))), full(Dim.of(stretch) * BLOCK))


@dataclass(frozen=True, slots=True)
class _Row:
    form: Softmax
    point: list[Dim]
    width: int
    numbers: Mapping[Buffer, Buffer]
    length: Dim
    size: Dim  # of a block
    full: Dim  # blocks
    most: Buffer  # [width]: the largest elements seen
    top: Buffer  # [width]: the largest element of all blocks up to this one, in every lane
    change: Buffer  # [width]: of the sums, as the maximum rises; the factor of a block at the end
    sums: Buffer  # [PARTS, width]
    tops: Buffer  # [MOST]: `top` as it was in each block

    def body(self) -> Stmt:
        clear = lanes(self.width, lambda lane: seq(*(Store(b, (lane,), LOWEST) for b in (self.most, self.top))))
        cleared = unroll("u", PARTS, lambda u: lanes(self.width, lambda lane: Store(self.sums, (u, lane), Const(0.0, DType.F32))))
        begin = sweep(ZERO, dim_min(self.size, self.length), PARTS, self.width, lambda _, lane, index: self.compare(lane, index))
        blocks = loop("b", self.full, self.block)
        local_buffers = (self.most, self.top, self.change, self.sums, self.tops)
        return allocated(local_buffers, seq(clear, cleared, begin, blocks, self.behind(self.rest()), *self.results(), self.last()))

    @property
    def edge(self) -> Dim:
        return self.full * self.size

    def behind(self, rest: Stmt) -> Stmt:
        """What is done with the last elements, fewer than a block."""
        none = self.size.is_const and prove_divisible(self.length, self.size.const)
        return seq() if none else when(below(self.edge, self.length), rest)

    # --- folding -------------------------------------------------------------------------------------------------------

    def block(self, b: Dim) -> Stmt:
        """What comes ahead of the last block has been seen, but for what is behind the blocks."""
        first = b * self.size

        def walk(ahead: Dim) -> Stmt:
            def both(u: Dim, lane: Dim, index: Dim) -> Stmt:
                return seq(self.compare(lane, index - first + ahead), self.add(u, lane, index))

            return sweep(first, first + self.size, PARTS, self.width, both)

        ahead = named("ahead", dim_min(first + self.size, self.length - self.size), self.length, walk)
        return seq(self.settle(first), Store(self.tops, (b,), Load(self.top, (ZERO,))), ahead)

    def rest(self) -> Stmt:
        return seq(self.settle(self.edge), sweep(self.edge, self.length, PARTS, self.width, self.add))

    def settle(self, first: Dim) -> Stmt:
        """Use the largest element so far from element `first` on."""

        def rise(lane: Dim) -> Stmt:
            return Store(self.change, (lane,), exp_of_difference(Load(self.top, (lane,)), Load(self.most, (lane,))))

        def shrink(u: Dim, lane: Dim) -> Stmt:
            return Store(self.sums, (u, lane), mul(Load(self.sums, (u, lane)), Load(self.change, (lane,))))

        shrunk = seq(lanes(self.width, rise), unroll("u", PARTS, lambda u: lanes(self.width, lambda lane: shrink(u, lane))))
        chosen = lanes(self.width, lambda lane: Store(self.top, (lane,), Load(self.most, (lane,))))
        return seq(*to_all_lanes(self.most), when(below(0, first), shrunk), chosen)

    def compare(self, lane: Dim, index: Dim) -> Stmt:
        return Store(self.most, (lane,), larger(Load(self.most, (lane,)), self.element(index)))

    def add(self, u: Dim, lane: Dim, index: Dim) -> Stmt:
        value: Scalar = exp_of_difference(self.element(index), Load(self.top, (lane,)))
        sums, kept = Load(self.sums, (u, lane)), self.form.total.keeps
        if kept is None:
            return Store(self.sums, (u, lane), plus(sums, value))
        place = (*self.point, index)
        return seq(Store(kept, place, value), Store(self.sums, (u, lane), plus(sums, Load(kept, place))))

    def element(self, index: Dim) -> Scalar:
        fold = self.form.top_fold
        return rewrite_dims(fold.value, {**dict(zip(self.form.top.vars, self.point, strict=True)), fold.axes[0][0]: index})

    # --- what follows --------------------------------------------------------------------------------------------------

    def results(self) -> list[Stmt]:
        top, total = self.form.top.store.buffer, self.form.total.nest
        whole = map_scalar(total.store.value, lambda s: Load(self.sums, (ZERO, ZERO)) if isinstance(s, Reduce) else s)
        known = store_at(Store(self.numbers[total.store.buffer], (ZERO,), whole), dict(zip(total.vars, self.point, strict=True)))
        return [Store(self.numbers[top], (ZERO,), Load(self.top, (ZERO,))), *halves(self.sums, Fn.ADD), known]

    def last(self) -> Stmt:
        """From the end on, which is still in the first cache. What was kept behind the blocks is relative to the maximum of the row
        already."""
        nest = self.form.last.nest
        mapping = dict(zip(nest.vars, self.point, strict=False))

        def elements(store: Store, first: Dim, end: Dim) -> Stmt:
            return vectors(SpatialNest(nest.axes, (), store), mapping, first, end, self.width)

        def relative(scalar: Scalar) -> Scalar:
            kept = isinstance(scalar, Load) and scalar.buffer is self.form.total.keeps
            return mul(scalar, Load(self.change, (ZERO,))) if kept else scalar

        def block(b: Dim) -> Stmt:
            if self.form.total.keeps is None:
                return elements(nest.store, b * self.size, b * self.size + self.size)
            factor = exp_of_difference(Load(self.tops, (b,)), Load(self.top, (ZERO,)))
            known = lanes(self.width, lambda lane: Store(self.change, (lane,), factor))
            return seq(known, elements(corrected, b * self.size, b * self.size + self.size))

        corrected = Store(nest.store.buffer, nest.store.indices, map_scalar(nest.store.value, relative))
        return seq(self.behind(elements(nest.store, self.edge, self.length)), loop("b", self.full, lambda b: block(self.full - 1 - b)))
