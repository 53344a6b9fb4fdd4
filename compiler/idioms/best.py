"""Recognise the stages (statements of a body) that choose the best experts of each token, by comparing them with the stages that the
operator `top_experts` writes. Fusion may have put an expression in place of the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.idioms.nest import PerfectNest, perfect_nest
from compiler.idioms.same import same_scalar
from compiler.ir.dims import Dim, DimVar
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.scalars import Apply, Reduce, Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import rewrite_dims, statements, walk_scalar
from compiler.ir.loops.write import Kernel
from compiler.ops.routing import MOST_CHOICES, write_best


@dataclass(frozen=True, slots=True)
class Best:
    """The stages that choose the best experts of each row by their scores."""

    axes: tuple[tuple[DimVar, Dim], ...]  # the rows, and the experts
    score: Scalar  # an f32, the score of an expert for a row, in terms of the variables of `axes`
    out: Buffer  # [rows, chosen]

    @property
    def chosen(self) -> int:
        return self.out.shape[1].const

    @property
    def num_stages(self) -> int:
        return 3 * self.chosen


def match_best(stages: Sequence[Stmt]) -> Best | None:
    """Match the first of these stages, `Best.num_stages` in number. Return None if they do not choose the best experts."""
    first = perfect_nest(stages[0])
    if first is None or len(first.axes) != 1 or not isinstance(fold := first.store.value, Reduce) or len(fold.axes) != 1:
        return None
    score = _score(fold)
    following = (perfect_nest(s) for s in stages[2 : 3 * MOST_CHOICES])
    last = next((nest for nest in following if nest is not None and len(nest.store.indices) == 2), None)
    if score is None or last is None or not (chosen := last.store.buffer.shape[1]).is_const:
        return None
    found = Best((first.axes[0], fold.axes[0]), score, last.store.buffer)
    if not fold.axes[0][1].is_const or len(stages) < found.num_stages:
        return None
    nests = [nest for s in stages[: found.num_stages] if (nest := perfect_nest(s)) is not None]
    return found if len(nests) == found.num_stages and _are_equal(nests, _written(found, nests, chosen.const)) else None


def _score(fold: Reduce) -> Scalar | None:
    """Return the score that a stage ranks: the scalar that the stage compares with itself, to find NaN. Return None if there is none."""
    found = (s for s in walk_scalar(fold.value) if isinstance(s, Apply) and s.fn is Fn.EQ and s.args[0] is s.args[1])
    return next((s.args[0] for s in found), None)


def _written(found: Best, nests: Sequence[PerfectNest], chosen: int) -> list[PerfectNest]:
    """Return the stages that the operator writes for this score and `chosen` experts, with the buffers of `nests`."""
    k, ((row, _), (expert, count)) = Kernel(), found.axes
    best, picked = ([k.array(n.store.buffer) for n in nests[first : first + chosen]] for first in (0, chosen))
    write_best(k, k.array(found.out), count, lambda t, e: rewrite_dims(found.score, {row: t, expert: e}), best, picked)
    return [nest for s in statements(k.body()) if (nest := perfect_nest(s)) is not None]


def _are_equal(nests: Sequence[PerfectNest], others: Sequence[PerfectNest]) -> bool:
    """Whether the nests compute the same, up to the names of loop variables."""
    for nest, other in zip(nests, others, strict=True):
        names = dict(zip(other.vars, nest.vars, strict=True)) if len(other.vars) == len(nest.vars) else {}
        store, meant = nest.store, other.store
        if [extent for _, extent in nest.axes] != [extent for _, extent in other.axes] or store.buffer is not meant.buffer:
            return False
        if store.indices != tuple(d.substitute(names) for d in meant.indices):
            return False
        if not same_scalar(store.value, rewrite_dims(meant.value, names)):
            return False
    return True
