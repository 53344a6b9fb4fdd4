"""What turns ids and positions into vectors: embedding look-up and rotary position embedding.

Every scaling of the rotary embedding is data: it lies in `inv_freq`, one inverse frequency per pair of elements, and in `scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops import Buffer, Fn, Guard, Scalar, Seq, Stmt
from compiler.ir.types import ObjectType, TensorType, TupleType, Type
from compiler.ops.broadcast import output
from compiler.ops.nest import apply, cast, const, fill, index_value, let, load, loops, store
from compiler.ops.tables import Nest, Operands, define

# --- embedding ---------------------------------------------------------------------------------------------------------


def _embedding_type(args: tuple[Type, ...], _: Any) -> Type:
    table, ids = args
    if not isinstance(table, TensorType) or not isinstance(ids, TensorType):
        return ObjectType()
    if ids.dtype is not None and not ids.dtype.is_int:
        raise AnnotationError(f"ids are {ids.dtype}, wants integers")
    if table.shape is None or ids.shape is None:
        return TensorType(None, table.dtype, None if ids.ndim is None else ids.ndim + 1)
    if len(table.shape) != 2:
        raise AnnotationError(f"the table has rank {len(table.shape)}, wants 2: [vocabulary, size]")
    return TensorType((*ids.shape, table.shape[1]), table.dtype)


def _embedding_nest(operands: Operands) -> Nest:
    """Ids outside the vocabulary are clamped to its ends, so that a bad one can never read foreign memory."""
    out, table, ids = output(operands), operands.buffer(0), operands.buffer(1)
    last = table.shape[0] - 1

    def row(*at: Dim) -> Stmt:
        id_ = cast(load(ids, *at), DType.I64)
        clamped = apply(Fn.MIN, apply(Fn.MAX, id_, const(0, DType.I64)), index_value(last))
        return let("id", clamped, lambda r: loops((table.shape[1],), lambda j: store(out, (*at, j), load(table, r, j))), 0, last)

    return Nest((out,), loops(ids.shape, row))


def _embedding_numpy(table: Any, ids: Any) -> Any:
    return table[np.clip(ids, 0, table.shape[0] - 1)]


EMBEDDING = define("embedding", "table, ids", _embedding_type, _embedding_numpy, _embedding_nest)


# --- rotary embedding --------------------------------------------------------------------------------------------------


def _angles_type(args: tuple[Type, ...], _: Any) -> Type:
    positions, inv_freq = args
    if isinstance(positions, TensorType) and isinstance(inv_freq, TensorType) and positions.shape and inv_freq.shape:
        table = TensorType((*positions.shape, inv_freq.shape[0]), DType.F32)
        return TupleType((table, table))
    return TupleType((TensorType(None, DType.F32), TensorType(None, DType.F32)))


def _angles_nest(operands: Operands) -> Nest:
    positions, inv_freq = operands.buffer(0), operands.buffer(1)
    scale = const(operands.attrs["scale"], DType.F32)
    shape = (*positions.shape, inv_freq.shape[0])
    cos, sin = Buffer("cos", shape, DType.F32), Buffer("sin", shape, DType.F32)

    def value(fn: Fn, *ijk: Dim) -> Scalar:
        angle = apply(Fn.MUL, cast(load(positions, *ijk[:-1]), DType.F32), load(inv_freq, ijk[-1]))
        return apply(Fn.MUL, apply(fn, angle), scale)

    stages = (fill(cos, lambda *ijk: value(Fn.COS, *ijk)), fill(sin, lambda *ijk: value(Fn.SIN, *ijk)))
    return Nest((cos, sin), Seq(stages))


def _angles_numpy(positions: Any, inv_freq: Any, *, scale: float) -> Any:
    angle = positions.astype(np.float32)[..., None] * inv_freq
    return (np.cos(angle) * np.float32(scale)).astype(np.float32), (np.sin(angle) * np.float32(scale)).astype(np.float32)


ROPE_ANGLES = define("rope_angles", "positions, inv_freq", _angles_type, _angles_numpy, _angles_nest, {"scale": 1.0})


def _rope_type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    x = args[0]
    if isinstance(x, TensorType) and x.ndim is not None and x.ndim != 3:
        raise AnnotationError(f"x has rank {x.ndim}, wants 3: [tokens, heads, size]")
    return x


def _rope_nest(operands: Operands) -> Nest:
    """Element `j` of a pair half a rotation apart: x[j] * cos - x[j + half] * sin, and x[j] * cos + x[j - half] * sin behind.
    Interleaved: pairs are neighbours. Elements beyond the rotated ones stay."""
    out, x, cos, sin = output(operands), operands.buffer(0), operands.buffer(1), operands.buffer(2)
    half = cos.shape[1]
    interleaved: bool = operands.attrs["interleaved"]

    def wide(t: Dim, h: Dim, j: Dim) -> Scalar:
        return cast(load(x, t, h, j), DType.F32)

    def rotated(t: Dim, h: Dim, j: Dim) -> Scalar:
        if interleaved:
            pair, first, odd = j // 2, j // 2 * 2, j % 2
            own, other = wide(t, h, j), wide(t, h, first + 1 - odd)
            sign = apply(Fn.SUB, apply(Fn.MUL, cast(index_value(odd), DType.F32), const(2.0, DType.F32)), const(1.0, DType.F32))
            turned = apply(Fn.MUL, apply(Fn.MUL, other, sign), load(sin, t, pair))
            return apply(Fn.ADD, apply(Fn.MUL, own, load(cos, t, pair)), turned)
        lower = apply(Fn.SUB, apply(Fn.MUL, wide(t, h, j), load(cos, t, j)), apply(Fn.MUL, wide(t, h, j + half), load(sin, t, j)))
        upper = apply(
            Fn.ADD,
            apply(Fn.MUL, wide(t, h, j), load(cos, t, j - half)),
            apply(Fn.MUL, wide(t, h, j - half), load(sin, t, j - half)),
        )
        return Guard(((Dim.of(0), j, half),), lower, upper)

    def value(t: Dim, h: Dim, j: Dim) -> Scalar:
        inside = Guard(((Dim.of(0), j, half * 2),), rotated(t, h, j), wide(t, h, j))
        return cast(inside, out.dtype)

    return Nest((out,), fill(out, value))


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


ROPE = define("rope", "x, cos, sin", _rope_type, _rope_numpy, _rope_nest, {"interleaved": False})
