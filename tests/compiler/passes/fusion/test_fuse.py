"""Tests which loop nests fuse, and which stay separate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.equal import assert_equal
from compiler.ir.graph.values import CallTir, TupleGet
from compiler.ir.loops.statements import Store
from compiler.ir.loops.visit import scalar_depth, walk_scalar, walk_scalars, walk_stmts
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.verify.module import verify
from compiler.passes.base import Pass, Pipeline
from compiler.passes.eliminate_dead_code import eliminate_dead_code
from compiler.passes.fusion.fuse import fuse
from compiler.passes.fusion.join import MOST_DEPTH, MOST_NODES
from compiler.passes.legalize import legalize
from runtime.session import Session

# Fusion, followed by the removal of bindings and nests that fusion leaves unused, so that tests need not list unused ones.
fused: Pass = Pipeline((fuse, eliminate_dead_code))


def calls(text: str) -> list[str]:
    """Return the names of the nests that `main` calls after fusion."""
    module: IRModule = Pipeline((legalize, fuse))(parse(text))
    verify(module)
    return [b.value.func for b in module.graph("main").body.bindings if isinstance(b.value, CallTir)]


def test_elementwise_chains_become_one_nest(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 4]) -> f32[n, 4] {
          dataflow { a = call_tir @e(x) -> f32[n, 4] b = call_tir @f(a) -> f32[n, 4] }
          return b
        }
        prim e(A: f32[n, 4], out B: f32[n, 4]) { for i in n, j in 4 { B[i, j] = exp(A[i, j]) } }
        prim f(A: f32[n, 4], out B: f32[n, 4]) { for i in n, j in 4 { B[i, j] = A[i, j] * 2.0 } }
    """
    expected = """
        func main(x: f32[n, 4]) -> f32[n, 4] {
          dataflow { b = call_tir @e_f(x) -> f32[n, 4] }
          return b
        }
        prim e_f(A: f32[n, 4], out B: f32[n, 4]) { for i in n, j in 4 { B[i, j] = exp(A[i, j]) * 2.0 } }
    """
    becomes(fused, before, expected)


