"""The passes of the back ends for CPUs and for WebAssembly. The tiles of the target decide which optional passes run."""

from __future__ import annotations

from functools import partial

from compiler.backends.cpu.passes.any_context import any_context
from compiler.backends.cpu.passes.integer_products import IntegerProducts
from compiler.backends.cpu.passes.interleave_scales import InterleaveScales
from compiler.backends.cpu.passes.spread_rows import spread_rows
from compiler.backends.cpu.schedule.rules import schedule
from compiler.backends.pipeline import pipeline_of
from compiler.ir.numbers import Kind
from compiler.machine.products import product_tiles
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline
from compiler.passes.pack_operands import PackOperands
from compiler.passes.round_operands import RoundOperands


def pipeline(target: Target, instruments: tuple[Instrument, ...] = ()) -> Pipeline:
    """Return the passes that turn operators into scheduled kernels in planned memory. The target is a CPU or WebAssembly. `instruments`
    observe each pass."""
    tiles = product_tiles(target)
    return pipeline_of(
        operators=[
            IntegerProducts(tiles),
            *([RoundOperands(frozenset([Kind.E4M3] if tiles.scaled else []))] if tiles.pairs else []),
        ],
        nests=[
            any_context,
            PackOperands(tiles.floats.shape.columns, tiles.all_pairs, tiles.scaled),
            *([spread_rows] if tiles.on_matrix_unit else []),
            *([InterleaveScales(tiles.scaled_panels)] if tiles.scaled_panels else []),
        ],
        schedule=partial(schedule, target=target),
        instruments=instruments,
    )
