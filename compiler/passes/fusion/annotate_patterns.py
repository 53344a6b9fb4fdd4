"""Classify each loop nest by the kind of its computation. Fusion at the graph level decides by these patterns.

After: every `PrimFunc` carries `pattern` among its attributes. Hand-written nests are analysed like generated ones: their sums of products
become contractions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from compiler.idioms.nest import PerfectNest, product_nest, without_allocations
from compiler.idioms.product import with_products
from compiler.ir.dims import Dim
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Contraction, Fold, GroupedContraction
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import loads, statements, walk_scalar, written_buffers
from compiler.ir.module import IRModule
from compiler.ops.ranks import RANKS


class Pattern(StrEnum):
    """Kinds of computation. Nests of the first kind, ELEMENTWISE, are fused most freely: an elementwise consumer is even fused into a
    reduction, a product or stages as an epilogue. A nest of the last kind, OPAQUE, is never joined into its consumer, but
    `fuse` may first narrow a nest with several results to one of them."""

    ELEMENTWISE = "elementwise"  # computes out[i, j] from elements at [i, j]
    BROADCAST = "broadcast"  # computes out[i, j] from elements whose indices are constants and some of i, j, in this order
    INJECTIVE = "injective"  # computes out[i, j] from elements at any other indices: permuted, sliced, gathered
    REDUCTION = "reduction"  # contains a reduction, but no product of matrices
    PRODUCT = "product"  # contains products of matrices
    STAGED = "staged"  # has several stages; the last one writes each element of the output once
    OPAQUE = "opaque"  # any other nest, such as one with several outputs or one that works in place


def annotate_patterns(module: IRModule) -> IRModule:
    changed = {name: _annotated(prim) for name, prim in module.prim_functions.items() if "pattern" not in prim.attrs}
    return module.update(changed) if changed else module


def _annotated(prim: PrimFunc) -> PrimFunc:
    prim = replace(prim, body=with_products(prim.body))
    return replace(prim, attrs={**prim.attrs, "pattern": str(pattern_of(prim))})


@dataclass(frozen=True, slots=True)
class Staged:
    """The stages of a function that has one output, does not work in place, and reads no memory of other ranks (GPUs). Its last stage
    writes each element of the output once. No stage reads the output, and no earlier stage writes it."""

    temporaries: tuple[Buffer, ...]
    stages: tuple[Stmt, ...]  # the stages before the last
    last: PerfectNest


def staged(prim: PrimFunc) -> Staged | None:
    """Return the stages of the function, or None if it does not have the form that `Staged` describes."""
    if prim.num_outputs != 1 or "inplace" in prim.attrs or RANKS in prim.attrs:
        return None
    temporaries, body = without_allocations(prim.body)
    *before, last = statements(body)
    nest = product_nest(last)
    out = prim.outputs[0]
    if nest is None or nest.store.buffer is not out or not writes_each_once(nest):
        return None
    if any(load.buffer is out for load in loads(body)) or any(out in written_buffers(stage) for stage in before):
        return None
    return Staged(temporaries, tuple(before), nest)


def writes_each_once(nest: PerfectNest) -> bool:
    """Whether the nest writes `out[i, j, ...]` over the whole output, with its loop variables in order as indices."""
    indices = nest.store.indices
    return [d.var for d in indices] == list(nest.vars) and [e for _, e in nest.axes] == list(nest.store.buffer.shape)


def pattern_of(prim: PrimFunc) -> Pattern:
    """Return the kind of a function's computation. Sums of products count as reductions unless they are contractions already."""
    form = staged(prim)
    if form is None:
        return Pattern.OPAQUE
    if form.stages:
        return Pattern.STAGED
    nest = form.last
    folds = [s for s in walk_scalar(nest.store.value) if isinstance(s, Fold)]
    if folds:
        return Pattern.PRODUCT if any(isinstance(s, Contraction | GroupedContraction) for s in folds) else Pattern.REDUCTION
    indices = [load.indices for load in loads(nest.store.value)]
    at = tuple(Dim.of(v) for v in nest.vars)
    if all(i == at for i in indices):
        return Pattern.ELEMENTWISE
    if all(_projection(i, at) for i in indices):
        return Pattern.BROADCAST
    return Pattern.INJECTIVE


def _projection(indices: tuple[Dim, ...], at: tuple[Dim, ...]) -> bool:
    """Whether each index is a constant or a loop variable, and the loop variables are in order, each at most once."""
    places = [at.index(i) for i in indices if not i.is_const and i in at]
    return all(i.is_const or i in at for i in indices) and places == sorted(set(places))
