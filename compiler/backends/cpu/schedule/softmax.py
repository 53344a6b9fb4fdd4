"""Softmax, and other reductions of exp(x - max x): one loop computes both the maximum and the sum of a row, block by block.

If the loop for the sum came after the loop for the maximum, first memory and then arithmetic would limit the speed. Instead, one loop finds
the maximum of the next block while it computes the exponentials of a block. Since it loads the next block ahead, it does not prefetch the
next row. Exponentials are relative to the largest element so far. When a larger element comes, the sum so far is scaled down. The last
stage writes the elements of the result. If it reads stored exponentials, it corrects them with one factor per block. There is room for MOST
factors, so a row of more than MOST * BLOCK elements has larger blocks.

A row of one block has the same bits as with separate reductions. The maximum is at least the lowest finite number, so that it can be
subtracted: a block of only -inf adds 0, and a row of only -inf gives 0 / 0. Even if the comparison drops a NaN, the sum is NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compiler.backends.cpu.schedule.folds import fold_halves, larger, spread_largest
from compiler.backends.cpu.schedule.spatial import write_vectors
from compiler.idioms.rows import PARTS, RowProgram, RowStage
from compiler.idioms.same import same_scalar
from compiler.idioms.spatial import SpatialNest, write_element
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.scalars import Apply, Const, Load, Reduce, Scalar, dtype_of
from compiler.ir.loops.statements import Store
from compiler.ir.loops.sweep import sweep
from compiler.ir.loops.visit import loads, map_scalar, rewrite_dims
from compiler.ir.loops.write import Array, Kernel, exp, less
from compiler.ir.prove import prove_divisible, prove_le

BLOCK = 512  # elements of a block, which stays in the first-level cache between finding its maximum and its exponentials
MOST = 64  # maximum number of blocks of a row
LOWEST = Const(float(np.finfo(np.float32).min), DType.F32)
ZERO = Dim.of(0)


def is_softmax(program: RowProgram) -> bool:
    """Return whether the stages are a softmax of f32 whose rows may be longer than a block: max x, a number computed from the sum of
    exp(x - max x), and elements computed from this number."""
    if len(program.stages) != 3 or program.parts is not None:
        return False
    first, second, last = program.stages
    if last.inner is None:
        return False
    top, total = first.nest.store, second.nest.store
    match top.value, second.folds:
        case (
            Reduce(fn=ReduceFn.MAX, axes=((axis, length),), value=value),
            (Reduce(fn=ReduceFn.SUM, axes=((other, n),), value=Apply(fn=Fn.EXP, args=(Apply(fn=Fn.SUB, args=(shifted, Load() as by)),))),),
        ):
            names = {**dict(zip(second.nest.vars, map(Dim.of, first.nest.vars), strict=True)), other: Dim.of(axis)}
        case _:
            return False
    if n.substitute(names) != length or last.inner[1] != length:
        return False  # the row that is written must have exactly the elements that are reduced
    if (length.is_const and length.const <= BLOCK) or dtype_of(value) is not DType.F32:
        return False
    largest = by.buffer is top.buffer and by.indices == tuple(map(Dim.of, second.nest.vars))
    inside = {top.buffer, total.buffer} <= set(program.temporaries) and any(s.buffer is total.buffer for s in loads(last.nest.store))
    return largest and inside and same_scalar(value, rewrite_dims(shifted, names))


def write_softmax(k: Kernel, program: RowProgram, point: list[Dim], width: int) -> None:
    """Write one row, whose indices are `point`, with vectors of `width` lanes. In `program`, the numbers of a row are already in local
    buffers."""
    maximum, total, last = program.stages
    fold = maximum.nest.store.value
    assert isinstance(fold, Reduce)
    length = fold.axes[0][1].substitute(dict(zip(maximum.nest.vars, point, strict=True)))
    size, num_full = block_size(k, length)
    row = _Row(
        maximum,
        total,
        last,
        point,
        width,
        length,
        size,
        num_full,
        most=k.local("most", width),
        top=k.local("top", width),
        change=k.local("change", width),
        sums=k.local("sums", PARTS, width),
        tops=k.local("tops", MOST),
    )
    row.write_sums(k)
    row.write_numbers(k)
    row.write_elements(k)


def block_size(k: Kernel, length: Dim) -> tuple[Dim, Dim]:
    """Return the number of elements of a block, and the number of full blocks. A block has BLOCK elements, or a multiple of BLOCK if the
    row would otherwise have more than MOST blocks."""
    times = dim_max(1, ceil_div(length, BLOCK * MOST))
    if not (length.is_const or prove_le(length, BLOCK * MOST)):
        times = k.let("stretch", times, lower=1)
    return times * BLOCK, k.let("full", length // (times * BLOCK), length)


@dataclass(frozen=True, slots=True)
class _Row:
    """The code of one row: its stages, and its arrays in the thread's own memory."""

    maximum: RowStage  # finds the largest element
    total: RowStage  # computes a number from the sum of the exponentials
    last: RowStage  # writes the elements
    point: list[Dim]  # the indices of the row
    width: int  # lanes of a vector
    length: Dim  # number of elements of the row
    size: Dim  # number of elements of a block
    num_full: Dim  # number of full blocks
    most: Array  # [width]: the largest element of each lane so far
    top: Array  # [width]: the largest element of the row up to the current block, in every lane
    change: Array  # [width]: a factor that corrects the sums when the maximum rises; in the last stage, it corrects stored exponentials
    sums: Array  # [PARTS, width]: sums of exponentials
    tops: Array  # [MOST]: the value of `top` in each full block

    @property
    def edge(self) -> Dim:
        """The index of the first element after the full blocks."""
        return self.num_full * self.size

    @property
    def only_full_blocks(self) -> bool:
        """Whether the length of the row is provably a multiple of the size of a block."""
        return self.size.is_const and prove_divisible(self.length, self.size.const)

    # --- the loop over blocks ------------------------------------------------------------------------------------------

    def write_sums(self, k: Kernel) -> None:
        """Compute `top` and `sums` of the row. The loop updates the maximum with the elements of a block while it adds the exponentials of
        the block before."""
        with k.vector(self.width) as lane:
            self.most[lane] = LOWEST
            self.top[lane] = LOWEST
        with k.unroll("u", PARTS) as u, k.vector(self.width) as lane:
            self.sums[u, lane] = 0.0
        for vector in sweep(k, ZERO, dim_min(self.size, self.length), self.width, PARTS):
            with vector.lanes() as (lane, index):
                self.compare(lane, index)
        with k.serial("b", self.num_full) as b:
            first = b * self.size
            self.use_maximum(k, first)
            self.tops[b] = self.top[0]
            ahead = k.let("ahead", dim_min(first + self.size, self.length - self.size), self.length)
            for vector in sweep(k, first, first + self.size, self.width, PARTS):
                with vector.lanes() as (lane, index):
                    self.compare(lane, index - first + ahead)
                    self.add(k, vector.part, lane, index)
        if not self.only_full_blocks:
            with k.when(less(self.edge, self.length)):
                self.use_maximum(k, self.edge)
                for vector in sweep(k, self.edge, self.length, self.width, PARTS):
                    with vector.lanes() as (lane, index):
                        self.add(k, vector.part, lane, index)

    def use_maximum(self, k: Kernel, first: Dim) -> None:
        """Raise `top` to the largest element so far, and rescale the sums. The exponentials of the block at `first` are relative to this
        `top`."""
        spread_largest(k, self.most)
        with k.when(less(0, first)):
            with k.vector(self.width) as lane:
                self.change[lane] = exp(self.top[lane] - self.most[lane])
            with k.unroll("u", PARTS) as u, k.vector(self.width) as lane:
                self.sums[u, lane] = self.sums[u, lane] * self.change[lane]
        with k.vector(self.width) as lane:
            self.top[lane] = self.most[lane]

    def compare(self, lane: Dim, index: Dim) -> None:
        """Raise the maximum of a lane to an element of the row, if the element is larger."""
        self.most[lane] = larger(self.most[lane], self.element(index))

    def add(self, k: Kernel, part: Dim, lane: Dim, index: Dim) -> None:
        """Add the exponential of an element of the row to the sum of a lane, and store the exponential if the last stage reads it. `part`
        is the number of the vector of sums."""
        value: Scalar = exp(self.element(index) - self.top[lane])
        if self.total.stored_in is not None:
            stored, place = k.array(self.total.stored_in), (*self.point, index)
            stored[place] = value
            value = stored[place]
        self.sums[part, lane] += value

    def element(self, index: Dim) -> Scalar:
        """Return element `index` of the row: the value that the first stage reduces to a maximum."""
        fold = self.maximum.nest.store.value
        assert isinstance(fold, Reduce)
        return rewrite_dims(fold.value, {**self.at(self.maximum), fold.axes[0][0]: index})

    def at(self, stage: RowStage) -> Mapping[DimVar, Dim]:
        """Return the values of the loop variables of a stage for this row."""
        return dict(zip(stage.nest.vars, self.point, strict=False))

    # --- the last stage -----------------------------------------------------------------------------------------------

    def write_numbers(self, k: Kernel) -> None:
        """Write the maximum of the row, and the number that the program computes from the sum of its exponentials."""
        k.array(self.maximum.nest.store.buffer)[0] = self.top[0]
        fold_halves(k, self.sums, operator.add)
        store = self.total.nest.store
        value = map_scalar(store.value, lambda s: self.sums[0, 0] if isinstance(s, Reduce) else s)
        write_element(k, Store(store.buffer, store.indices, value), self.at(self.total))

    def write_elements(self, k: Kernel) -> None:
        """Write the elements, the last block first, because the last block is still in the first-level cache. Stored exponentials of
        elements after the full blocks need no correction: they are relative to the maximum of the whole row."""
        nest, stored = self.last.nest, self.total.stored_in

        def write(store: Store, first: Dim, end: Dim) -> None:
            write_vectors(k, SpatialNest(nest.axes, (), store), self.at(self.last), first, end, self.width)

        def corrected(scalar: Scalar) -> Scalar:
            return scalar * self.change[0] if isinstance(scalar, Load) and scalar.buffer is stored else scalar

        if not self.only_full_blocks:
            with k.when(less(self.edge, self.length)):
                write(nest.store, self.edge, self.length)
        with k.serial("b", self.num_full) as b:
            b = self.num_full - 1 - b
            first = b * self.size
            if stored is None:
                write(nest.store, first, first + self.size)
            else:
                with k.vector(self.width) as lane:
                    self.change[lane] = exp(self.tops[b] - self.top[0])
                write(Store(nest.store.buffer, nest.store.indices, map_scalar(nest.store.value, corrected)), first, first + self.size)
