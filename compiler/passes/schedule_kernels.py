"""Schedule every loop nest for the machine: threads, vectors and register tiles on a CPU; blocks and threads on a GPU.

Before: nests of serial loops. Some nests may be scheduled already: an operator or a programmer wrote them so, or their machine code is kept
(recall_kernels.py). After: every nest is scheduled. A nest that this pass changed carries the name of its schedule as the attribute
`schedule`. Meaning and signature do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule


@dataclass(frozen=True, slots=True)
class ScheduleKernels:
    schedule: Callable[[PrimFunc], PrimFunc]  # the back end's schedule

    def __call__(self, module: IRModule) -> IRModule:
        changed: dict[str, PrimFunc] = {}
        for name, prim in module.prim_functions.items():
            done = self.schedule(prim)
            if done is not prim:
                changed[name] = done
        return module.update(changed) if changed else module
