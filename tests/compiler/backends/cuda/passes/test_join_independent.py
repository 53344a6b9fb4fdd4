"""Adjacent calls that do not depend on each other become one, if one launch computes both."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.passes.join_independent import JoinIndependent
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.statements import For
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get
from compiler.passes.fusion.fuse import of_weights

assert compiler.ops

GIVEN = "x: f32[t, 40], y: f32[t, 3, 64], slots: i32[t], cache: f32[1, 2, 3, 3, 1024], weight w: f32[40], weight v: f32[64]"


def program(body: str, result: str) -> str:
    return f"func main({GIVEN}) -> object where t in 0..64 {{ dataflow {{ {body} out = {result} }} return out }}"


NORMS = "a = rms_norm(x, w, eps=1e-5, weight_offset=0.0) b = rms_norm(y, v, eps=1e-5, weight_offset=0.0)"


def stages_of(text: str) -> tuple[IRModule, IRModule, IRModule]:
    """Return the program before and after the pass `join_independent`, and scheduled."""
    passes = pipeline(get("sm_80"))
    before, after, scheduled = (passes.until(name)(parse(text)) for name in ("join_rows", "join_independent", "schedule_kernels"))
    return before, after, scheduled


def num_calls(module: IRModule) -> int:
    bindings = (b for block in module.graph("main").body.blocks for b in block.bindings)
    return sum(isinstance(b.value, CallTir) for b in bindings)


def checked(text: str) -> tuple[int, int]:
    """Return the number of calls before and after the pass. The joined program gives the same bits, and so does its schedule."""
    before, after, scheduled = stages_of(text)
    verify(after)
    verify(scheduled)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in ((5, 40), (5, 3, 64))]
    args += [np.array([3, 40, 0, 17, 16], np.int32)] + [rng.standard_normal(s).astype(np.float32) for s in ((1, 2, 3, 3, 1024), 40, 64)]
    expected, found, run = (Interpreter(m).call("main", *(a.copy() for a in args)) for m in (before, after, scheduled))
    for a, b, c in zip(expected, found, run, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)
    return num_calls(before), num_calls(after)


def test_two_norms_of_different_rows_are_one_launch() -> None:
    text = program(NORMS, "(a, b)")
    assert checked(text) == (2, 1)
    (prim,) = (p for p in stages_of(text)[2].prim_functions.values() if p.num_outputs == 2)
    assert prim.attrs["schedule"] == "rows" and isinstance(prim.body, For)


def test_elements_beside_what_is_written_in_place_are_one_launch() -> None:
    before, after = checked(program("a = exp(x) after = kv_append(cache, y, y, slots, 0)", "(a, after)"))
    assert after < before


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("a = rms_norm(x, w, eps=1e-5, weight_offset=0.0) b = softmax(a)", "(a, b)"),
        ("a = softmax(x) b = exp(y)", "(a, b)"),
    ],
    ids=["a result is read", "rows beside elements"],
)
def test_other_calls_stay(body: str, result: str) -> None:
    before, after = checked(program(body, result))
    assert before == after


PRODUCTS = {
    "a product beside a norm": (
        "x: f32[t, 64], y: f32[t, 64], weight w: bf16[64, 64], weight v: f32[64]",
        'a = linear(x, w, tolerates="bf16") b = rms_norm(y, v, eps=1e-5, weight_offset=0.0)',
        ["product", "rows"],
    ),
    "a product before a softmax": (
        "x: f32[t, 64], y: f32[t, 64], weight w: bf16[64, 64]",
        'a = linear(x, w, tolerates="bf16") b = softmax(y)',
        ["product", "rows"],
    ),
    "a product with integers beside a norm": (
        "x: f32[t, 64], y: f32[t, 64], weight q: u8[64, 32], weight s: bf16[64, 2], weight v: f32[64]",
        "w = dequantize(q, s, bits=4, group=32) a = linear(x, w) b = rms_norm(y, v, eps=1e-5, weight_offset=0.0)",
        ["product", "rows"],
    ),
    "two products of f32": (
        "x: f32[t, 64], y: f32[t, 64], weight w: f32[3, 64], weight v: f32[5, 64]",
        "a = linear(x, w) b = linear(y, v)",
        ["float product", "float product"],
    ),
    "a shared expert with a gate": (
        "x: f32[t, 64], y: f32[t, 64], weight w: bf16[64, 64], weight v: f32[1, 64]",
        'a = linear(x, w, tolerates="bf16") g = linear(y, v) h = sigmoid(g) b = multiply(a, h)',
        ["float product", "product"],
    ),
    "a choice of experts beside a norm": (
        "x: f32[t, 64], y: f32[t, 64], weight v: f32[64]",
        "a = top_experts(x, k=3) b = rms_norm(y, v, eps=1e-5, weight_offset=0.0)",
        ["rows", "small rows"],
    ),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", list(PRODUCTS))
def test_calls_with_faster_schedules_keep_them(case: str, target: str) -> None:
    """The schedule of rows could compute these calls, too, but not on tensor cores, in tiles, or in one warp."""
    given, body, schedules = PRODUCTS[case]
    text = f"func main({given}) -> object where t in 0..64 {{ dataflow {{ {body} out = (a, b) }} return out }}"
    module = pipeline(get(target)).until("schedule_kernels")(parse(text))
    prepared = of_weights(module.graph("main"))
    bindings = [b for block in module.graph("main").body.blocks for b in block.bindings if b.var not in prepared]
    found = [module.prim(b.value.func).attrs["schedule"] for b in bindings if isinstance(b.value, CallTir)]
    assert sorted(x for x in found if x != "elements") == schedules


def test_what_is_computed_once_from_weights_stays() -> None:
    before, after, _ = stages_of(program("a = exp(w) b = sin(v)", "(a, b)"))
    assert num_calls(before) == num_calls(after) == 2


def test_a_module_with_one_call_is_the_same_object() -> None:
    module = parse("func main(x: f32[n]) -> object where n in 0..9 { dataflow { y = exp(x) } return y }")
    assert JoinIndependent(lambda _: True)(module) is module
