"""Operators that read the memory of several ranks, which are devices that run the same program together, each on weights of its own.

Operand i of `all_gather`, and table i of `rank_embedding`, is read from the memory of rank i. A program for ranks passes one of its own
values as every operand. No rank reads an operand before all ranks have computed it, and no rank overwrites an operand before all ranks have
read it (`Kernel.ranks` of `runtime/executable.py`). On a CPU, and in the interpreter, all operands are in the same memory.

Nothing is summed over ranks. So every element is computed by one rank in the order in which a single device computes it, and has the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.write import Kernel
from compiler.ir.op import REQUIRED
from compiler.ir.types import TensorType, Type
from compiler.ops.broadcast import output
from compiler.ops.index import clamped_index
from compiler.ops.indices import clamped
from compiler.ops.manipulate import concat_nest, concat_type, part_at
from compiler.ops.operands import agree, int_attr, same_dtype, tensor_operand, unproved, wants_int
from compiler.ops.tables import Nest, Operands, define
from runtime.executable import OWN

Attrs = Mapping[str, Any]

RANKS = "ranks"  # attribute of a loop-level function: for each buffer, the rank in whose memory it is, or OWN


def _attrs(ranks: list[int]) -> dict[str, Any]:
    return {RANKS: [*ranks, OWN]}


def _gather_nest(operands: Operands) -> Nest:
    nest = concat_nest(operands)
    return Nest(nest.outputs, nest.body, checks=nest.checks, attrs=_attrs([*range(len(operands.places))]))


# Concatenate the values of all ranks along an axis.
ALL_GATHER = define("all_gather", "*xs", concat_type, lambda *xs, axis: np.concatenate(xs, axis), _gather_nest, {"axis": REQUIRED})


def _embedding_type(args: tuple[Type, ...], attrs: Attrs) -> Type:
    ids = wants_int(tensor_operand(args, 0, "ids"), "ids")
    tables = [tensor_operand(args, i, f"table {i - 1}", ndim=2, layout="[rows, size]") for i in range(1, len(args))]
    if not tables:
        raise AnnotationError("has no table, expected one per rank")
    dtype, size = same_dtype(tables), int_attr(attrs, "size", 1)
    if size % len(tables):
        raise AnnotationError(f"attribute size is {size}, expected a multiple of the {len(tables)} ranks")
    shapes = [table.shape for table in tables]
    num_columns = next((shape[1] for shape in shapes if shape is not None), None)
    for rank, shape in enumerate(shapes):
        if shape is not None and num_columns is not None:
            agree(Dim.of(size // len(tables)), shape[0], f"the number of rows of table {rank}")
            agree(num_columns, shape[1], f"the number of columns of table {rank}")
    if num_columns is None or ids.shape is None:
        return TensorType(None, dtype, None if ids.ndim is None else ids.ndim + 1)
    return TensorType((*ids.shape, num_columns), dtype)


def _embedding_nest(operands: Operands) -> Nest:
    """Read each row from the rank that has it. Ids outside the vocabulary are clamped."""
    k = Kernel()
    num_ranks, size = len(operands.places) - 1, int_attr(operands.attrs, "size", 1)
    out, ids, *tables = k.arrays(output(operands), *(operands.buffer(i) for i in range(num_ranks + 1)))
    rows = size // num_ranks
    with k.nest(ids.shape) as at:
        row = clamped_index(k, "id", ids[at], Dim.of(size))
        with k.nest((out.shape[-1],)) as (j,):
            parts = [(Dim.of(rank * rows), table[row - rank * rows, j]) for rank, table in enumerate(tables)]
            out[*at, j] = part_at(row, parts, Dim.of(size))
    wanted = {i: (Dim.of(rows), out.shape[-1]) for i in range(1, num_ranks + 1)}
    return Nest((out.buffer,), k.body(), checks=unproved(operands, wanted), attrs=_attrs([OWN, *range(num_ranks)]))


def _embedding_numpy(ids: Any, *tables: Any, size: int) -> Any:
    assert size == sum(len(table) for table in tables), (size, tables)
    return np.concatenate(tables)[ids]


# Look up rows of a table of `size` rows. Each rank has the same number of consecutive rows, in the order of the ranks.
RANK_EMBEDDING = define(
    "rank_embedding",
    "ids, *tables",
    _embedding_type,
    _embedding_numpy,
    _embedding_nest,
    {"size": REQUIRED},
    indices={"ids": clamped("size")},
)
