"""Programs from the figures of the Relax paper: their text after each phase of the pipeline, and the values that they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import compiler.ops
from compiler.backends.cpu.pipeline import pipeline
from compiler.backends.pipeline import PHASES
from compiler.ir.equal import assert_equal
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.types import vars_of
from compiler.ir.verify.module import verify
from compiler.machine.target import get
from deploy.run_program import run_program

assert compiler.ops

FIGURES = sorted((Path(__file__).parents[1] / "golden" / "paper").glob("figure_??.ir"))
DIMS = {"n": 5, "m": 3}


@pytest.mark.parametrize("path", FIGURES, ids=lambda p: p.stem)
def test_figure_after_each_phase(path: Path, golden: Callable[[str, str], None]) -> None:
    whole = pipeline(get("avx512"))  # always this target, so that the text is the same on every machine
    module = parse(path.read_text())
    for phase, last in PHASES.items():
        result = whole.until(last)(module)
        verify(result)
        assert_equal(result, parse(print_module(result)))
        if phase == "memory":  # planning memory changes only graph functions
            result = IRModule(result.graph_functions)
        golden(f"paper/{path.stem}.{phase}.ir", print_module(result))


@pytest.mark.parametrize("path", FIGURES, ids=lambda p: p.stem)
def test_figure_computes_what_it_means(path: Path) -> None:
    module = parse(path.read_text())
    entry = next(iter(module.graph_functions))
    names = {v.name for p in module.graph(entry).params for v in vars_of(p.type)}
    assert run_program(module, entry, {n: DIMS[n] for n in names}, check=True).largest_error < 1e-5
