"""The passes that every back end runs, in order. Each back end adds passes at two places, and provides the schedules of kernels."""

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

# The last pass of each phase.
PHASES: Final[Mapping[str, str]] = {"nests": "fuse", "kernels": "lift_workspace", "memory": "capture"}


def pipeline_of(
    *,
    operators: Iterable[Pass] = (),
    nests: Iterable[Pass] = (),
    schedule: Callable[[PrimFunc], PrimFunc],
    instruments: tuple[Instrument, ...] = (),
) -> Pipeline:
    """Build a pipeline. The back end's passes `operators` rewrite operators, and its passes `nests` rewrite fused loop nests. Then
    `schedule` schedules each nest."""
    return Pipeline(
        (
            check_facts,  # after this pass, every annotation is proved or checked
            *operators,
            # lower operators to loop nests
            legalize,  # after this pass, the program states which operators write in place, which the removal of dead code must know
            eliminate_dead_code,  # for example dequantised weights, which integer products do not read; dead code would prevent fusions
            FoldConstants(),
            share_subexpressions,
            protect_operands,  # after this pass, values that are written in place are neither constants nor shared
            annotate_patterns,
            fuse,
            # the back end's own passes
            *nests,
            eliminate_dead_code,
            lift_weights,  # the functions that prepare weights run on the target or on the host: see `Backend.prepares_weights`
            ScheduleKernels(schedule),
            lift_workspace,
            # memory
            explicit_memory,
            plan_memory,
            capture,
        ),
        instruments,
    )