def test_an_epilogue_wraps_the_store_of_a_product(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 8], w: f32[8, 4], b: f32[4]) -> f32[n, 4] {
          dataflow { y = call_tir @mm(x, w) -> f32[n, 4] z = call_tir @bias(y, b) -> f32[n, 4] }
          return z
        }
        prim mm(A: f32[n, 8], B: f32[8, 4], out C: f32[n, 4]) { for i in n, j in 4 { C[i, j] = contract(r in 8) A[i, r] by B[r, j] } }
        prim bias(A: f32[n, 4], V: f32[4], out B: f32[n, 4]) { for i in n, j in 4 { B[i, j] = A[i, j] + V[j] } }
    """
    expected = """
        func main(x: f32[n, 8], w: f32[8, 4], b: f32[4]) -> f32[n, 4] {
          dataflow { z = call_tir @mm_bias(b, x, w) -> f32[n, 4] }
          return z
        }
        prim mm_bias(V: f32[4], A: f32[n, 8], B: f32[8, 4], out C: f32[n, 4]) {
          for i in n, j in 4 { C[i, j] = (contract(r in 8) A[i, r] by B[r, j]) + V[j] }
        }
    """
    becomes(fused, before, expected)


def test_a_reduction_is_not_repeated_for_each_element_of_a_product() -> None:
    """The reader computes a maximum for each of its elements, so it is no epilogue of the product that it reads elementwise."""
    text = """
        func main(x: f32[n, 8], w: f32[8, 4], v: f32[8, 4]) -> f32[n, 4] {
          dataflow { y = call_tir @mm(x, w) -> f32[n, 4] z = call_tir @scaled(y, v) -> f32[n, 4] }
          return z
        }
        prim mm(A: f32[n, 8], B: f32[8, 4], out C: f32[n, 4]) { for i in n, j in 4 { C[i, j] = contract(r in 8) A[i, r] by B[r, j] } }
        prim scaled(A: f32[n, 4], V: f32[8, 4], out B: f32[n, 4]) { for i in n, j in 4 { B[i, j] = A[i, j] * (max(r in 8) V[r, j]) } }
    """
    assert calls(text) == ["mm", "scaled"]


def test_a_custom_decode_ends_up_inside_the_product_that_reads_it(becomes: Callable[[Pass, str, str], None]) -> None:
    """Figure 9 of the Relax paper: a custom loop nest that decodes packed 4-bit weights fuses into the product that reads them, so the
    decoded weights are never written to memory."""
    before = """
        func main(x: f32[n, 8], w: u8[4, 4], s: f32[4]) -> f32[n, 4] {
          dataflow { d = call_tir @decode(w, s) -> f32[4, 8] y = call_tir @mm(x, d) -> f32[n, 4] }
          return y
        }
        prim decode(W: u8[4, 4], S: f32[4], out D: f32[4, 8]) {
          for i in 4, j in 8 { D[i, j] = cast(f32, (W[i, j // 2] >> cast(u8, dim(4*(j % 2)))) & 15:u8) * S[i] }
        }
        prim mm(A: f32[n, 8], B: f32[4, 8], out C: f32[n, 4]) { for i in n, j in 4 { C[i, j] = contract(r in 8) A[i, r] by B[j, r] } }
    """
    expected = """
        func main(x: f32[n, 8], w: u8[4, 4], s: f32[4]) -> f32[n, 4] {
          dataflow { y = call_tir @decode_mm(x, w, s) -> f32[n, 4] }
          return y
        }
        prim decode_mm(A: f32[n, 8], W: u8[4, 4], S: f32[4], out C: f32[n, 4]) {
          for i in n, j in 4 {
            C[i, j] = contract(r in 8) A[i, r] by cast(f32, (W[j, r // 2] >> cast(u8, dim(4*(r % 2)))) & 15:u8) * S[j]
          }
        }
    """
    becomes(fused, before, expected)


def test_a_value_that_two_read_is_computed_once() -> None:
    assert calls("func main(x: f32[n]) -> object { dataflow { a = exp(x) b = sin(a) c = cos(a) r = (b, c) } return r }") == [
        *("exp", "sin", "cos"),
    ]


def test_an_operand_keeps_its_value_beside_the_memory_that_the_call_overwrites() -> None:
    """The call reads x and overwrites it. It reads the elements that it has not written yet, as long as nothing joins both operands."""
    module = parse("""
        func main(x: f32[n], y: f32[n]) -> f32[n] {
          dataflow { a = call_tir @e(y) -> f32[n] z = call_tir_inplace @put(x, x, a) [0] -> f32[n] }
          return z
        }
        prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] * 2.0 } }
        prim put(P: f32[n], X: f32[n], A: f32[n], out B: f32[n]) attrs {inplace=[[0, 3]]} { for i in n { B[i] = X[n - 1 - i] + A[i] } }
    """)
    made = fuse(module)
    assert made is not module
    verify(made)
    x, y = np.arange(5, dtype=np.float32), np.ones(5, np.float32)
    np.testing.assert_array_equal(Interpreter(made).call("main", x, y), x[::-1] + 2)


def test_nothing_joins_outside_of_dataflow() -> None:
    assert calls("func main(x: f32[n]) -> object { a = exp(x) b = sin(a) return b }") == ["exp", "sin"]


def test_costly_work_is_not_repeated_in_a_fold() -> None:
    """An exp of weights does not fuse into the product that reads it, because the product would compute the exp again for each row of x."""
    text = "func main(x: f32[n, 8], w: f32[8, 8]) -> object { dataflow { a = exp(w) b = matmul(x, a) } return b }"
    assert calls(text) == ["exp", "matmul"]


@pytest.mark.parametrize("name", ["x", "reshape(x, shape[n])", "match_cast x to f32[n]"])
def test_a_producer_does_not_cross_a_write_to_what_it_reads(name: str) -> None:
    module = parse(f"""
        impure func main(x: f32[n]) -> object {{
          v = {name}
          dataflow {{
            a = call_tir @e(x) -> f32[n]
            z = call_tir_inplace @zero(v) [0] -> f32[n]
            b = call_tir @e(a) -> f32[n]
            r = (b, z)
          }}
          return r
        }}
        prim e(A: f32[n], out B: f32[n]) {{ for i in n {{ B[i] = A[i] + 1.0 }} }}
        prim zero(A: f32[n], out B: f32[n]) attrs {{inplace=[[0, 1]]}} {{ for i in n {{ B[i] = A[i] * 0.0 }} }}
    """)
    assert fuse(module) is module


@pytest.mark.parametrize("name", ["x", "reshape(x, shape[n])"])
def test_a_producer_does_not_move_into_a_write_to_what_it_reads(name: str) -> None:
    """A nest that reads x does not fuse into a nest that overwrites x, because the overwriting nest would change element 0 before its last
    iteration reads that element."""
    module = parse(f"""
        impure func main(x: f32[n]) -> object {{
          v = {name}
          dataflow {{
            a = call_tir @turned(v) -> f32[n]
            z = call_tir_inplace @plus(x, a) [0] -> f32[n]
          }}
          return z
        }}
        prim turned(A: f32[n], out B: f32[n]) {{ for i in n {{ B[i] = A[n - 1 - i] }} }}
        prim plus(A: f32[n], C: f32[n], out B: f32[n]) attrs {{inplace=[[0, 2]]}} {{ for i in n {{ B[i] = A[i] + C[i] }} }}
    """)
    assert fuse(module) is module


def test_a_write_may_take_what_moves_into_it_twice(becomes: Callable[[Pass, str, str], None]) -> None:
    """A nest may fuse into an in-place write that reads the nest's result twice. Layers that use keys as values contain such writes."""
    before = """
        impure func main(x: f32[n], p: f32[n]) -> f32[n] {
          dataflow { a = call_tir @e(x) -> f32[n] z = call_tir_inplace @put(p, a, a) [0] -> f32[n] }
          return z
        }
        prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] + 1.0 } }
        prim put(P: f32[n], A: f32[n], C: f32[n], out B: f32[n]) attrs {inplace=[[0, 3]]} { for i in n { B[i] = A[i] + C[i] * 2.0 } }
    """
    expected = """
        impure func main(x: f32[n], p: f32[n]) -> f32[n] {
          dataflow { z = call_tir_inplace @e_put(p, x) [0] -> f32[n] }
          return z
        }
        prim e_put(P: f32[n], A: f32[n], out B: f32[n]) attrs {inplace=[[0, 2]]} {
          for i in n { B[i] = A[i] + 1.0 + (A[i] + 1.0) * 2.0 }
        }
    """
    becomes(fused, before, expected)


ROUNDED = """
    func main(x: f32[n, {k}], w: f32[{k}]) -> object {{
      dataflow {{ y = rms_norm(x, w, eps=1.0e-5) rows = quantize_rows(y, bits=16, group={group}, cap={cap}) z = {last} }}
      return z
    }}
"""


@pytest.mark.parametrize("cap", ["0.0", "2.0"])
@pytest.mark.parametrize("group", [0, 32])
def test_a_norm_is_rounded_where_it_is_made(group: int, cap: str) -> None:
    assert calls(ROUNDED.format(k=96, group=group, cap=cap, last="rows.0")) == ["rms_norm_quantize_rows"]
    # The norm stays separate, because exp reads it, too.
    assert len(calls(ROUNDED.format(k=96, group=group, cap=cap, last="exp(y)"))) == 3
    # Nothing is fused, because rows of unknown length do not fit a thread's local memory.
    assert len(calls(ROUNDED.format(k="k", group=0, cap=cap, last="rows.0"))) == 2


@pytest.mark.parametrize(("bits", "count"), [(4, 1), (8, 2)])
def test_sums_of_weights_of_one_form_join(bits: int, count: int) -> None:
    """Two sums over weights of one format fuse into one kernel. A sum over 4-bit weights and a sum over 8-bit weights stay separate,
    because no schedule computes both."""
    text = f"""
      func main(q: i8[n, 1, 64], s: f32[n, 1], t: i32[n, 1, 1], a: u8[1, 8, 128], b: u8[1, {2 * bits}, 128], f: f32[1, 1, 32]) -> object {{
        dataflow {{
          gate = integer_linear(q, s, t, a, f, format="panel4", size=32)
          up = integer_linear(q, s, t, b, f, format="panel{bits}", size=32)
          y = multiply(gate, up)
        }}
        return y
      }}"""
    assert len(calls(text)) == count


def test_what_a_consumer_reads_twice_is_computed_once_in_it(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n]) -> f32[n] {
          dataflow { a = call_tir @e(x) -> f32[n] b = call_tir @f(a, a) -> f32[n] }
          return b
        }
        prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = exp(A[i]) } }
        prim f(A: f32[n], B: f32[n], out C: f32[n]) { for i in n { C[i] = A[i] + B[i] } }
    """
    expected = """
        func main(x: f32[n]) -> f32[n] { dataflow { b = call_tir @e_f(x) -> f32[n] } return b }
        prim e_f(A: f32[n], out B: f32[n]) { for i in n { B[i] = let t = exp(A[i]) in t + t } }
    """
    becomes(fused, before, expected)
    body = fused(parse(before)).prim("e_f").body
    assert [type(s).__name__ for s in walk_scalars(body)] == ["Apply", "Apply", "Load"]


CHAINS = {"add({x}, {x})": 64, "exp({x})": 600, "subtract({x}, x0)": 600}


@pytest.mark.parametrize("operator", CHAINS)
def test_fusion_grows_with_the_number_of_operators(operator: str) -> None:
    """The size and depth of fused nests are limited, so the time of fusion is proportional to the number of operators. The test has 64
    doublings, each of which reads the previous one twice. Without a limit, fusion would write 2**64 additions."""
    count = CHAINS[operator]
    lines = [f"x{i + 1} = {operator.format(x=f'x{i}')}" for i in range(count)]
    module = parse(f"func main(x0: f32[n]) -> object {{ dataflow {{ {' '.join(lines)} }} return x{count} }}")
    module = Pipeline((legalize, fuse, eliminate_dead_code))(module)
    verify(module)
    names = [b.value.func for b in module.graph("main").body.bindings if isinstance(b.value, CallTir)]
    assert len(names) < count / 16
    for name in names:
        roots = [s.value for s in walk_stmts(module.prim(name).body) if isinstance(s, Store)]
        assert all(scalar_depth(root) <= MOST_DEPTH for root in roots)
        assert sum(1 for root in roots for _ in walk_scalar(root)) <= MOST_NODES
    assert len(print_module(module)) < 200 * count
    assert_equal(parse(print_module(module)), module)


def test_a_split_that_feeds_gates_is_part_of_their_kernel(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 8]) -> f32[n, 4] {
          dataflow { p = split(x, axis=1, sizes=[4, 4]) a = p.0 b = p.1 g = tanh(a) y = multiply(g, b) }
          return y
        }
    """
    expected = """
        func main(x: f32[n, 8]) -> object { dataflow { y = call_tir @split_2_split_1_tanh_multiply(x) -> f32[n, 4] } return y }
        prim split_2_split_1_tanh_multiply(A: f32[n, 8], out C: f32[n, 4]) {
          for i in n, j in 4 { C[i, j] = tanh(A[i, j]) * A[i, j + 4] }
        }
    """

    becomes(Pipeline((legalize, fused)), before, expected)


def test_a_call_makes_the_results_that_did_not_move() -> None:
    """A kernel computes only those results that were not fused into a consumer. Here the kernel of `split` computes `a` and `c`, which are
    results of the function. `b` fuses into its only consumer."""
    module = Pipeline((legalize, fuse, eliminate_dead_code))(
        parse("""
          func main(x: f32[n, 12]) -> object {
            dataflow {
              p = split(x, axis=1, sizes=[4, 4, 4]) a = p.0 b = p.1 c = p.2
              e = exp(b) r = (a, e, c, c)
            }
            return r
          }
        """)
    )
    verify(module)
    values = [b.value for b in module.graph("main").body.bindings]
    made = [v for v in values if isinstance(v, CallTir)]
    assert sorted(len(v.out) for v in made) == [1, 2]
    assert [v.index for v in values if isinstance(v, TupleGet)] == [0, 1]
    session = Session(compile_module(module))
    x = np.arange(36, dtype=np.float32).reshape(3, 12)
    a, _, c, again = session.call("main", x)
    np.testing.assert_array_equal(np.stack([a, c, again]), np.stack([x[:, :4], x[:, 8:], x[:, 8:]]))


@pytest.mark.parametrize(
    ("before", "result"),
    [
        ("p = split(x, axis=0, sizes=[4, 4]) a = p.0 b = exp(a)", "(b, p)"),  # The function returns p, so it reads the whole tuple.
        # `running` computes its second result from the first.
        ("p = call_tir @running(x) -> (f32[8], f32[8]) a = p.0 c = p.1 b = exp(a)", "(b, c)"),
    ],
)
def test_results_that_depend_on_others_stay_together(before: str, result: str) -> None:
    module = parse(f"""
      func main(x: f32[8]) -> object {{ dataflow {{ {before} r = {result} }} return r }}
      prim running(A: f32[8], out B: f32[8], out C: f32[8]) {{
        for i in 8 {{ B[i] = A[i] + 1.0 }}
        for i in 8 {{ C[i] = B[i] * 2.0 }}
      }}
    """)
    module = Pipeline((legalize, fuse, eliminate_dead_code))(module)
    calls = [b.value for b in module.graph("main").body.bindings if isinstance(b.value, CallTir)]
    assert [len(c.out) for c in calls] == [2, 1]


def test_a_result_does_not_cross_a_write_to_what_its_call_reads() -> None:
    module = parse("""
      impure func main(x: f32[8]) -> object {
        dataflow {
          p = call_tir @parts(x) -> (f32[4], f32[4])
          z = call_tir_inplace @zero(x) [0] -> f32[8]
          a = p.0
          b = p.1
          c = call_tir @sum(a, b) -> f32[4]
          r = (c, z)
        }
        return r
      }
      prim parts(A: f32[8], out B: f32[4], out C: f32[4]) { for i in 4 { B[i] = A[i] } for i in 4 { C[i] = A[i + 4] } }
      prim zero(A: f32[8], out B: f32[8]) attrs {inplace=[[0, 1]]} { for i in 8 { B[i] = A[i] * 0.0 } }
      prim sum(A: f32[4], B: f32[4], out C: f32[4]) { for i in 4 { C[i] = A[i] + B[i] } }
    """)
    assert fuse(module) is module


def test_a_decode_of_any_length_joins_its_product() -> None:
    """A decode of symbolic length fuses into its product, too. The product then reads 4 bits per weight, and no f32 weights are written."""
    text = """
      func main(x: f32[n, k], w: u8[m, k // 2], s: f32[m, k // 32]) -> f32[n, m] where k in 32..128 by 32, n in 0..8, m in 0..32 {
        dataflow { d = call_tir @decode(w, s) -> f32[m, k] y = call_tir @mm(x, d) -> f32[n, m] }
        return y
      }
      prim decode(W: u8[m, k // 2], S: f32[m, k // 32], out D: f32[m, k]) where k in 32..128 by 32 {
        for i in m, j in k { D[i, j] = cast(f32, (W[i, j // 2] >> cast(u8, dim(4*(j % 2)))) & 15:u8) * S[i, j // 32] }
      }
      prim mm(A: f32[n, k], B: f32[m, k], out C: f32[n, m]) { for i in n, j in m { C[i, j] = contract(r in k) A[i, r] by B[j, r] } }
      prim copied(W: f32[m, k], out D: f32[m, k]) { for i in m, j in k { D[i, j] = W[i, j] } }
    """
    assert calls(text) == ["decode_mm"]
    moved = text.replace("w: u8[m, k // 2]", "w: f32[m, k]").replace("@decode(w, s)", "@copied(w)")
    assert calls(moved) == ["copied", "mm"]  # not fused: running a plain copy once is cheaper
    rng = np.random.default_rng(0)
    x, w, s = rng.standard_normal((3, 96), np.float32), rng.integers(0, 256, (24, 48), np.uint8), rng.random((24, 3), np.float32)
    weights = np.stack([w & 15, w >> 4], -1).reshape(24, 96) * np.repeat(s, 32, 1)
    got = Session(compile_module(parse(text))).call("main", x, w, s)
    np.testing.assert_allclose(got, x @ weights.T, rtol=1e-4, atol=1e-4)


def test_stacked_weights_are_stacked_before_they_are_decoded() -> None:
    """A decode of weights that absorbed their stacking would select among the parts for each element, and so could not be packed. A decode
    of activations absorbs the stacking, which runs in every step."""
    text = """
      func main(x: f32[n, 64], {weight}a: i8[32, 64], {weight}b: i8[32, 64], {weight}s: f32[64, 2]) -> f32[n, 64] {{
        dataflow {{
          q = concat(a, b, axis=0)
          w = dequantize(q, s, bits=8, group=32)
          y = linear(x, w)
        }}
        return y
      }}"""
    assert calls(text.format(weight="weight ")) == ["concat", "dequantize_linear"]
    assert calls(text.format(weight="")) == ["concat_dequantize_linear"]


def test_scales_of_weights_are_decoded_once_unless_the_weights_are_shifted() -> None:
    """The schedule for tensor cores reads one decoded scale per group. It reads no shifts, so the kernel of shifted weights decodes the
    scales itself: while they are encoded, they take less memory."""
    text = """
      func main(x: f32[n, 512], weight a: i8[32, 512], weight s: i8[32, 32], weight u: f32[32, 2]{params}) -> f32[n, 32] {{
        dataflow {{
          v = dequantize(s, u, bits=8, group=16)
          w = dequantize(a, v{shift}, bits=8, group=16{shifted})
          y = linear(x, w)
        }}
        return y
      }}"""
    assert calls(text.format(params="", shift="", shifted="")) == ["dequantize", "dequantize_1_linear"]
    shifted = text.format(params=", weight z: f32[32, 32]", shift=", z", shifted=", shifted=true")
    assert calls(shifted) == ["dequantize_dequantize_1_linear"]
