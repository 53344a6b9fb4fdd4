"""Give every loop nest its loops for the machine: threads, vectors, register tiles.

Before: nests as mathematics. After: every `PrimFunc` carries `schedule` among its attributes. Meaning and signature stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.backends.cpu.schedule.rules import schedule
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.machine.target import Target


@dataclass(frozen=True, slots=True)
class ScheduleKernels:
    target: Target

    def __call__(self, module: IRModule) -> IRModule:
        changed: dict[str, PrimFunc] = {}
        for name, prim in module.prim_functions.items():
            done = schedule(prim, self.target)
            if done is not prim:
                changed[name] = done
        return module.update(changed) if changed else module
