"""Recognise functions that compute short rows in one or several stages, such as the routing of a mixture of experts. A stage reads only its
own row of the buffers that the stages write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.idioms.best import Best, match_best
from compiler.idioms.nest import without_allocations
from compiler.idioms.rows import COMBINE
from compiler.idioms.spatial import SpatialNest, match_spatial, stages
from compiler.ir.dims import Dim, product_of
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Fold, Load, Reduce, Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import loads, walk_scalar

LONGEST = 1024  # maximum number of elements that a part writes or reduces per row
MOST_FOLDED = 64  # maximum number of values that a part reduces for each of several elements

Part = SpatialNest | Best


@dataclass(frozen=True, slots=True)
class SmallRows:
    """The parts of a function that computes short rows. A part is one stage, or the stages that choose the best experts (`Best`)."""

    num_rows: Dim
    parts: tuple[Part, ...]
    kept: tuple[Buffer, ...]  # the buffers that a part writes, and of which later parts read their own row
    inputs: tuple[Buffer, ...]  # the inputs of which several parts read their own row

    @property
    def chooses(self) -> bool:
        """Whether a part chooses the best experts."""
        return any(isinstance(part, Best) for part in self.parts)


def match_small_rows(prim: PrimFunc) -> SmallRows | None:
    """Return the parts of a function that computes short rows. Return None for other functions, and for functions with attributes besides
    `pattern`, such as functions that are scheduled or work in place."""
    if prim.attrs.keys() - {"pattern"}:
        return None
    parts = _parts(stages(without_allocations(prim.body)[1]))
    if parts is None:
        return None
    num_rows, written = parts[0].axes[0][1], [buffer_of(part) for part in parts]
    if any(part.axes[0][1] != num_rows for part in parts) or len(set(written)) < len(written):
        return None
    read = [(part, load) for part in parts for load in _loads(part) if load.buffer in written]
    if any(load.indices[0] != part.axes[0][0].dim for part, load in read):
        return None
    return SmallRows(
        num_rows, tuple(parts), tuple(dict.fromkeys(load.buffer for _, load in read)), _shared_inputs(parts, num_rows, written)
    )


def _shared_inputs(parts: Sequence[Part], num_rows: Dim, written: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Return the inputs of which several parts read their own row, and no part reads another row. Only matrices with a row for each row of
    the parts, and with at most LONGEST columns, are returned."""
    found: dict[Buffer, int] = {}
    for part in parts:
        for buffer in dict.fromkeys(load.buffer for load in _loads(part)):
            rows = {load.indices[:1] for load in _loads(part) if load.buffer is buffer}
            found[buffer] = found.get(buffer, 0) + 1 if rows == {(part.axes[0][0].dim,)} else -len(parts)
    short = [b for b in found if len(b.shape) == 2 and b.shape[0] == num_rows and b.shape[1].is_const and b.shape[1].const <= LONGEST]
    return tuple(b for b in short if found[b] > 1 and b not in written)


def buffer_of(part: Part) -> Buffer:
    """Return the buffer that the part writes."""
    return part.out if isinstance(part, Best) else part.store.buffer


def _parts(stmts: Sequence[Stmt]) -> list[Part] | None:
    """Match all statements as parts, one after another. Return None if a statement belongs to no part, or if a part is too long."""
    found: list[Part] = []
    while stmts:
        part = match_best(stmts) or match_spatial(stmts[0])
        if part is None or not (part.axes[1][1].const <= LONGEST if isinstance(part, Best) else _is_small(part)):
            return None
        found.append(part)
        stmts = stmts[part.num_stages if isinstance(part, Best) else 1 :]
    return found


def _is_small(nest: SpatialNest) -> bool:
    """Whether the nest writes each element of its rows once, unconditionally, and its rows and folds are short. If a nest writes one
    element per row and folds, each fold must combine up to LONGEST values along one axis, and the nest must read no integers. Otherwise, a
    row may have up to LONGEST elements, and each fold may take up to MOST_FOLDED values."""
    (_, *inner), folds = nest.axes, [s for value in _values(nest) for s in walk_scalar(value) if isinstance(s, Fold)]
    if nest.cond is not None or nest.store.indices != tuple(var.dim for var, _ in nest.axes):
        return False
    extents = [extent for _, extent in inner] + [extent for f in folds for _, extent in f.axes]
    if not all(extent.is_const for extent in extents) or not all(isinstance(f, Reduce) for f in folds):
        return False
    num_elements, folded = product_of([e for _, e in inner]).const, [product_of([e for _, e in f.axes]).const for f in folds]
    if num_elements == 1 and folds:
        one_by_one = all(isinstance(f, Reduce) and f.fn in COMBINE and len(f.axes) == 1 for f in folds)
        return one_by_one and not nest.lets and all(n <= LONGEST for n in folded)
    return num_elements <= LONGEST and all(n <= MOST_FOLDED for n in folded)


def _values(part: Part) -> list[Scalar]:
    return [part.score] if isinstance(part, Best) else [*(value for _, value in part.lets), part.store.value]


def _loads(part: Part) -> list[Load]:
    return [load for value in _values(part) for load in loads(value)]
