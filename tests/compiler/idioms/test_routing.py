"""The nests of `top_experts` and `group_rows` are recognised whatever feeds them, and nests that differ from them in one place are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.idioms.best import match_best
from compiler.idioms.grouping import match_grouping
from compiler.idioms.nest import without_allocations
from compiler.idioms.small_rows import match_small_rows
from compiler.idioms.spatial import stages
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Const, Guard, Reduce, Scalar
from compiler.ir.loops.visit import map_scalars
from compiler.ir.text.parser import parse
from compiler.machine.target import get

assert compiler.ops

BEST = "func main(x: f32[t, 40], b: f32[40]) -> object where t in 0..9 {{ dataflow {{ {} }} return y }}"
PLAIN, SHIFTED = "y = top_experts(x, k={})", "z = add(x, b) y = top_experts(z, k={})"
GROUPS = "func main(x: i32[t, 4]) -> object where t in 0..9 { dataflow { y = group_rows(x, count=7) } return y }"


def nest_of(program: str) -> PrimFunc:
    """Return the last loop nest that a program calls, after fusion."""
    module = pipeline(get("sm_80")).until("fuse")(parse(program))
    *_, call = (b.value for b in module.graph("main").body.bindings)
    assert isinstance(call, CallTir)
    return module.prim(call.func)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("form", [PLAIN, SHIFTED], ids=["plain", "with a bias"])
def test_the_choice_of_experts_is_recognised(form: str, k: int) -> None:
    prim = nest_of(BEST.format(form.format(k)))
    found = match_best(stages(without_allocations(prim.body)[1]))
    assert found is not None and found.chosen == k and found.axes[1][1].const == 40
    rows = match_small_rows(prim)
    assert rows is not None and rows.chooses and len(rows.parts) == 1


def test_the_grouping_of_rows_is_recognised() -> None:
    found = match_grouping(nest_of(GROUPS))
    assert found is not None and found.count == 7 and [b.name for b in (found.tokens, found.places)] == ["tokens", "places"]


def changed(prim: PrimFunc, old: Scalar | type[Scalar], number: int) -> PrimFunc:
    """Return the function with one comparison, reduction or number of it changed."""
    seen = 0

    def change(s: Scalar) -> Scalar:
        nonlocal seen
        if not isinstance(s, old if isinstance(old, type) else type(old)):
            return s
        seen += 1
        if seen != number + 1:
            return s
        match s:
            case Reduce(fn=ReduceFn.MAX):
                return replace(s, fn=ReduceFn.MIN)
            case Reduce():
                return replace(s, fn=ReduceFn.MAX)
            case Apply(fn=Fn.LT):
                return replace(s, fn=Fn.LE)
            case Apply(fn=Fn.ADD | Fn.MIN):
                return replace(s, fn=Fn.MAX)
            case Const(value=value, dtype=dtype):
                return Const(2.0 if value == -np.inf else value + 1, dtype)
            case Guard():
                return s.value
            case _:
                return Apply(Fn.NEG, (s,))

    found = replace(prim, body=map_scalars(prim.body, change))
    assert seen > number, "nothing was changed"
    return found


@pytest.mark.parametrize(("kind", "count"), [(Reduce, 6), (Const, 4)])
def test_another_choice_is_not_recognised(kind: type[Scalar], count: int) -> None:
    prim = nest_of(BEST.format(PLAIN.format(3)))
    for number in range(count):
        assert match_best(stages(without_allocations(changed(prim, kind, number).body)[1])) is None, number


@pytest.mark.parametrize(("kind", "count"), [(Const, 2), (Guard, 1)])
def test_another_grouping_is_not_recognised(kind: type[Scalar], count: int) -> None:
    prim = nest_of(GROUPS)
    for number in range(count):
        assert match_grouping(changed(prim, kind, number)) is None, number


@pytest.mark.parametrize("body", ["y = linear(x, w)", "y = sum(x, axes=[0])", "y = softmax(z)", "y = top_experts(z, k=1)"])
def test_other_rows_are_not_small_rows(body: str) -> None:
    """A product, a sum over rows, and long rows."""
    text = f"func main(x: f32[t, 40], w: f32[8, 40], z: f32[t, 4096]) -> object where t in 0..9 {{ dataflow {{ {body} }} return y }}"
    assert match_small_rows(nest_of(text)) is None
