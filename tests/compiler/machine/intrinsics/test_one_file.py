"""An intrinsic is one class in one file. Parser, verifier, interpreter and code generation need nothing but this class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.interpret.loops import run_prim
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.statements import Tile
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.text.lexer import ParseError
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.tiles import TILE_OPS, Array, Operand, TileOp, from_fields, stated_fields, tile_op
from compiler.ir.verify.module import VerifyError, verify
from compiler.llvm.ssa import Code, vec
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.target import NAMED, Target, host


@tile_op
class Negate(Intrinsic):
    """test_negate(out, x): store in `out` the negatives of the first `lanes` numbers of x."""

    name: ClassVar[str] = "test_negate"
    lanes: int
    twice: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("out", DType.F32, written=True), Operand("x", DType.F32)

    def problems(self) -> Iterator[str]:
        if self.lanes < 1:
            yield f"lanes are {self.lanes}, expected 1 or more"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        arrays[0][: self.lanes] = arrays[1][: self.lanes] * (1 if self.twice else -1)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        out, x = pointers
        kind = vec("float", self.lanes)
        value = code.op(f"load {kind}, ptr {x}, align 4")
        for _ in range(2 if self.twice else 1):
            value = code.op(f"fneg {kind} {value}")
        code.do(f"store {kind} {value}, ptr {out}, align 4")


@tile_op
class Nowhere(Intrinsic):
    name: ClassVar[str] = "test_nowhere"
    needs: ClassVar[Features] = Features(["a feature that no machine has"])

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("out", None, written=True),)


def program(tile: str) -> str:
    return f"prim k(x: f32[20], out y: f32[20]) {{ for parallel p in 2 {{ {tile} }} }}"


NEGATE = 'tile "test_negate"(y[8*p + 1], x[8*p + 1]) {lanes=8}'


@pytest.mark.parametrize(("tile", "sign"), [(NEGATE, -1), (NEGATE.replace("=8", "=8, twice=true"), 1)])
def test_a_class_is_all_that_an_intrinsic_takes(run_native: Callable[..., None], tile: str, sign: int) -> None:
    module = parse(program(tile))
    verify(module)
    assert tile in print_module(module)
    x, meant, found = np.arange(20, dtype=np.float32), np.zeros(20, np.float32), np.zeros(20, np.float32)
    run_prim(module.prim("k"), [x, meant])
    run_native(module.prim("k"), [x, found])
    np.testing.assert_array_equal(meant[1:17], sign * x[1:17])
    assert found.tobytes() == meant.tobytes()


def test_fields_are_checked_where_text_is_read() -> None:
    for text, said in (
        ("{lines=8}", "tile test_negate has no field lines; known: lanes, twice"),
        ("{lanes=true}", "field lanes of tile test_negate is True, expected int"),
        ("{lanes=8, twice=1}", "field twice of tile test_negate is 1, expected bool"),
        ("", "tile test_negate lacks lanes"),
    ):
        with pytest.raises(ParseError, match=said):
            parse(program(NEGATE.replace("{lanes=8}", text)))
    with pytest.raises(ParseError, match='unknown tile intrinsic "test_negat"; similar: test_negate'):
        parse(program('tile "test_negat"(y[0], x[0])'))


def test_the_verifier_and_code_generation_check_what_the_class_says() -> None:
    module = parse(program(NEGATE.replace("=8", "=0")))
    with pytest.raises(VerifyError, match="tile test_negate: lanes are 0, expected 1 or more"):
        verify(module)
    with pytest.raises(CompileError, match="tile test_negate: lanes are 0"):
        emit_kernel("k", module.prim("k"), host())
    with pytest.raises(CompileError, match=f"tile test_nowhere has no instructions on target {host().name}"):
        emit_kernel("k", parse(program('tile "test_nowhere"(y[0])')).prim("k"), host())


SAMPLES = {"int": 32, "bool": True, "str": "iq4", "float": 0.25}


@pytest.mark.parametrize("name", list(TILE_OPS))
def test_every_descriptor_reads_back_from_its_text(name: str) -> None:
    """For every intrinsic, parsing its text gives an equal intrinsic. The names of its operands and dimensions are all different."""
    kind: Any = TILE_OPS[name]
    op: TileOp = kind(**{f.name: SAMPLES[f.type] for f in fields(kind)})
    assert from_fields(name, stated_fields(op)) == op
    called = [*(o.name for o in op.operands), *op.dims]
    assert len(set(called)) == len(called)


@pytest.mark.parametrize("name", [n for n in TILE_OPS if not n.startswith("test_")])
def test_every_intrinsic_runs_somewhere(name: str) -> None:
    kind: Any = TILE_OPS[name]
    op = kind(**{f.name: 8 if f.name == "bits" else SAMPLES[f.type] for f in fields(kind)})
    assert isinstance(op, Intrinsic) and any(op.runs_on(target) for target in NAMED.values())
    assert op.__doc__


def test_tiles_of_a_program_are_descriptors() -> None:
    (tile,) = (s for s in walk_stmts(parse(program(NEGATE)).prim("k").body) if isinstance(s, Tile))
    assert tile.op == Negate(lanes=8)
