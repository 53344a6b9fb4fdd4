"""Calls that compute the same short rows one after another become one, if they choose experts."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.passes.join_rows import JoinRows
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.graph.values import CallTir
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops


def program(body: str, result: str = "(e, shares)") -> str:
    given = "x: f32[t, 40], y: f32[s, 40], b: f32[40]"
    return f"func main({given}) -> object where t in 0..64, s in 0..64 {{ dataflow {{ {body} out = {result} }} return out }}"


CHOICE = "e = top_experts(s0, k=3) g = gather(s0, e, axis=1) "
NORMAL = "n = sum(g, axes=[1], keepdims=true) shares = divide(g, n) "
ROUTE = f"s0 = softmax(x) {CHOICE}{NORMAL}"


def stages_of(text: str) -> tuple[IRModule, IRModule]:
    """Return the program before and after the pass `join_rows`."""
    passes = pipeline(get("sm_80"))
    return passes.until("join_branches")(parse(text)), passes.until("join_rows")(parse(text))


def calls(module: IRModule) -> list[str]:
    bindings = (b.value for block in module.graph("main").body.blocks for b in block.bindings)
    return [call.func for call in bindings if isinstance(call, CallTir)]


def checked(text: str) -> tuple[list[str], list[str]]:
    """Return the calls before and after the pass, which must give the same bits."""
    before, after = stages_of(text)
    verify(after)
    rng = np.random.default_rng(0)
    args = [np.round(rng.standard_normal(shape), 1).astype(np.float32) for shape in ((5, 40), (7, 40), (40,))]
    expected, found = (Interpreter(m).call("main", *(a.copy() for a in args)) for m in (before, after))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)
    return calls(before), calls(after)


def test_scores_their_best_and_their_shares_are_one_call() -> None:
    before, after = checked(program(ROUTE))
    assert len(before) >= 4 and after == ["route"]


def test_what_others_read_stays_a_result() -> None:
    """The scores, which a call after the others reads."""
    _, after = checked(program(f"{ROUTE} m = sum(s0, axes=[0])", "(e, shares, m)"))
    assert after[0] == "route" and len(after) == 2


def test_as_many_bindings_as_before_are_another_program() -> None:
    """Three calls with two results are one call, and a binding for each result."""
    _, after = checked(program(f"s0 = sigmoid(x) {CHOICE}", "(e, g)"))
    assert after[-1] == "route" and len(after) <= 2


def test_two_routings_of_equally_many_rows_are_two_calls() -> None:
    second = ROUTE.replace("x)", "z)").replace("s0", "s1").replace("e = ", "f = ").replace(", e,", ", f,")
    second = second.replace("g = ", "h = ").replace("(g", "(h").replace("n = ", "m = ").replace(", n)", ", m)").replace("shares", "parts")
    _, after = checked(program(f"{ROUTE} z = multiply(x, b) {second}", "(e, shares, f, parts)"))
    assert after == ["route", "route_1"]


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("s0 = softmax(x) n = sum(s0, axes=[1], keepdims=true) g = divide(s0, n)", "(s0, g)"),
        ("e = top_experts(x, k=3) f = top_experts(y, k=3)", "(e, f)"),
        ("a = sum(x, axes=[0]) z = add(y, a) e = top_experts(z, k=3)", "(a, e)"),
    ],
    ids=["nothing is chosen", "other rows", "rows of a sum over rows"],
)
def test_other_calls_stay(body: str, result: str) -> None:
    before, after = checked(program(body, result))
    assert before == after


def test_a_module_without_choices_is_the_same_object() -> None:
    module = parse("func main(x: f32[n]) -> object where n in 0..9 { dataflow { y = exp(x) } return y }")
    assert JoinRows(lambda _: True)(module) is module
