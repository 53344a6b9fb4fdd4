"""An operator refuses sizes that violate a relation on which its lowering relies, during compilation or at run time, and so does the
interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.errors import AnnotationError
from compiler.ir.text.lexer import ParseError
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.passes.base import Verify
from runtime.errors import ArgumentMismatch, RuntimeFault
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
    "attention: a mask of no keys": (
        "func main(q: f32[1, 1, 2, 4], k: f32[1, 1, 1, 4], m: f32[a, b]) -> object { y = attention(q, k, k, m, scale=1.0) return y }",
        (zeros(1, 1, 2, 4), zeros(1, 1, 1, 4), zeros(2, 0)),
    ),
    "attention: a mask of more queries": (
        "func main(q: f32[1, 1, 1, 4], k: f32[1, 1, 3, 4], m: f32[a, b]) -> object { y = attention(q, k, k, m, scale=1.0) return y }",
        (zeros(1, 1, 1, 4), zeros(1, 1, 3, 4), zeros(2, 3)),
    ),
    "state_scan: starts of fewer sequences": (
        "func main(p: f32[1, 2, 4], q: f32[t, 1, 2], v: f32[t, 1, 2], d: f32[t, 1], s: i32[a], b: i32[b], m: i32[c]) -> object "
        "{ y = state_scan(p, q, q, v, d, s, b, m, m, 0) return y }",
        (zeros(1, 2, 4), zeros(3, 1, 2), zeros(3, 1, 2), zeros(3, 1), zeros(2, dtype=I32), zeros(2, dtype=I32), zeros(0, dtype=I32)),
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


def both(text: str, *inputs: Any) -> tuple[Any, Any]:
    """Return the results of the interpreter and of compiled code. Every pass is verified."""
    module = parse(text)
    verify(module)
    session = Session(compile_module(module, Options(instruments=(Verify(),))), device_threads=1)
    compiled = session.call("main", *inputs)
    session.close()
    return Interpreter(module).call("main", *inputs), compiled


@pytest.mark.parametrize("p", [0, 1, 2, 9])
def test_a_negative_symbolic_begin_of_a_slice_is_clamped(p: int) -> None:
    text = "func main(x: f32[n], s: shape[p]) -> object { y = slice(x, axis=0, begin=dim(p - 2), end=dim(p + 1)) return y }"
    x = np.arange(6, dtype=F32)
    wanted = x[max(p - 2, 0) : p + 1]
    for found in both(text, x, (p,)):
        np.testing.assert_array_equal(found, wanted)


def test_a_tensor_too_large_for_any_address_space_is_refused_by_name() -> None:
    with pytest.raises(ParseError, match=r"arange\(\): the result i64\[\d+\] has \d+ bytes, expected at most"):
        parse("func main() -> object { y = arange(stop=9223372036854775807) return y }")
    module = parse("func main(s: shape[p]) -> object { y = arange(stop=dim(p)) return y }")
    with pytest.raises(MismatchError, match=r"arange\(\): the result .* bytes"):
        Interpreter(module).call("main", (1 << 60,))
    session = Session(compile_module(module), device_threads=1)
    with pytest.raises(RuntimeFault, match="does not fit 64 bits where p = 1152921504606846976"):
        session.call("main", (1 << 60,))
    session.close()


@pytest.mark.parametrize("body", ['y = full(shape[n, m], 1.0, dtype="f32")', "y = reshape(x, shape[n, m])"])
def test_a_tensor_without_elements_has_extents_that_fit_64_bits_together(body: str) -> None:
    module, x = parse(f"func main(x: f32[a], s: shape[n, m]) -> object {{ {body} return y }}"), zeros(0)
    session = Session(compile_module(module), device_threads=1)
    assert session.call("main", x, (0, 1 << 40)).shape == (0, 1 << 40)
    with pytest.raises(MismatchError, match="too large together"):
        Interpreter(module).call("main", x, (0, 1 << 62))
    with pytest.raises(RuntimeFault, match=r"too large together|cannot be reshaped"):
        session.call("main", x, (0, 1 << 62))
    session.close()


def test_b9_an_in_place_write_to_a_constant_writes_to_a_copy() -> None:
    text = """impure func main(i: i64[1], u: f32[1]) -> object {
      y = scatter_inplace(const f32[3] [1.0, 2.0, 3.0], i, u, axis=0) return y
    }"""
    for found in both(text, zeros(1, dtype=np.int64), np.full(1, 9, F32)):
        np.testing.assert_array_equal(found, [9, 2, 3])


@pytest.mark.parametrize(
    ("other", "difference"),
    [('z = cast(x, dtype="f16")', "element types"), ("z = (x, x)", "kinds"), ("z = sum(x, axes=[0])", "ranks")],
)
def test_b9_branches_of_different_types_are_refused_during_compilation(other: str, difference: str) -> None:
    text = f"func main(c: bool[], x: f32[n]) -> f32[n] {{ y = if c {{ return x }} else {{ {other} return z }} return y }}"
    with pytest.raises(ParseError, match=f"y: the branches give .*, whose {difference} differ"):
        parse(text)
    with pytest.raises(AnnotationError, match=r"'y': annotated .*, but the second branch gives"):
        compile_module(parse(text.replace("y =", "y: f32[n] =")))
    assert len(both(text.replace("y =", "y: object =").replace("-> f32[n]", "-> object"), np.array(True), zeros(3))) == 2


def test_b9_a_library_routine_is_called_with_the_operands_that_the_program_writes() -> None:
    text = 'func main(x: f32[4]) -> object { y = call_library "unique"(x) -> f32[4] return y }'
    with pytest.raises(AnnotationError, match="the extents of the result of unique depend on data"):
        compile_module(parse(text))


def test_b9_an_object_that_is_no_tensor_is_refused_by_name() -> None:
    module = parse("func main(x: object) -> object { y = unique(x) return y }")
    with pytest.raises(MismatchError, match=r"unique\(shape"):
        Interpreter(module).call("main", (3, 2))
    session = Session(compile_module(module), device_threads=1)
    with pytest.raises(ArgumentMismatch, match="unique 'y', operand 0: expected an array"):
        session.call("main", (3, 2))
    session.close()
