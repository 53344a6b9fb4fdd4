"""Fixed valid calls of every operator with index operands, at sizes that need whole vectors and several pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.module import IRModule
from compiler.ir.op import OPS
from compiler.ir.types import ScalarType
from compiler.ops.tables import INDICES, OPERANDS
from runtime.sampling import SHARE_ONE, Number, Setting
from tests.compiler.ops.conftest import operand, program
from tests.compiler.ops.hostile.indices import hostile
from tests.compiler.ops.test_compiled import CASES as COMPILED

RNG = np.random.default_rng(5)
ROWS, VOCAB = 4, 130
PAGED = "t 4 {0}, 2 2 p 2 {1}, s m, t, t"


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    op: str
    values: tuple[Any, ...]
    shapes: str | None = None  # the symbolic extents of the tensors, as `operand` takes them
    attrs: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rounds(self) -> bool:
        """Whether the compiled program rounds queries and weights to integers, as it does for a cache of integers."""
        return self.op == "paged_attention" and self.values[1].dtype == np.int8

    def module(self) -> IRModule:
        """Return a program of this call. An index that is a number becomes a parameter of the program."""
        given = [s.strip() for s in self.shapes.split(",")] if self.shapes else []
        dims, atoms = dict[str, DimVar](), list[Atom]()
        further = (f"further{i}" for i in range(len(self.values)))  # further operands, if the last name of OPERANDS stands for several
        for name, value in zip((*OPERANDS[self.op], *further), self.values, strict=False):
            shape = given.pop(0) if isinstance(value, np.ndarray) and given else None
            is_index = isinstance(value, int) and name in INDICES.get(self.op, {})
            atoms.append(Var(name, ScalarType(DType.I64)) if is_index else operand(value, shape, dims, name))
        return program(OPS[self.op], atoms, self.attrs)

    def hostile(self, seed: int) -> tuple[Any, ...]:
        """Return the operands with bad indices."""
        return hostile(self.op, self.values, self.attrs, np.random.default_rng([seed, crc32(self.op.encode())]))

    def arguments(self, seed: int) -> tuple[Any, ...]:
        """Return the arguments of the program, with bad indices."""
        return tuple(value for value in self.hostile(seed) if isinstance(value, np.ndarray | int))


def compiled(op: str) -> Case:
    """Return the case of this operator in `test_compiled.py`."""
    values, shapes, attrs = COMPILED[op]
    return Case(op, values, shapes, dict(attrs))


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(np.float32).astype(dtype)


def ints(*values: Any) -> Any:
    return np.array(values, np.int32)


def sampling() -> Iterator[Case]:
    numbers, settings = np.zeros((ROWS, len(Number)), np.float32), np.zeros((ROWS, len(Setting)), np.int64)
    numbers[:] = [1.0, np.inf, 1.1, 0.1, 0.2]
    settings[:] = [7, 3, 0, 0, SHARE_ONE, SHARE_ONE, 1, 3, 0]
    lists = [ints(0, 1, 2, 4, 4), ints(5, 9, 0, 129), floats(4)]
    seen = [ints(0, 2, 2, 3, 4), ints(5, 9, 0, 129), ints(0, 1, 2, 3)]
    masks = RNG.integers(-(2**31), 2**31, (2, 5), dtype=np.int64).astype(np.int32)
    yield Case("sample", (floats(ROWS, VOCAB), ints(3, 0, 1, 2), numbers, settings, *lists, *seen, masks))
    yield Case("token_logprobs", (floats(ROWS, VOCAB), ints(3, 0, 1, 2), ints(0, 129, 7, 8), ints(0, 20, 3, 1)))


def sequences() -> Iterator[Case]:
    tokens, ids, starts = 19, np.repeat(ints(0, 1, 2), [5, 2, 12]), ints(0, 5, 7, 19)
    q = floats(tokens, 3, 8)
    yield Case("ragged_attention", (q, q, q, ids, starts), "t 3 8, t 3 8, t 3 8, t, n", {"scale": 0.4})
    for name in ("ragged_mean", "ragged_max"):
        yield Case(name, (floats(tokens, 6), starts), "t 6, n")
    x, before = floats(tokens, 5), floats(3, 2, 5)
    yield Case("causal_conv", (x, floats(3, 5), before, ids, starts), "t 5, 3 5, s 2 5, t, u")
    yield Case("input_tails", (x, before, ids, starts, ints(4, 6, 18)), "t 5, s 2 5, t, u, m")


def paged() -> Iterator[Case]:
    tables, seq_ids = RNG.permutation(12).reshape(2, 6).astype(np.int32), np.repeat(ints(0, 1), [1, 18])
    positions = np.concatenate([ints(90), np.arange(60, 78, dtype=np.int32)])
    for dtype in (np.float32, ml_dtypes.bfloat16):
        of = floats(19, 4, 64, dtype=dtype), floats(2, 2, 12, 2, 1024, dtype=dtype), tables, seq_ids, positions, 1
        yield Case("paged_attention", of, PAGED.format(64, 1024), {"scale": 0.1, "window": 40})
    bytes_ = RNG.integers(-127, 128, (2, 2, 12, 2, 1024)).astype(np.int8)
    scales = np.abs(floats(2, 2, 12, 2, 16)) / 100
    of = floats(19, 4, 64), bytes_, tables, seq_ids, positions, 1, scales
    yield Case("paged_attention", of, PAGED.format(64, 1024) + ", 2 2 p 2 16", {"scale": 0.1})
    new = floats(3, 2, 64), floats(3, 2, 64)
    yield Case("kv_append", (bytes_, *new, ints(3, 190, 16), 1, scales), "2 2 p 2 1024, t 2 64, t 2 64, t, 2 2 p 2 16")


def _named(cases: list[Case]) -> dict[str, Case]:
    """Name each case after its operator, and number the cases of each operator."""
    earlier = [[c.op for c in cases[:i]] for i in range(len(cases))]
    return {f"{case.op}:{ops.count(case.op)}": case for case, ops in zip(cases, earlier, strict=True)}


CASES = _named([*sampling(), *sequences(), *paged(), *(compiled(op) for op in COMPILED if op in INDICES)])
