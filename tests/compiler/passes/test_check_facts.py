"""Facts that annotations state are proved at compile time or checked at run time. The error of a failed check names the place of the
annotation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.frontend.decoder import StepBounds, build_step
from compiler.frontend.registry import load_config
from compiler.frontend.weights import open_safetensors
from compiler.interpret.graph import Interpreter, MismatchError
from compiler.interpret.loops import InterpretError
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.verify.module import verify
from compiler.passes.base import Pass
from compiler.passes.check_facts import check_facts
from runtime.errors import ArgumentMismatch
from runtime.session import Session

GOLDEN = Path(__file__).parents[2] / "golden" / "models"

ADD = "prim add2(A: f32[n], B: f32[n], out C: f32[n]) { for i in n { C[i] = A[i] + B[i] } }"
NEGATE = "prim negate(A: f32[n], out B: f32[n]) { for i in n { B[i] = -A[i] } }"
HALVES = "prim halves(A: f32[n], h: dim, out B: f32[h]) where h in 0..64 by 4 { for i in h { B[i] = A[i] } }"


def f32(*shape: int) -> Any:
    return np.ones(shape, np.float32)


# --- which checks a program gets -----------------------------------------------------------------------------------------


def test_return_checks_what_callers_rely_on(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        "func main(x: f32[n], y: f32[m]) -> f32[m] { return x }",
        'func main(x: f32[n], y: f32[m]) -> f32[m] { r = match_cast x to f32[m] at "return" return r }',
    )


def test_a_call_checks_what_a_function_passed_as_a_value_returns(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        "func main(f: fn(f32[n]) -> f32[n], x: f32[n]) -> f32[n] { y = call f(x) return y }",
        "func main(f: fn(f32[n]) -> f32[n], x: f32[n]) -> f32[n] { y: object = call f(x) z = match_cast y to f32[n] return z }",
    )


def test_call_tir_checks_operands_against_the_loop_nest(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        f"func main(x: f32[n], y: f32[m]) -> object {{ z = call_tir @add2(x, y) -> f32[n] return z }} {ADD}",
        f"""func main(x: f32[n], y: f32[m]) -> object {{
          b = match_cast y to f32[n] at "call_tir @add2, B"
          z = call_tir @add2(x, b) -> f32[n]
          return z
        }} {ADD}""",
    )


def test_call_tir_makes_what_the_loop_nest_says_and_checks_what_the_call_says(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        f"func main(x: f32[n], y: f32[m]) -> f32[m] {{ z = call_tir @negate(x) -> f32[m] return z }} {NEGATE}",
        f"""func main(x: f32[n], y: f32[m]) -> f32[m] {{
          made = call_tir @negate(x) -> f32[n]
          z = match_cast made to f32[m]
          return z
        }} {NEGATE}""",
    )


def test_call_tir_checks_the_ranges_of_the_loop_nest(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        f"func main(x: f32[n]) -> object {{ z = call_tir @halves(x, n) -> f32[n] return z }} {HALVES}",
        f"""func main(x: f32[n]) -> object where h in 0..64 by 4 {{
          h = match_cast dim(n) to scalar[i64, h]
          z = call_tir @halves(x, n) -> f32[n]
          return z
        }} {HALVES}""",
    )


def test_an_operand_of_unknown_extents_is_matched_with_the_loop_nest(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        f"func main(x: f32[ndim=1]) -> object {{ z = call_tir @negate(x) -> f32[8] return z }} {NEGATE}",
        f"""func main(x: f32[ndim=1]) -> object {{
          a = match_cast x to f32[8]
          z = call_tir @negate(a) -> f32[8]
          return z
        }} {NEGATE}""",
    )


def test_an_annotation_that_deduction_does_not_prove_is_checked(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        "func main(x: f32[n], y: f32[m]) -> f32[m] { z: f32[m] = exp(x) return z }",
        "func main(x: f32[n], y: f32[m]) -> f32[m] { e = exp(x) z = match_cast e to f32[m] return z }",
    )


def test_an_extent_that_may_be_negative_is_checked(becomes: Callable[[Pass, str, str], None]) -> None:
    becomes(
        check_facts,
        "func main(x: f32[n]) -> object { z = full(shape[n - 5], 1.0, dtype=f32) return z }",
        """func main(x: f32[n]) -> object {
          ok = match_cast dim(n - 5) to scalar[i64, max(0, n - 5)]
          z = full(shape[n - 5], 1.0, dtype=f32)
          return z
        }""",
    )


@pytest.mark.parametrize(
    "text",
    [
        "func main(x: f32[n]) -> f32[n] { y = exp(x) return y }",
        "func main(s: shape[n], x: f32[n + 2]) -> f32[2 + n] { y: f32[n + 2] = exp(x) return y }",
        "func main(x: f32[n]) -> f32[n] { y = @main(x) return y }",
        f"func main(x: f32[n], y: f32[n]) -> f32[n] {{ z = call_tir @add2(x, y) -> f32[n] return z }} {ADD}",
        f"func f(s: i64[k], x: f32[4*k]) -> object where k in 0..9 {{ y = call_tir @halves(x, dim(4*k)) -> f32[4*k] return y }} {HALVES}",
        "func main(x: f32[n]) -> object where n in 5.. { z = full(shape[n - 5], 1.0, dtype=f32) return z }",
        "func main(s: shape[n], x: f32[n - 5]) -> object { z = exp(x) return z }",
    ],
)
def test_what_is_proved_leaves_no_trace(stays: Callable[[Pass, str], None], text: str) -> None:
    stays(check_facts, text)


def test_a_model_is_proved_completely() -> None:
    folder = GOLDEN / "llama"
    config, source = load_config(folder), open_safetensors(folder)
    dtypes = {name: DType.from_numpy(np.dtype(info.dtype)) for name, info in source.tensors.items()}
    module = build_step(config, dtypes, StepBounds(512, 64, 128), DType.BF16)
    verify(module)
    assert check_facts(module) is module


def test_the_text_of_a_check_names_its_boundary() -> None:
    text = 'match_cast x to f32[m] at "return"'
    assert text in print_module(parse(print_module(check_facts(parse("func main(x: f32[n], y: f32[m]) -> f32[m] { return x }")))))


# --- messages of checks, compiled and interpreted --------------------------------------------------------------------------


REFUSED = [
    (
        """func main(x: f32[n], y: f32[m]) -> object { z = @g(x, y) r = exp(z) return r }
        func g(x: f32[n], y: f32[m]) -> f32[m] { return x }""",
        (f32(2), f32(4096)),
        "g: return: dimension 0: expected m = 4096, got 2",
    ),
    (
        "func main(x: f32[n], y: f32[m]) -> f32[m] { return x }",
        (f32(2), f32(4096)),
        "main: return: dimension 0: expected m = 4096, got 2",
    ),
    (
        "func main(x: f32[n], y: f32[m]) -> object { z: f32[m] = exp(x) r = add(z, y) return r }",
        (f32(2), f32(4096)),
        "main: annotation of 'z': dimension 0: expected m = 4096, got 2",
    ),
    (
        f"func main(x: f32[n], y: f32[m]) -> object {{ z = call_tir @add2(x, y) -> f32[n] return z }} {ADD}",
        (f32(4096), f32(2)),
        "main: call_tir @add2, B: dimension 0: expected n = 4096, got 2",
    ),
    (
        f"func main(x: f32[n], y: f32[m]) -> object {{ z = call_tir @negate(x) -> f32[m] return z }} {NEGATE}",
        (f32(4096), f32(2)),
        "main: call_tir @negate, result 'z': dimension 0: expected m = 2, got 4096",
    ),
    (
        f"func main(x: f32[n]) -> object {{ z = call_tir @halves(x, n) -> f32[n] return z }} {HALVES}",
        (f32(128),),
        "main: call @halves, h: h = 128 is outside its declared range 0 <= h <= 64",
    ),
    (
        f"func main(x: f32[ndim=1]) -> object {{ z = call_tir @negate(x) -> f32[4096] return z }} {NEGATE}",
        (f32(2),),
        "main: call_tir @negate, A: dimension 0: expected 4096, got 2",
    ),
    (
        "func main(x: f32[n]) -> object { z = full(shape[n - 5], 1.0, dtype=f32) y = exp(z) return y }",
        (f32(2),),
        "main: shape of 'z': expected max(0, n - 5) = 0, got -3",
    ),
    (
        """func main(x: f32[n]) -> object { y = @apply(@twice, x) return y }
        func apply(f: fn(f32[n]) -> f32[n], x: f32[n]) -> f32[n] { y = call f(x) z = exp(y) return z }
        func twice(x: f32[n]) -> f32[ndim=1] { y = concat(x, x, axis=0) return y }""",
        (f32(4),),
        "apply: result 'y' of calling 'f': dimension 0: expected n = 4, got 8",
    ),
]


@pytest.mark.parametrize(("text", "args", "message"), REFUSED, ids=[message.partition(": ")[2].split(":")[0] for _, _, message in REFUSED])
def test_a_false_fact_is_refused_by_name(text: str, args: tuple[Any, ...], message: str) -> None:
    module = parse(text)
    verify(module)
    with pytest.raises((MismatchError, InterpretError, ValueError)):
        Interpreter(module).call("main", *args)
    session = Session(compile_module(module), device_threads=1)
    with pytest.raises(ArgumentMismatch) as refused:
        session.call("main", *args)
    assert str(refused.value) == message
