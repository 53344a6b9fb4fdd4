"""A function of the loop level: a kernel and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from compiler.ir.dims import DimVar
from compiler.ir.fields import node
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.loops.statements import Stmt


@node
class PrimFunc:
    """A loop-level function. Parameters are buffers, scalars and integer variables; the last `num_outputs` buffers are outputs, which the
    body fills. If an extent of a buffer is a single variable, the buffer's shape defines it; all other variables must be parameters.
    `attrs` has what operators and passes record about the function, such as its `pattern` and its `schedule`."""

    params: tuple[Buffer | ScalarParam | DimVar, ...]
    num_outputs: int
    body: Stmt
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(p for p in self.params if isinstance(p, Buffer))

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return self.buffers[len(self.buffers) - self.num_outputs :]

    @property
    def dim_vars(self) -> tuple[DimVar, ...]:
        """The variables of the signature, in order: those passed as parameters, then those that shapes define."""
        passed = [p for p in self.params if isinstance(p, DimVar)]
        shaped = [v for b in self.buffers for d in b.shape if (v := d.var) is not None]
        return tuple(dict.fromkeys(passed + shaped))
