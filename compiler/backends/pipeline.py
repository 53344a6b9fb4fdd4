"""The passes that every back end runs, in order, with places for the passes of a single back end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from compiler.ir.loops.prim_func import PrimFunc
from compiler.passes.base import Instrument, Pass, Pipeline
from compiler.passes.capture import capture
from compiler.passes.check_facts import check_facts
from compiler.passes.eliminate_dead_code import eliminate_dead_code
from compiler.passes.fold_constants import FoldConstants
from compiler.passes.fusion.annotate_patterns import annotate_patterns
from compiler.passes.fusion.fuse import fuse
from compiler.passes.legalize import legalize
from compiler.passes.lift_weights import lift_weights
from compiler.passes.memory.explicit_memory import explicit_memory
from compiler.passes.memory.lift_workspace import lift_workspace
from compiler.passes.memory.plan_memory import plan_memory
from compiler.passes.memory.protect_operands import protect_operands
from compiler.passes.schedule_kernels import ScheduleKernels
from compiler.passes.share_subexpressions import share_subexpressions

# Each phase, with its last pass.
PHASES: Final[Mapping[str, str]] = {"nests": "fuse", "kernels": "lift_workspace", "memory": "capture"}


def pipeline_of(
    *,
    operators: Iterable[Pass] = (),
    nests: Iterable[Pass] = (),
    schedule: Callable[[PrimFunc], PrimFunc],
    instruments: tuple[Instrument, ...] = (),
) -> Pipeline:
    """Build a pipeline. `operators` rewrite operators for the machine, and `nests` rewrite fused loop nests, before `schedule` schedules
    these."""
    return Pipeline(
        (
            check_facts,  # after this pass, every annotation is proved or checked
            *operators,
            # lower operators to loop nests
            legalize,  # before this pass, nothing tells that an operator writes in place
            eliminate_dead_code,  # a dequantised weight that only integer products read; it would keep its shifts from being fused
            FoldConstants(),
            share_subexpressions,
            protect_operands,  # after this pass, values that are written in place are neither constants nor shared
            annotate_patterns,
            fuse,
            # passes of the back end for its machine
            *nests,
            eliminate_dead_code,
            lift_weights,  # lifted functions run on the host if the machine does not prepare weights
            ScheduleKernels(schedule),
            lift_workspace,
            # memory
            explicit_memory,
            plan_memory,
            capture,
        ),
        instruments,
    )
