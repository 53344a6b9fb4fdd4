"""Find the kernels whose machine code is kept from an earlier compilation, so that they need not be scheduled, emitted and compiled.

Before: nests that `schedule_kernels` has not scheduled yet. After: every nest carries the key of its code as the attribute `kept`. A nest
whose code was found carries `schedule` too, so that it is not scheduled, and it allocates the workspace that its code uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from compiler.codegen.kept import KeptCode, key_of_kernel
from compiler.idioms.nest import allocated
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Seq
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_function
from compiler.machine.target import Target

KEPT: Final = "kept"


@dataclass(frozen=True, slots=True)
class RecallKernels:
    kept: KeptCode
    target: Target

    def __call__(self, module: IRModule) -> IRModule:
        return module.update({name: self._recalled(prim) for name, prim in module.prim_functions.items()})

    def _recalled(self, prim: PrimFunc) -> PrimFunc:
        key = key_of_kernel(prim, self.target)
        found = self.kept.recall(key)
        if found is None:
            return replace(prim, attrs={**prim.attrs, KEPT: key})
        # inside a sequence, so that `lift_workspace` lifts the workspace and leaves the temporaries of the nest alone
        body = allocated(_workspace(prim, found.signature), Seq((prim.body,)))
        return replace(prim, body=body, attrs={**prim.attrs, "schedule": KEPT, KEPT: key})


def signature_of(prim: PrimFunc) -> str:
    """Return the parameters of a kernel after `lift_workspace` as text, or "" if it has no workspace."""
    return print_function("kernel", replace(prim, body=Seq(()), attrs={})) if prim.attrs.get("num_workspaces") else ""


def _workspace(prim: PrimFunc, signature: str) -> list[Buffer]:
    """Return the workspace that a signature states, with the variables of `prim`."""
    if not signature:
        return []
    stated = parse(signature).prim("kernel")
    known = dict(zip(stated.dim_vars, prim.dim_vars, strict=True))
    workspace = [p for p in stated.params[len(prim.params) :] if isinstance(p, Buffer)]
    return [replace(buffer, shape=tuple(d.substitute(known) for d in buffer.shape)) for buffer in workspace]
