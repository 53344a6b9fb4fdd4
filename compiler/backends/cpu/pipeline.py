"""The passes of the CPU back end, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from compiler.backends.cpu.passes.integer_products import IntegerProducts
from compiler.backends.cpu.passes.spread_rows import spread_rows
from compiler.backends.cpu.schedule.rules import schedule
from compiler.machine.products import product_tiles
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline
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
from compiler.passes.pack_operands import PackOperands
from compiler.passes.round_operands import round_operands
from compiler.passes.schedule_kernels import ScheduleKernels
from compiler.passes.share_subexpressions import share_subexpressions

# The phases, and the pass with which each ends.
PHASES: Final[Mapping[str, str]] = {"nests": "fuse", "kernels": "lift_workspace", "memory": "capture"}


def pipeline(target: Target, instruments: tuple[Instrument, ...] = ()) -> Pipeline:
    tiles = product_tiles(target)
    return Pipeline(
        (
            check_facts,  # from here on, annotations hold
            *([IntegerProducts(tiles)] if tiles.integers else []),
            *([round_operands] if tiles.pairs else []),
            # from operators to loop nests
            legalize,
            FoldConstants(),
            share_subexpressions,
            protect_operands,  # from here on, values that are written in place are neither constants nor shared
            annotate_patterns,
            fuse,
            # for the machine
            PackOperands(tiles.floats.columns, tiles.pairs),
            *([spread_rows] if tiles.on_matrix_unit else []),
            eliminate_dead_code,
            lift_weights,
            ScheduleKernels(partial(schedule, target=target)),
            lift_workspace,
            # memory
            explicit_memory,
            plan_memory,
            capture,
        ),
        instruments,
    )
