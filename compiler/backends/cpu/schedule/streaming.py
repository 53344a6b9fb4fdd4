"""Write large results with non-temporal stores, because caches would evict them before another kernel reads them."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.idioms.spatial import Axes
from compiler.ir.dims import Dim, DimVar, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Scope
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.statements import Store
from compiler.ir.loops.visit import loads, rewrite_dims
from compiler.ir.loops.write import Kernel, less_equal
from compiler.ir.prove import prove_le, prove_lt
from compiler.machine.intrinsics.stream import LANES, Stream

LARGE = 64 << 20  # minimum size of a large result in bytes: so much space in the caches is more than a process can expect


def is_streamed(axes: Axes, store: Store, width: int) -> Scalar | bool:
    """Return whether to stream vectors along the last axis: the nest writes at least LARGE bytes, and `_whole_vectors` holds. If the number
    of bytes is known only at run time, return the condition as a scalar."""
    size = product_of([extent for _, extent in axes]) * store.buffer.dtype.num_bytes
    if not _whole_vectors(store, axes[-1][0], width) or prove_lt(size, LARGE):
        return False
    return prove_le(LARGE, size) or less_equal(LARGE, size)


def _whole_vectors(store: Store, inner: DimVar, width: int) -> bool:
    """Return whether the nest writes vectors of LANES adjacent f32 elements to a global buffer that it does not read."""
    *outer, last = store.indices
    beside = not any(inner in dim.vars() for dim in (*outer, last - inner))
    fresh = not any(load.buffer is store.buffer for load in loads(store.value))
    return beside and fresh and store.buffer.dtype is DType.F32 and store.buffer.scope is Scope.GLOBAL and width == LANES


def stream(k: Kernel, store: Store, point: Mapping[DimVar, Dim], inner: DimVar, start: Dim) -> None:
    """Emit a non-temporal store of one vector along the nest's innermost axis."""
    with k.scope():
        row = k.local("row", LANES)
        with k.vector(LANES) as lane:
            row[lane] = rewrite_dims(store.value, {**point, inner: start + lane})
        first = tuple(index.substitute({**point, inner: start}) for index in store.indices)
        k.tile(Stream(), Load(store.buffer, first), row[0])
