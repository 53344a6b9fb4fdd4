"""Turn a loop nest into a function (outlining). The variables of the nest are renamed. A variable from outside the nest becomes a parameter
unless it is a whole extent of an operand or output. A variable that only the range of another variable mentions becomes a parameter, too.
If the module has an equal function, the call uses that function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.equal import structural_hash
from compiler.ir.graph.atoms import Atom, ScalarValue
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.visit import free_dims, fresh_prim
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType, Type


@dataclass(slots=True)
class Outliner:
    """Adds functions to the module under construction. Equal functions are added only once."""

    builder: Builder
    module: IRModule
    names: dict[str, str] = field(default_factory=dict[str, str])  # digest -> name

    def __post_init__(self) -> None:
        for name, prim in self.module.prim_functions.items():
            self.names.setdefault(_digest(prim), name)

    def call(
        self,
        name: str,
        operands: Sequence[tuple[Buffer | ScalarParam, Atom]],
        outputs: tuple[Buffer, ...],
        body: Stmt,
        *,
        inplace: tuple[int | None, ...] = (),
        attrs: dict[str, Any] | None = None,
    ) -> CallTir:
        """Outline a nest and return the call. `operands` pairs each buffer or scalar that the nest reads with the value that the call
        passes for it. `inplace[i]` is the index of the operand whose memory output `i` reuses, or None; () if no output reuses memory."""
        buffers = [place for place, _ in operands] + list(outputs)
        shaped = {v for b in buffers if isinstance(b, Buffer) for d in b.shape if (v := d.var) is not None}
        mentioned = [v for b in buffers if isinstance(b, Buffer) for d in b.shape for v in d.vars()]
        passed = [v for v in with_ranges([*mentioned, *free_dims(body)]) if v not in shaped]
        kept = dict(attrs or {})
        if any(i is not None for i in inplace):
            kept["inplace"] = [list(pair) for pair in shared_buffers([place for place, _ in operands], inplace)]
        prim = fresh_prim(PrimFunc((*(p for p, _ in operands), *passed, *outputs), len(outputs), body, kept))
        args = (*(a for _, a in operands), *(_value(v) for v in passed))
        out: tuple[Type, ...] = tuple(TensorType(b.shape, b.dtype) for b in outputs)
        return CallTir(self.add(name, prim), args, out, inplace)

    def add(self, name: str, prim: PrimFunc) -> str:
        """Add the function under this name or a similar free name, unless the module has an equal function. Return the name of the function
        that the module has."""
        digest = _digest(prim)
        if digest not in self.names:
            self.names[digest] = self.builder.add(self.builder.fresh_name(name), prim)
        return self.names[digest]


def with_ranges(variables: Sequence[DimVar]) -> list[DimVar]:
    """Return the variables, and the variables that their ranges mention, each once."""
    found = dict.fromkeys(variables)
    pending = list(found)
    while pending:
        upper = pending.pop().upper
        new = [v for v in upper.vars() if v not in found] if isinstance(upper, Dim) else []
        found |= dict.fromkeys(new)
        pending += new
    return list(found)


def shared_buffers(params: Sequence[Buffer | ScalarParam | DimVar], inplace: Sequence[int | None]) -> list[tuple[int, int]]:
    """Return pairs of numbers of buffers that share memory in a call: an operand, and an output. The numbers count buffers only, not other
    parameters. `params` are the parameters of the operands, and `inplace[i]` is the index of the operand whose memory output `i` reuses, or
    None."""
    numbers = [n for n, place in enumerate(params) if isinstance(place, Buffer)]
    return [(numbers.index(i), len(numbers) + o) for o, i in enumerate(inplace) if i is not None]


@lru_cache(maxsize=512)
def _digest(prim: PrimFunc) -> str:
    """Return the digest of a function. It is cached, because most functions pass through most passes unchanged."""
    return structural_hash(IRModule({"": prim}))


def _value(var: DimVar) -> ScalarValue:
    return ScalarValue(Dim.of(var))
