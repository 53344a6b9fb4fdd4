"""A captured region ends only before an instruction for which the host needs the result of a launch."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.text.parser import parse
from runtime.errors import ArgumentMismatch, BoundExceeded
from runtime.executable import Call, Executable
from runtime.session import Session

assert compiler.ops


def callees(executable: Executable) -> list[str]:
    return [i.callee for i in executable.meta.functions["main"].instructions if isinstance(i, Call)]


def test_results_need_no_region_of_their_own() -> None:
    """A function whose result is a tuple has only one captured region. The instructions before the region allocate the results, make the
    view `v` of the result `a`, and build the tuple."""
    executable = compile_module(
        parse("""
        func main(x: f32[n, 32], w: f32[32, 32]) -> object where n in 1..8 {
          dataflow {
            a = linear(x, w)
            v = reshape(a, shape[n * 32])
            b = softmax(a)
            c = linear(b, w)
            t = (v, c)
          }
          return t
        }
    """)
    )
    names = callees(executable)
    assert names.count("vm.run_region") == 1 and names[-1] == "vm.run_region"
    assert "vm.reshape" in names and "vm.tuple" in names
    x, w = np.ones((3, 32), np.float32), np.eye(32, dtype=np.float32)
    flat, rows = Session(executable, device_threads=1).call("main", x, w)
    assert flat.shape == (96,) and np.array_equal(flat, x.ravel())
    np.testing.assert_allclose(rows, np.full((3, 32), 1 / 32), rtol=1e-6)


def test_a_routine_of_the_host_ends_a_region() -> None:
    executable = compile_module(
        parse("""
        func main(x: f32[n]) -> object where n in 1..8 {
          dataflow {
            a = exp(x)
            s = sort(a)
            b = exp(s)
          }
          return b
        }
    """)
    )
    assert callees(executable).count("vm.run_region") == 2
    x = np.array([0.5, -1.0, 0.0], np.float32)
    np.testing.assert_allclose(Session(executable, device_threads=1).call("main", x), np.exp(np.sort(np.exp(x))), rtol=1e-5)


@pytest.mark.parametrize("name", ["reshape(x, shape[n * 2, 2])", "match_cast x to f32[n, 4]"])
def test_an_argument_is_not_written_through_another_name_unless_it_may_be(name: str) -> None:
    executable = compile_module(
        parse(f"""
        impure func main(x: f32[n, 4]) -> object where n in 1..8 {{
          y = {name}
          z = call_tir_inplace @bump(y) [0] -> f32[{"n * 2, 2" if "reshape" in name else "n, 4"}]
          return z
        }}
        prim bump(A: f32[r, c], out B: f32[r, c]) attrs {{inplace=[[0, 1]]}} {{ for i in r {{ for j in c {{ B[i, j] = A[i, j] + 1.0 }} }} }}
    """)
    )
    session = Session(executable, device_threads=1)
    x = np.zeros((2, 4), np.float32)
    assert session.call("main", x) is not None and np.array_equal(x, np.ones((2, 4)))
    x.flags.writeable = False
    with pytest.raises(ArgumentMismatch, match="'x' is changed in place, but the array is read-only"):
        session.call("main", x)


def test_a_call_in_place_writes_the_caller_s_array_whatever_it_reads() -> None:
    """The sum that the call adds is not fused into a function with an output of its own."""
    executable = compile_module(
        parse("""
        impure func main(c: f32[n], x: f32[n, 8]) -> f32[n] {
          dataflow { a = call_tir @sums(x) -> f32[n] z = call_tir_inplace @plus(c, a) [0] -> f32[n] }
          return z
        }
        prim sums(X: f32[n, 8], out Y: f32[n]) { for i in n { Y[i] = sum(r in 8) X[i, r] } }
        prim plus(X: f32[n], A: f32[n], out Z: f32[n]) { for i in n { Z[i] = X[i] + A[i] } }
    """)
    )
    session = Session(executable, device_threads=1)
    c = np.ones(4, np.float32)
    assert session.call("main", c, np.ones((4, 8), np.float32)) is not None and np.array_equal(c, np.full(4, 9))


def test_a_call_in_place_that_reduces_parts_of_rows_writes_the_caller_s_array() -> None:
    """The norm before the call is not fused into it."""
    module = parse("""
        impure func main(c: f32[n, 2, 4], x: f32[n, 8], w: f32[8]) -> f32[n, 2, 4] {
          dataflow { a = rms_norm(x, w, eps=1.0e-5) z = call_tir_inplace @plus(c, a) [0] -> f32[n, 2, 4] }
          return z
        }
        prim plus(X: f32[n, 2, 4], A: f32[n, 8], out Z: f32[n, 2, 4]) {
          alloc global S: f32[n, 2] {
            for i in n, g in 2 { S[i, g] = sum(r in 4) A[i, 4*g + r] }
            for i in n, g in 2, r in 4 { Z[i, g, r] = X[i, g, r] + S[i, g] }
          }
        }
    """)
    random = np.random.default_rng(0)
    c, x, w = (random.normal(size=shape).astype(np.float32) for shape in ((3, 2, 4), (3, 8), (8,)))
    expected = Interpreter(module).call("main", c.copy(), x, w)
    found = Session(compile_module(module), device_threads=1).call("main", c, x, w)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(c, found)


REPEATED = """
func main(c: bool[], x: f32[...], z: f32[...]) -> object where v in 1..8 {
  y: object = if c {
    a = match_cast x to f32[v]
    b = concat(a, a, axis=0)
    s = shape_of(b)
    return s
  } else {
    d = match_cast x to f32[v, 2]
    e = concat(d, d, d, axis=0)
    s2 = shape_of(e)
    return s2
  }
  w = match_cast z to f32[v]
  u = concat(w, w, axis=0)
  s3 = shape_of(u)
  r = (y, s3)
  return r
}
"""


@pytest.mark.parametrize("taken", [True, False])
def test_branches_and_the_code_after_them_define_a_variable_anew(taken: bool) -> None:
    """The variable `v` is the length of x in either branch, and the length of z after them."""
    module = parse(REPEATED)
    session = Session(compile_module(module), device_threads=1)
    x, z = np.zeros(3 if taken else (4, 2), np.float32), np.zeros(5, np.float32)
    expected = ((6,) if taken else (12, 2), (10,))
    assert Interpreter(module).call("main", np.asarray(taken), x, z) == expected
    assert session.call("main", np.asarray(taken), x, z) == expected


@pytest.mark.parametrize("taken", [True, False])
def test_each_branch_checks_the_range_of_the_variable_that_it_defines(taken: bool) -> None:
    module = parse(REPEATED)
    session = Session(compile_module(module), device_threads=1)
    x, z = np.zeros(9 if taken else (9, 2), np.float32), np.zeros(5, np.float32)
    with pytest.raises(MismatchError, match="v is 9, outside its declared range"):
        Interpreter(module).call("main", np.asarray(taken), x, z)
    with pytest.raises(BoundExceeded, match="v = 9 is outside its declared range 1 <= v <= 8"):
        session.call("main", np.asarray(taken), x, z)


def test_an_expression_of_a_branch_is_not_computed_elsewhere() -> None:
    """Only the branch divides by `v`. The code after it defines `v` anew, as 0."""
    module = parse("""
        func main(c: bool[], x: f32[...], z: f32[...]) -> object where v in 0..8 {
          y: object = if c {
            a = match_cast x to f32[v]
            b = full(shape[12 // v], 1.0, dtype="f32")
            return b
          } else {
            return x
          }
          w = match_cast z to f32[v]
          u = concat(w, w, axis=0)
          r = (y, u)
          return r
        }
    """)
    session = Session(compile_module(module), device_threads=1)
    x, none = np.zeros(4, np.float32), np.zeros(0, np.float32)
    for taken, given, length in ((True, x, 3), (False, none, 0)):
        for call in (session.call, Interpreter(module).call):
            assert [t.shape for t in call("main", np.asarray(taken), given, none)] == [(length,), (0,)]
    with pytest.raises(BoundExceeded, match="divides by zero"):
        session.call("main", np.asarray(True), none, none)


@pytest.mark.parametrize(
    ("params", "scalar", "given"),
    [
        ("k: scalar[i64, k]", "j = k", (5,)),
        ("k: scalar[i64]", "j = match_cast k to scalar[i64, m]", (5,)),
        ("a: scalar[any]", "j = match_cast a to scalar[f32]", (5.0,)),
        ("t: tuple[scalar[f32], f32[2]]", "j = t.0", ((5.0, np.zeros(2, np.float32)),)),
        ("a: scalar[f32]", "t = (x, a, 5.0) j = t.2", (3.0,)),
        ("c: bool[], a: scalar[f32], b: scalar[f32]", "j = if c { return a } else { return b }", (np.asarray(False), 3.0, 5.0)),
        ("a: scalar[f32]", "j = @same(a)", (5.0,)),
    ],
    ids=["stated", "matched", "of any type", "in a tuple", "literal", "chosen", "returned"],
)
def test_a_scalar_may_come_from_any_instruction(params: str, scalar: str, given: tuple[object, ...]) -> None:
    module = parse(f"""
        func main(x: f32[n], {params}) -> object {{ {scalar} y = multiply(x, j) z = add(y, j) return z }}
        func same(a: scalar[f32]) -> scalar[f32] {{ return a }}
    """)
    x = np.arange(3, dtype=np.float32)
    session = Session(compile_module(module), device_threads=1)
    for _ in range(3):  # later calls may replay an earlier one
        np.testing.assert_array_equal(session.call("main", x, *given), x * 5 + 5)
    np.testing.assert_array_equal(Interpreter(module).call("main", x, *given), x * 5 + 5)


@pytest.mark.parametrize("number", [5, 5.0])
def test_a_scalar_of_unknown_type_becomes_what_the_loop_nest_takes(number: float) -> None:
    module = parse("""
        func main(x: f32[n], a: scalar[any]) -> object { y = call_tir @scaled(x, a) -> f32[n] return y }
        prim scaled(X: f32[n], a: scalar f32, out Y: f32[n]) { for i in n { Y[i] = X[i] * a } }
    """)
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(Session(compile_module(module), device_threads=1).call("main", x, number), x * 5)


SCALED = "prim scaled(X: f32[n], a: scalar TYPE, out Y: f32[n]) { for i in n { Y[i] = X[i] * cast(f32, a) } }"


@pytest.mark.parametrize(
    ("literal", "dtype"), [("5", "f32"), ("5:i32", "f32"), ("5.0", "f16"), ("5", "i32"), ("5:i32", "i64"), ("5", "u8")]
)
def test_a_literal_gets_the_type_of_the_parameter_before_the_program_runs(literal: str, dtype: str) -> None:
    module = parse(f"""
        func main(x: f32[n]) -> object {{
          dataflow {{ a = softmax(x) y = call_tir @scaled(a, {literal}) -> f32[n] z = softmax(y) }}
          return z
        }}
        {SCALED.replace("TYPE", dtype)}
    """)
    executable, x = compile_module(module), np.arange(3, dtype=np.float32)
    assert [c for c in callees(executable) if c in ("vm.match", "vm.run_region")] == ["vm.run_region"]
    np.testing.assert_allclose(Session(executable, device_threads=1).call("main", x), Interpreter(module).call("main", x), rtol=1e-6)


@pytest.mark.parametrize(("literal", "dtype"), [("5.0", "i32"), ("300", "i8"), ("-1", "u32"), ("true", "f32"), ("1", "bool")])
def test_a_literal_that_is_no_number_of_the_type_is_refused(literal: str, dtype: str) -> None:
    module = parse(f"""
        func main(x: f32[n]) -> object {{ y = call_tir @scaled(x, {literal}) -> f32[n] return y }}
        {SCALED.replace("TYPE", dtype)}
    """)
    with pytest.raises(ArgumentMismatch, match=f"call_tir @scaled, a: expected a scalar of type {dtype}"):
        Session(compile_module(module), device_threads=1).call("main", np.zeros(3, np.float32))


def test_a_scalar_is_matched_once() -> None:
    executable = compile_module(
        parse(f"""
        func main(x: f32[n], t: object) -> object {{ a = match_cast t to scalar[f32] y = call_tir @scaled(x, a) -> f32[n] return y }}
        {SCALED.replace("TYPE", "f32")}
    """)
    )
    assert callees(executable).count("vm.match") == 1
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(Session(executable, device_threads=1).call("main", x, 5.0), x * 5)


def test_a_parameter_that_a_routine_of_the_host_writes_must_not_be_read_only() -> None:
    text = """
        func main(x: f32[n], y: f32[n]) -> object where n in 1..8 {
          launch library "sort"(x, y) {axis=0, descending=true}
          return x
        }
    """
    executable = compile_module(parse(text))
    assert [param.written for param in executable.meta.functions["main"].params] == [False, True]
    session, x, y = Session(executable, device_threads=1), np.array([1, 3, 2], np.float32), np.zeros(3, np.float32)
    session.call("main", x, y)
    np.testing.assert_array_equal(y, [3, 2, 1])
    y.flags.writeable = False
    with pytest.raises(ArgumentMismatch, match="parameter 'y' is changed in place, but the array is read-only"):
        session.call("main", x, y)
