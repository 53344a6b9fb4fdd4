"""The interpreter of graph functions and loop nests gives the expected results for programs written by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter, MismatchError
from compiler.interpret.loops import InterpretError, run_prim
from compiler.ir.dims import Dim, UnboundDimError
from compiler.ir.dtypes import DType
from compiler.ir.graph.function import Function
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.tiles import Operand, TileOp, tile_op
from compiler.ops.elementwise import numpy_cast
from runtime.errors import ArgumentMismatch
from runtime.session import Session

F32 = np.float32


def interpret(text: str, *args: object, entry: str = "main") -> object:
    return Interpreter(parse(text)).call(entry, *args)


def run(text: str, *args: object) -> None:
    """Run the only loop nest of the text."""
    (prim,) = parse(text).prim_functions.values()
    run_prim(prim, args)


# --- graph functions: branches, calls, shapes --------------------------------------------------------------------------


BRANCH = """
func main(x: f32[n], flag: scalar[bool]) -> f32[n] {
  y = if flag { a = add(x, 1.0)  return a } else { b = multiply(x, 2.0)  return b }
  return y
}
"""


def test_branches():
    x = np.array([1, 5], F32)
    np.testing.assert_array_equal(interpret(BRANCH, x, True), [2, 6])
    np.testing.assert_array_equal(interpret(BRANCH, x, np.bool_(False)), [2, 10])


def test_functions_and_tuples():
    text = """
    func half(x: f32[m]) -> f32[m] { y = divide(x, 2.0)  return y }
    func main(x: f32[n]) -> tuple[f32[n], f32[n]] {
      f = @half
      a = call f(x)
      b = @half(a)
      t = (a, b)
      c = t.1
      u = (c, x)
      return u
    }
    """
    found = interpret(text, np.array([8], F32))
    assert isinstance(found, tuple)
    np.testing.assert_array_equal(found[0], [2])
    np.testing.assert_array_equal(found[1], [8])


def test_dimensions_are_values():
    text = """
    func main(x: f32[n, m]) -> i64[2] {
      s = shape[n * m, n - m]
      y = shape_to_tensor(s)
      return y
    }
    """
    np.testing.assert_array_equal(interpret(text, np.zeros((3, 2), F32)), [6, 1])


def test_match_cast_defines_and_checks():
    text = """
    func main(x: i32[n]) -> i32[ndim=1] {
      u = unique(x)
      v = match_cast u to i32[k]
      w = match_cast v to i32[n - 1]
      return w
    }
    """
    np.testing.assert_array_equal(interpret(text, np.array([4, 2, 4], np.int32)), [2, 4])
    with pytest.raises(MismatchError, match=r"match_cast: dimension 0 is 1, expected n - 1 = 2"):
        interpret(text, np.array([4, 4, 4], np.int32))


# --- graph functions: checks of arguments ------------------------------------------------------------------------------


def test_parameters_are_checked():
    text = "func main(x: f32[n, 2 * n], s: shape[k], m: scalar[i64, k]) -> f32[n, 2 * n] where n in 1..4 { return x }"
    good = np.zeros((2, 4), F32)
    assert interpret(text, good, (7,), 7) is good
    wrong = [
        ("dimension 1 is 5, expected 2\\*n = 4", (np.zeros((2, 5), F32), (7,), 7)),
        ("element type is float64, expected f32", (np.zeros((2, 4)), (7,), 7)),
        ("rank is 1, expected 2", (np.zeros(2, F32), (7,), 7)),
        ("parameter 0 \\(x\\): expected a tensor, got int", (3, (7,), 7)),
        ("expected a shape of 1 dimensions", (good, (7, 8), 7)),
        ("parameter 1 \\(s\\): an entry is a int 9223372036854775808, expected a 64-bit integer", (good, (2**63,), 7)),
        ("the value is 6, expected k = 7", (good, (7,), 6)),
        ("expected a scalar, got ndarray", (good, (7,), np.zeros(1, np.int64))),
        ("n is 5, outside its declared range 1..4", (np.zeros((5, 10), F32), (7,), 7)),
        ("takes 3 arguments; it is called with 1", (good,)),
    ]
    for message, args in wrong:
        with pytest.raises(MismatchError, match=message):
            interpret(text, *args)


SCALARS = 'func main(s: scalar[{dtype}], d: shape[n]) -> object {{ y = full(shape[1], s, dtype="f32") return y }}'


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("i64", 1.5, "expected a scalar of type i64, got a float 1.5"),
        ("i64", float("nan"), "expected a scalar of type i64, got a float nan"),
        ("i64", 1 << 63, "expected a scalar of type i64, got a int 9223372036854775808"),
        ("i64", True, "expected a scalar of type i64, got a bool True"),
        ("i8", 128, "expected a scalar of type i8, got a int 128"),
        ("f32", True, "expected a scalar of type f32, got a bool True"),
        pytest.param("f32", 10**5000, "expected a scalar of type f32, got a int of 16610 bits", id="long"),
        ("i64", "1", "expected a scalar, got str"),
    ],
)
def test_a_number_of_another_type_is_refused(dtype: str, value: object, message: str) -> None:
    """The virtual machine refuses it, too."""
    with pytest.raises(MismatchError, match=re.escape(message)):
        interpret(SCALARS.format(dtype=dtype), value, (1,))
    session = Session(compile_module(parse(SCALARS.format(dtype=dtype))), device_threads=1)
    with pytest.raises(ArgumentMismatch):
        session.call("main", value, (1,))
    session.close()


@pytest.mark.parametrize("entry", [2.0, "a", None, 1 << 63, np.int64(2)])
def test_a_shape_of_other_values_is_refused(entry: object) -> None:
    with pytest.raises(MismatchError, match=r"parameter 1 .*, expected a 64-bit integer"):
        interpret(SCALARS.format(dtype="i64"), 1, (entry,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('x: f32[n], v: f32[m]) -> object { y = full(shape[n // m], 0.0, dtype="f32")', "n // m divides by zero"),
        ("x: f32[n], v: f32[m], z: f32[n % m]) -> object { y = add(z, 1.0)", "main: parameter 2 (z): dimension 0: n % m divides by zero"),
        ("x: f32[n], v: f32[m]) -> object { y = slice(x, axis=0, begin=dim(n // m))", "n // m divides by zero"),
        ("x: f32[n]) -> object { y = uniform(shape[1], dim(n*9223372036854775807))", "does not fit 64 bits"),
    ],
)
def test_a_dimension_without_a_value_is_refused_by_name(text: str, message: str) -> None:
    given = [np.zeros(n, F32) for n in (4, 0, 0)][: text.count("f32[")]
    with pytest.raises(MismatchError, match=re.escape(message)):
        interpret(f"func main({text} return y }}", *given)


def test_a_later_parameter_may_define_what_an_earlier_one_mentions():
    text = "func main(x: f32[2 * n], s: shape[n]) -> f32[2 * n] { return x }"
    assert np.shape(interpret(text, np.zeros(6, F32), (3,))) == (6,)
    with pytest.raises(MismatchError, match="dimension 0 is 5, expected 2\\*n = 6"):
        interpret(text, np.zeros(5, F32), (3,))


def test_divisibility_is_a_promise():
    text = "func main(x: f32[n]) -> f32[n] where n in 0.. by 4 { return x }"
    interpret(text, np.zeros(8, F32))
    with pytest.raises(MismatchError, match=r"n is 6, outside its declared range 0\.\. by 4"):
        interpret(text, np.zeros(6, F32))


# --- graph functions: calls of loop nests and libraries ----------------------------------------------------------------


KERNEL = """
prim twice(a: f32[n], out b: f32[n]) { for i in n { b[i] = a[i] * 2.0 } }
prim bump(out a: f32[n]) { for i in n { a[i] = a[i] + 1.0 } }
"""


def test_calls_of_loop_nests_make_their_outputs():
    text = KERNEL + "func main(x: f32[n]) -> f32[n] { y = call_tir @twice(x) -> f32[n]  return y }"
    x = np.array([1, 2], F32)
    np.testing.assert_array_equal(interpret(text, x), [2, 4])
    np.testing.assert_array_equal(x, [1, 2])


def test_launches_write_into_memory_that_exists():
    text = KERNEL + "func main(x: f32[n]) -> f32[n] { y = alloc f32[n]  launch @twice(x, y)  return y }"
    np.testing.assert_array_equal(interpret(text, np.array([1, 2], F32)), [2, 4])


def test_memory_that_nobody_wrote_is_nan():
    text = "func main(x: f32[n]) -> f32[n] { y = alloc f32[n]  return y }"
    assert np.isnan(np.asarray(interpret(text, np.zeros(3, F32)))).all()


def test_library_routines_are_those_of_the_machine():
    called = """
    func main(x: f32[n]) -> f32[n] {
      y = call_library "sort"(x) {axis=0, descending=true} -> f32[n]
      return y
    }
    """
    launched = """
    func main(x: f32[n]) -> f32[n] {
      y = alloc f32[n]
      launch library "sort"(x, y) {axis=0, descending=true}
      return y
    }
    """
    for text in (called, launched):
        np.testing.assert_array_equal(interpret(text, np.array([1, 3, 2], F32)), [3, 2, 1])


def test_attributes_may_be_dimensions():
    text = """
    func main(x: f32[n, m]) -> f32[n, m - 1] {
      t = call_library "topk"(x) {k=dim(m - 1), axis=1, largest=true} -> (f32[n, m - 1], i64[n, m - 1])
      y = t.0
      return y
    }
    """
    np.testing.assert_array_equal(interpret(text, np.array([[1, 3, 2]], F32)), [[3, 2]])


# --- loop nests --------------------------------------------------------------------------------------------------------


TABLE = np.array([[1, 2], [3, 4], [5, 6]], F32)


def test_loops_that_carry_run_in_order():
    out = np.zeros(4, F32)
    run("prim f(x: f32[n], out y: f32[n]) { for i in n { y[i] = x[i] + (guard(1 <= i < n ? y[i - 1] : 0.0)) } }", np.ones(4, F32), out)
    np.testing.assert_array_equal(out, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("indices", "expected"),
    [("[i, j]", [[1, 2], [3, 4], [5, 6]]), ("[0, j]", [[9, 12], [0, 0], [0, 0]]), ("[0, 0]", [[21, 0], [0, 0], [0, 0]])],
)
def test_what_an_iteration_adds_to_is_kept_by_all_that_follow(indices: str, expected: list[list[int]]) -> None:
    """If several iterations add to an element, the element gets the sum of all. In the three cases, each iteration adds to its own element,
    all rows of a column add to one element, or all iterations add to one element."""
    out = np.zeros((3, 2), F32)
    run(f"prim f(x: f32[n, 2], out y: f32[n, 2]) {{ for i in n, j in 2 {{ y{indices} = y{indices} + x[i, j] }} }}", TABLE, out)
    np.testing.assert_array_equal(out, expected)


def test_of_several_stores_the_last_stays():
    out = np.zeros(1, np.int64)
    run("prim f(out y: i64[1]) { for i in 3, j in 4 { y[0] = dim(10 * i + j) } }", out)
    assert out[0] == 23


def test_ragged_extents():
    text = """
    prim f(lengths: i64[n], x: f32[n, m], out y: f32[n]) {
      for i in n { let k within 0..m = lengths[i] { y[i] = sum(r in k) x[i, r] } }
    }
    """
    out = np.zeros(3, F32)
    run(text, np.array([0, 2, 3]), np.arange(9, dtype=F32).reshape(3, 3), out)
    np.testing.assert_array_equal(out, [0, 7, 21])
    with pytest.raises(InterpretError, match=r"variable k is 4, outside its declared range 0\.\.m"):
        run(text, np.array([0, 2, 4]), np.ones((3, 3), F32), out)


def test_a_range_is_checked_at_active_points_only() -> None:
    """The first row has no elements, so the range 1..k has no number there. The error names the number of the second row."""
    text = """
    prim f(lengths: i64[n], at: i64[n, m], out y: i64[n, m]) {
      for i in n { let k within 0..m = lengths[i] { for j in k { let p within 1..k = at[i, j] { y[i, j] = dim(p) } } } }
    }
    """
    out = np.zeros((2, 3), np.int64)
    run(text, np.array([0, 2]), np.array([[9, 9, 9], [1, 2, 9]]), out)
    np.testing.assert_array_equal(out, [[0, 0, 0], [1, 2, 0]])
    with pytest.raises(InterpretError, match=r"variable p is 3, outside its declared range 1\.\.k"):
        run(text, np.array([0, 2]), np.array([[9, 9, 9], [1, 3, 9]]), out)


def test_a_division_by_zero_at_one_point_is_an_error() -> None:
    out = np.zeros((2, 3), np.int64)
    for op in ("//", "%"):
        text = f"prim f(out y: i64[n, m]) {{ for i in n, j in m {{ y[i, j] = guard(1 <= j < m ? dim((6 * i + 5) {op} j) : 7:i64) }} }}"
        run(text, out)
        values = [[7, 5, 2], [7, 11, 5]] if op == "//" else [[7, 0, 1], [7, 0, 1]]
        np.testing.assert_array_equal(out, values)
        with pytest.raises(InterpretError, match="a dimension is divided by j, which is 0"):
            run(text.replace("1 <= j", "0 <= j"), out)


def test_a_loop_of_no_iterations_computes_nothing():
    """A loop without iterations evaluates nothing, not even loop-invariant indices, which would be out of bounds."""
    body = "for i in n, j in k { let p within 0..n - 1 = cast(i64, I[j]) { B[i, j] = A[p] } }"
    empty, indices = np.zeros(0, np.float32), np.array([0, 1], np.int32)
    run(f"prim f(A: f32[n], I: i32[k], out B: f32[n, k]) {{ {body} }}", empty, indices, empty.reshape(0, 2))


def test_reductions_over_several_axes_are_row_major():
    out = np.zeros(2, np.int64)
    x = np.array([[[1, 2, 9], [9, 0, 1]], [[0, 1, 2], [3, 9, 9]]], F32)
    run("prim f(x: f32[n, 2, 3], out y: i64[n]) { for i in n { y[i] = argmax(r in 2, q in 3) x[i, r, q] } }", x, out)
    np.testing.assert_array_equal(out, [2, 4])


def test_a_contraction_is_the_sum_of_the_products() -> None:
    x, w, out = np.arange(6, dtype=F32).reshape(2, 3), np.arange(12, dtype=F32).reshape(4, 3), np.zeros((2, 4), F32)
    text = "for i in n, j in 4 { y[i, j] = (contract(r in 3) x[i, r] by w[j, r]) + 1.0 }"
    run(f"prim f(x: f32[n, 3], w: f32[4, 3], out y: f32[n, 4]) {{ {text} }}", x, w, out)
    np.testing.assert_array_equal(out, x @ w.T + 1)


@pytest.mark.parametrize("is_fine", [False, True])
def test_a_grouped_contraction_scales_the_exact_sums_of_its_groups(is_fine: bool) -> None:
    """A grouped contraction sums integers exactly within each group, and multiplies the sums by the groups' scales. Rows have two planes:
    the first is multiplied by 256, and the second is added only in rows that are marked as fine. The terms of the groups are added too."""
    rng = np.random.default_rng(3)
    q, w = rng.integers(-9, 9, (2, 6)).astype(np.int32), rng.integers(-9, 9, (4, 6)).astype(np.int32)
    scale, fine, out = np.asarray([0.5, 2], F32), np.asarray([is_fine]), np.zeros(4, F32)
    dots = ", ".join(f"contract(r in 3) q[{plane}, 3*g + r] by w[j, 3*g + r]" for plane in range(2))
    value = f"contract_groups(g in 2) [{dots}] from [5:i32, 7:i32] when fine[0] by scale[g] beside scale[g] * scale[g]"
    params = "q: i32[2, 6], w: i32[4, 6], scale: f32[2], fine: bool[1], out y: f32[4]"
    run(f"prim f({params}) {{ for j in 4 {{ y[j] = {value} }} }}", q, w, scale, fine, out)
    sums = np.einsum("pgk,jgk->pgj", q.reshape(2, 2, 3), w.reshape(4, 2, 3)) + np.asarray([5, 7])[:, None, None]
    np.testing.assert_array_equal(out, ((256 * sums[0] + is_fine * sums[1]) * scale[:, None]).sum(0) + 4.25)


def test_a_reduction_counts_points_that_its_value_does_not_mention():
    out = np.zeros(1, F32)
    run("prim f(out y: f32[1]) { for i in 1 { y[i] = sum(r in 5, q in 2) 1.0 } }", out)
    np.testing.assert_array_equal(out, [10])


@pytest.mark.parametrize("fn, empty", [("sum", 0), ("prod", 1), ("max", -np.inf), ("min", np.inf)])
def test_a_reduction_over_nothing(fn, empty):
    out = np.zeros(2, F32)
    run(f"prim f(x: f32[n, m], out y: f32[n]) {{ for i in n {{ y[i] = {fn}(r in m) x[i, r] }} }}", np.zeros((2, 0), F32), out)
    np.testing.assert_array_equal(out, [empty, empty])


def test_branches_of_statements():
    text = "prim f(x: f32[n], out y: f32[n]) { for i in n { when x[i] < 0.0 { y[i] = 0.0 } else { y[i] = x[i] } } }"
    out = np.zeros(3, F32)
    run(text, np.array([-1, 2, -3], F32), out)
    np.testing.assert_array_equal(out, [0, 2, 0])


def test_lanes_work_side_by_side():
    text = """
    prim f(x: f32[n], out y: f32[n]) {
      for i in n // 4 {
        alloc local acc: f32[4] {
          for vector l in 4 { acc[l] = x[i * 4 + l] }
          for vector l in 4 { when dim(l) < dim(3) { y[i * 4 + l] = acc[l] * acc[l + 1] } }
        }
      }
    }
    """
    out = np.zeros(8, F32)
    run(text, np.arange(8, dtype=F32), out)
    np.testing.assert_array_equal(out, [0, 2, 6, 0, 20, 30, 42, 0])


@pytest.mark.parametrize(
    "body, message",
    [
        ("for i in n { y[i] = x[i + 1] }", "index 3 of dimension 0 of x is outside its extent 3"),
        ("for i in n { y[i - 1] = x[i] }", "index -1 of dimension 0 of y is outside"),
        ("for i in n { y[i] = guard(0 <= i < 2 ? x[i] : x[i - 3]) }", "index -3 of dimension 0 of x"),
        ("for i in n { y[i] = guard(0 <= i < 3 ? x[i + 1] : 0.0) }", "index 3 of dimension 0 of x"),
        ("for i in n { y[i] = sum(r in n) x[i + r] }", "of dimension 0 of x is outside"),
    ],
)
def test_reading_and_writing_outside_is_an_error(body, message):
    with pytest.raises(InterpretError, match=message):
        run(f"prim f(x: f32[n], out y: f32[n]) {{ {body} }}", np.zeros(3, F32), np.zeros(3, F32))


def test_what_a_guard_shuts_out_may_lie_outside():
    out = np.zeros(3, F32)
    run("prim f(x: f32[n], out y: f32[n]) { for i in n { y[i] = guard(1 <= i < n ? x[i - 1] : 7.0) } }", np.arange(3, dtype=F32), out)
    np.testing.assert_array_equal(out, [7, 0, 1])


def test_a_shared_value_is_safe_inside_a_guard_only():
    """Two uses inside guards may share a value. Outside of a guard the value is refused, because its index may be out of bounds there."""
    text = "prim f(x: f32[n], out y: f32[n]) {{ for i in n {{ y[i] = let t = x[i - 1] in {} }} }}"
    guarded = "guard(1 <= i < n ? t : 0.0) + guard(1 <= i < n ? t * 2.0 : 1.0)"
    out = np.zeros(4, F32)
    run(text.format(guarded), np.arange(4, dtype=F32), out)
    np.testing.assert_array_equal(out, [1, 0, 3, 6])
    with pytest.raises(InterpretError, match="index -1 of dimension 0 of x"):
        run(text.format(f"{guarded} + t"), np.arange(4, dtype=F32), out)


def test_arguments_must_fit_their_buffers():
    text = "prim f(x: f32[n], out y: f32[2 * n]) where n in 1..3 { for i in n { y[i] = x[i] } }"
    with pytest.raises(InterpretError, match=r"buffer y is float32\[5\], expected f32\[6\]"):
        run(text, np.zeros(3, F32), np.zeros(5, F32))
    with pytest.raises(InterpretError, match=r"buffer x is int32\[3\], expected f32\[3\]"):
        run(text, np.zeros(3, np.int32), np.zeros(6, F32))
    with pytest.raises(InterpretError, match=r"variable n is 4, outside its declared range 1\.\.3"):
        run(text, np.zeros(4, F32), np.zeros(8, F32))


@tile_op
class Copy(TileOp):
    name = "test_copy"

    @property
    def operands(self):
        return Operand("to", None, written=True), Operand("source", None)

    @property
    def dims(self):
        return ("count",)

    def meaning(self, arrays, dims):
        arrays[0][: dims[0]] = arrays[1][: dims[0]]


def test_a_tile_means_what_its_descriptor_says():
    text = 'prim f(x: f32[4, 2], out y: f32[4, 2]) { for i in 2 { tile "test_copy"(y[i * 2, 0], x[i * 2, 1]) dims(3) } }'
    out = np.zeros((4, 2), F32)
    run(text, np.arange(8, dtype=F32).reshape(4, 2), out)
    np.testing.assert_array_equal(out.reshape(-1), [1, 2, 3, 0, 5, 6, 7, 0])


def test_casts_saturate():
    x = np.array([np.nan, np.inf, -1e9, 3.9, -3.9], F32)
    np.testing.assert_array_equal(numpy_cast(x, DType.I8), [0, 127, -128, 3, -3])
    np.testing.assert_array_equal(numpy_cast(x, DType.BOOL), [True, True, True, True, True])
    np.testing.assert_array_equal(numpy_cast(np.array([300, -1]), DType.U8), [44, 255])


# --- programs with planned memory --------------------------------------------------------------------------------------


def planned(body: str) -> IRModule:
    """Parse a function body and give the function an arena of 32 bytes."""
    module = parse(f"{KERNEL} func main(x: f32[4]) -> f32[4] {{ {body} }}")
    main = module.graph("main")
    return module.update({"main": Function(main.params, main.body, main.result_type, arena=Dim.of(32))})


def test_a_plan_is_followed():
    text = "a = alloc f32[4] at 0  launch @twice(x, a)  b = alloc f32[4] at {}  launch @twice(a, b)  return b"
    x = np.ones(4, F32)
    np.testing.assert_array_equal(Interpreter(planned(text.format(16))).call("main", x), [4, 4, 4, 4])
    with pytest.raises(MismatchError, match="at 20 = 20 needs 16 bytes, but the arena has 32"):
        Interpreter(planned(text.format(20))).call("main", x)


def test_lives_that_overlap_spoil_the_result():
    text = "a = alloc f32[4] at 0  launch @twice(x, a)  b = alloc f32[4] at 0  launch @twice(x, b)  launch @bump(b)  return a"
    np.testing.assert_array_equal(Interpreter(planned(text)).call("main", np.ones(4, F32)), [3, 3, 3, 3])


def test_a_dimension_without_a_value_is_named():
    with pytest.raises(UnboundDimError, match="no value for k"):
        interpret("func main(x: f32[n, 2 * k]) -> f32[n, 2 * k] { return x }", np.zeros((1, 2), F32))


def test_a_tensor_without_axes_stays_a_tensor():
    """A reduction over all axes gives a tensor without axes. NumPy would return a scalar, which the next operator would not accept."""
    result = interpret("func main(x: f32[n]) -> object { a = mean(x, axes=[0]) b = exp(a) return b }", np.zeros(3, F32))
    assert isinstance(result, np.ndarray) and result.shape == () and result == 1
