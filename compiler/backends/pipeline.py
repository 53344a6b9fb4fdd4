"""The passes of every back end, in the order in which they run, with places for those of its own."""

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

# The phases, and the pass with which each ends.
PHASES: Final[Mapping[str, str]] = {"nests": "fuse", "kernels": "lift_workspace", "memory": "capture"}


def pipeline_of(
    *,
    operators: Iterable[Pass] = (),
    nests: Iterable[Pass] = (),
    schedule: Callable[[PrimFunc], PrimFunc],
    instruments: tuple[Instrument, ...] = (),
) -> Pipeline:
    """`operators` rewrite operators for the machine, and `nests` rewrite fused loop nests, before `schedule` gives these their loops."""
    return Pipeline(
        (
            check_facts,  # from here on, annotations hold
            *operators,
            # from operators to loop nests
            legalize,
            FoldConstants(),
            share_subexpressions,
            protect_operands,  # from here on, values that are written in place are neither constants nor shared
            annotate_patterns,
            fuse,
            # for the machine
            *nests,
            eliminate_dead_code,
            lift_weights,  # compiled for the host where the machine does not prepare weights
            ScheduleKernels(schedule),
            lift_workspace,
            # memory
            explicit_memory,
            plan_memory,
            capture,
        ),
        instruments,
    )
