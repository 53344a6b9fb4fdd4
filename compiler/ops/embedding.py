"""Embedding look-up, and rotary position embedding.

Scalings of rotary embeddings, such as YaRN, need no operators of their own: the operand `inv_freq` of `rope_angles` has one inverse
frequency per pair of elements, and the attribute `scale` of this operator multiplies sines and cosines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, cos, guard, sin
from compiler.ir.relations import Relation, at_most
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ops.broadcast import output
from compiler.ops.index import clamped_index
from compiler.ops.indices import Extent, clamped
from compiler.ops.operands import agree, bool_attr, float_attr, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, define

F32 = DType.F32

# --- embedding ---------------------------------------------------------------------------------------------------------


def _embedding_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    table = tensor_operand(args, 0, "table", ndim=2, layout="[vocabulary, size]")
    ids = wants_int(tensor_operand(args, 1, "ids"), "ids")
    if table.shape is None or ids.shape is None:
        return TensorType(None, table.dtype, None if ids.ndim is None else ids.ndim + 1)
    return TensorType((*ids.shape, table.shape[1]), table.dtype)


def _embedding_nest(operands: Operands) -> Nest:
    """Look up the rows of the ids. Ids outside the vocabulary are clamped, so that a bad id cannot read memory outside the table."""
    k = Kernel()
    out, table, ids = k.arrays(output(operands), operands.buffer(0), operands.buffer(1))
    num_rows, size = table.shape
    with k.nest(ids.shape) as at:
        row = clamped_index(k, "id", ids[at], num_rows)
        with k.nest((size,)) as (j,):
            out[*at, j] = table[row, j]
    return Nest((out.buffer,), k.body())


def _embedding_numpy(table: Any, ids: Any) -> Any:
    return table[ids]


EMBEDDING = define("embedding", "table, ids", _embedding_type, _embedding_numpy, _embedding_nest, indices={"ids": clamped(Extent("table"))})


# --- rotary embedding --------------------------------------------------------------------------------------------------


def _angles_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    float_attr(attrs, "scale")
    positions = wants_int(tensor_operand(args, 0, "positions"), "positions")
    inv_freq = tensor_operand(args, 1, "inv_freq", ndim=1, layout="[pairs]")
    if inv_freq.dtype not in (None, F32):
        raise AnnotationError(f"inv_freq holds {inv_freq.dtype}, expected f32")
    if positions.shape is None or inv_freq.shape is None:
        table = TensorType(None, F32, None if positions.ndim is None else positions.ndim + 1)
    else:
        table = TensorType((*positions.shape, inv_freq.shape[0]), F32)
    return TupleType((table, table))


def _angles_nest(operands: Operands) -> Nest:
    k = Kernel()
    positions, inv_freq = k.arrays(operands.buffer(0), operands.buffer(1))
    shape = (*positions.shape, inv_freq.shape[0])
    outputs = Buffer("cos", shape, F32), Buffer("sin", shape, F32)
    for out, function in zip(k.arrays(*outputs), (cos, sin), strict=True):
        with k.nest(shape) as (*at, pair):
            angle = cast(positions[*at], F32) * inv_freq[pair]
            out[*at, pair] = function(angle) * operands.attrs["scale"]
    return Nest(outputs, k.body())


def _angles_numpy(positions: Any, inv_freq: Any, *, scale: float) -> Any:
    angle = positions.astype(np.float32)[..., None] * inv_freq
    return (np.cos(angle) * np.float32(scale)).astype(np.float32), (np.sin(angle) * np.float32(scale)).astype(np.float32)


ROPE_ANGLES = define("rope_angles", "positions, inv_freq", _angles_type, _angles_numpy, _angles_nest, {"scale": 1.0})


def _rope_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    bool_attr(attrs, "interleaved")
    x = wants_float(tensor_operand(args, 0, "x", ndim=3, layout="[tokens, heads, size]"), "x")
    tables = [tensor_operand(args, i, name, ndim=2, layout="[tokens, pairs]") for i, name in ((1, "cos"), (2, "sin"))]
    for name, table in zip(("cos", "sin"), tables, strict=True):
        if table.dtype not in (None, F32):
            raise AnnotationError(f"{name} holds {table.dtype}, expected f32")
        if x.shape is not None and table.shape is not None:
            agree(x.shape[0], table.shape[0], f"the number of tokens of {name}")
    if tables[0].shape is not None and tables[1].shape is not None:
        agree(tables[0].shape[1], tables[1].shape[1], "the number of pairs of sin")
    return x


def _rope_relations(args: tuple[Type, ...], _: Mapping[str, Any]) -> Iterable[Relation]:
    x, cos = args[:2]
    if isinstance(x, TensorType) and isinstance(cos, TensorType) and x.shape is not None and cos.shape is not None:
        yield at_most(cos.shape[1] * 2, x.shape[2], "twice the number of pairs", "the number of elements per head of x")


def _rope_nest(operands: Operands) -> Nest:
    """Rotate each pair (a, b) by its angle to (a * cos - b * sin, b * cos + a * sin). The elements of a pair are `half` apart, or adjacent
    if interleaved. Elements after the pairs are copied unchanged."""
    k = Kernel()
    out, x, cosines, sines = k.arrays(output(operands), *(operands.buffer(i) for i in range(3)))
    half = cosines.shape[1]
    with k.nest(out.shape) as (t, h, j):
        own = cast(x[t, h, j], F32)

        def first(pair: Dim, other: Dim) -> Scalar:
            return own * cosines[t, pair] - cast(x[t, h, other], F32) * sines[t, pair]

        def second(pair: Dim, other: Dim) -> Scalar:
            return own * cosines[t, pair] + cast(x[t, h, other], F32) * sines[t, pair]

        if operands.attrs["interleaved"]:
            odd = guard(1, j % 2, 2, second(j // 2, j - 1), 0.0)
            rotated = guard(0, j, half * 2, guard(0, j % 2, 1, first(j // 2, j + 1), odd), own)
        else:
            upper = guard(half, j, half * 2, second(j - half, j - half), own)
            rotated = guard(0, j, half, first(j, j + half), upper)
        out[t, h, j] = cast(rotated, out.dtype)
    table = (x.shape[0], half)
    return Nest((out.buffer,), k.body(), checks=unproved(operands, {1: table, 2: table}))


def _rope_numpy(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
    half = cos.shape[-1]
    wide = x.astype(np.float32)
    c, s = cos[:, None, :], sin[:, None, :]
    head, tail = wide[..., : 2 * half], wide[..., 2 * half :]
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = np.stack([a * c - b * s, b * c + a * s], -1).reshape(head.shape)
    else:
        a, b = head[..., :half], head[..., half:]
        turned = np.concatenate([a * c - b * s, b * c + a * s], -1)
    return np.concatenate([turned, tail], -1).astype(x.dtype)


ROPE = define("rope", "x, cos, sin", _rope_type, _rope_numpy, _rope_nest, {"interleaved": False}, relations=_rope_relations)
