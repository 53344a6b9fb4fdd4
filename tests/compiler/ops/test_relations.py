"""Item B.7: an operator refuses sizes that violate a relation on which its lowering relies, during compilation or at run time, and so does
the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.errors import AnnotationError
from compiler.ir.text.lexer import ParseError
from compiler.ir.text.parser import parse
from runtime.errors import ArgumentMismatch
from runtime.session import Session

F32, I32 = np.float32, np.int32


def zeros(*shape: int, dtype: Any = F32) -> Any:
    return np.zeros(shape, dtype)


CASES = {
    "attention: 6 query heads over 4": (
        "func main(q: f32[1, h, 2, 4], k: f32[1, g, 3, 4], v: f32[1, g, 3, 4]) -> object { y = attention(q, k, v, scale=1.0) return y }",
        (zeros(1, 6, 2, 4), zeros(1, 4, 3, 4), zeros(1, 4, 3, 4)),
    ),
    "attention: 3 query heads over 4": (
        "func main(q: f32[1, h, 2, 4], k: f32[1, g, 3, 4], v: f32[1, g, 3, 4]) -> object { y = attention(q, k, v, scale=1.0) return y }",
        (zeros(1, 3, 2, 4), zeros(1, 4, 3, 4), zeros(1, 4, 3, 4)),
    ),
    "ragged_attention: bias of even width": (
        "func main(q: f32[2, 1, 4], t: i32[2], s: i32[2], b: f32[1, w]) -> object "
        "{ y = ragged_attention(q, q, q, t, s, b, scale=1.0) return y }",
        (zeros(2, 1, 4), zeros(2, dtype=I32), np.array([0, 2], I32), zeros(1, 4)),
    ),
    "top_experts: k beyond the experts": ("func main(x: f32[3, e]) -> object { y = top_experts(x, k=4) return y }", (zeros(3, 2),)),
    "top_k: k beyond the extent (B.9)": ("func main(x: f32[n]) -> object { y = top_k(x, k=4) return y }", (zeros(2),)),
    "pad: a negative width (B.9)": (
        "func main(x: f32[n], s: shape[p]) -> object { y = pad(x, before=[dim(p - 2)], after=[0]) return y }",
        (zeros(4), (1,)),
    ),
    "dequantize: too few groups (B.9)": (
        "func main(q: i8[2, 8], s: f32[2, g]) -> object { y = dequantize(q, s, group=2) return y }",
        (zeros(2, 8, dtype=np.int8), zeros(2, 2)),
    ),
    "argmax: no elements": ("func main(x: f32[n]) -> object { y = argmax(x, axis=0) return y }", (zeros(0),)),
}


@pytest.mark.parametrize("case", CASES)
def test_b7_a_violated_relation_is_refused_by_name_in_compiled_code_and_in_the_interpreter(case: str) -> None:
    text, inputs = CASES[case]
    module = parse(text)
    name = case.split(":")[0]
    with pytest.raises(MismatchError, match=name):
        Interpreter(module).call("main", *inputs)
    session = Session(compile_module(module), device_threads=1)
    with pytest.raises(ArgumentMismatch, match=name):
        session.call("main", *inputs)
    session.close()


def test_b7_a_relation_that_is_proved_false_is_refused_during_compilation() -> None:
    with pytest.raises(ParseError, match="number of heads of q is 6, expected a multiple of 4"):
        parse("func main(q: f32[1, 6, 2, 4], k: f32[1, 4, 3, 4]) -> object { y = attention(q, k, k, scale=1.0) return y }")


def test_b9_a_library_call_without_its_attributes_is_refused_by_name() -> None:
    module = parse('func main(x: f32[4]) -> object { y = call_library "sort"(x) {descending=true} -> f32[4] return y }')
    with pytest.raises(AnnotationError, match="sort needs the attribute axis"):
        compile_module(module)
    with pytest.raises(AnnotationError, match="sort needs the attribute axis"):
        Interpreter(module).call("main", zeros(4))
