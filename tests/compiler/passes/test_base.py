"""Pipelines of passes, and the instruments that run before and after each pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.ir.errors import CompileError
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import VerifyError
from compiler.machine.target import get
from compiler.passes.base import Dump, Pipeline, Timing, Verify, name_of
from compiler.passes.fold_constants import FoldConstants
from compiler.passes.legalize import legalize
from compiler.passes.share_subexpressions import share_subexpressions

PROGRAM = "func main(x: f32[n]) -> object { a = exp(x) b = exp(x) c = add(a, b) return c }"


def test_a_pass_is_named_like_its_file() -> None:
    compiler = Path(__file__).parents[3] / "compiler"
    files = {path.stem for folder in (compiler / "passes", compiler / "backends" / "cpu" / "passes") for path in folder.rglob("*.py")}
    assert {name_of(step) for step in pipeline(get("avx512")).passes} <= files


def test_until_and_only() -> None:
    whole = pipeline(get("aarch64-neon"))
    assert [name_of(p) for p in whole.until("fold_constants").passes] == [
        "check_facts",
        "integer_products",
        "legalize",
        "eliminate_dead_code",
        "fold_constants",
    ]
    assert [name_of(p) for p in whole.only(["share_subexpressions", "legalize"]).passes] == ["share_subexpressions", "legalize"]
    for choose in (whole.until, lambda name: whole.only([name])):
        with pytest.raises(CompileError, match="unknown pass 'nonsense'; known: check_facts, integer_products, "):
            choose("nonsense")


def test_verifying_names_the_pass_that_broke_the_program() -> None:
    def break_it(module: IRModule) -> IRModule:
        main = module.graph("main")
        return module.update({"again": main})

    with pytest.raises(VerifyError, match="after pass break_it: "):
        Pipeline((break_it,), (Verify(),))(parse(PROGRAM))


def test_instruments_see_every_pass(tmp_path: Path) -> None:
    timing, dump = Timing(), Dump(tmp_path)
    Pipeline((legalize, FoldConstants(), share_subexpressions), (timing, dump))(parse(PROGRAM))
    assert list(timing.seconds) == ["legalize", "fold_constants", "share_subexpressions"]
    # A file's number is the position of its pass in the pipeline. Pass 2, constant folding, changed nothing, so it wrote no file.
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["00-start.ir", "01-legalize.ir", "03-share_subexpressions.ir"]
    parse((tmp_path / "03-share_subexpressions.ir").read_text())
