"""Printing a program and parsing the text gives an equal program. Text that is no program is refused, and the error names its line and
column."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.ir.dims import Dim, DimVar, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.equal import assert_equal
from compiler.ir.graph.atoms import Constant, ScalarValue, Var
from compiler.ir.graph.function import Binding, Block, Body, Function
from compiler.ir.graph.values import Alloc, Call, Copy
from compiler.ir.loops import scalars
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import For, Let, LoopKind, Seq, Stmt, Store, When
from compiler.ir.loops.visit import rename_buffers, walk_scalar, walk_scalars
from compiler.ir.module import IRModule
from compiler.ir.op import OPS, REQUIRED, OpDef
from compiler.ir.text.lexer import MAX_NESTING, ParseError
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_binding, print_module, print_node
from compiler.ir.text.syntax import ARITY, RESERVED
from compiler.ir.types import FuncType, ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type, tensor
from compiler.machine.formats import PANEL8, WIDENED4


def test_a_fold_that_is_mentioned_twice_stays_one() -> None:
    text = "prim f(A: f32[n, 4], B: f32[n]) { for i in n { B[i] = let t = sum(r in 4) A[i, r] in t * t } }"
    body = parse(print_module(parse(text))).prim("f").body
    assert sum(isinstance(s, scalars.Reduce) for s in walk_scalars(body)) == 1


def _operator(name: str, attributes: dict[str, Any]) -> OpDef:
    """Return an operator for tests, whose result has the annotation of its first operand."""
    return OPS.get(name) or OPS.add(name, OpDef(name, attributes, lambda args, attrs: args[0]))


SAME = _operator("text.same", {"axes": None, "keepdims": False, "scale": 1.0})
STRICT = _operator("text.strict", {"axis": REQUIRED})

GRAPH = """\
func main(x: f32[n, 4], w: f32[4, 8], s: shape[n, m], a: scalar[f32], k: scalar[i64, 4*n], t: tuple[f32[n], i32[2]],
    o: object, f: fn(f32[n]) -> f32[n], c: bool[], weight layers.0.bias: bf16[8]) -> f32[n, 4]
    where n in 1..128, m in 0.. by 16, k2 in 0..n {
  dataflow {
    v0: f32[n, 4] = text.same(x, w, 4, dim(n + 1), 2.5, true, axes=[0, -1], keepdims=true)
    v1: f32[n, 4] = text.strict(v0, n, const f32[2] [1.0, -0.0], shape[n, 2*n], @other, axis=dim(n))
    v2 = call_tir @add(v0, v1, n, 0.5:f16, 3:i32, false) -> f32[n, 4]
    v3 = call_tir_inplace @add(v0, v1) [0, _] -> (f32[n, 4], i32[n])
    v4 = call_library "blas.sgemm"(x, w) {alpha=1.5, names=["a", none], type=bf16} -> f32[n, 8]
  }
  y = match_cast v2 to f32[k2, 4]
  z: f32[n, 4] = if c {
    dataflow {
      b: f32[n, 4] = text.same(v0)
    }
    return b
  } else {
    return v1
  }
  pair: tuple[f32[n, 4], f32[4, 8]] = (x, w)
  none_1: tuple[] = ()
  first: f32[n, 4] = pair.0
  dims = shape[n, min(4*n, m)]
  g: f32[n, 4] = @other(x)
  h: f32[7] = call f(const f32[7] [0.0, 1.0, nan, inf, -inf, 1e-05, 1e+20])
  m = alloc f32[n, 8] at 64*n
  own = alloc f32[n, 8]
  launch @add(x, w, m)
  launch library "host.sort"(x, own) {descending=true}
  captured {
    launch @add(x, w, own)
  }
  same: f32[n, 4] = z
  return same
}

impure func other(x: f32[a, b]) -> f32[a, b] {
  return x
}
"""

LOOPS = """\
prim add(A: f32[n, m], B: i32[n], eps: scalar f32, k: dim, out C: f32[n, m], out D: bool[])
    where n in 1.., k in 0..n attrs {axes=[1, 2], kind="elementwise"} {
  for i in n, j in m {
    let p within 0..n - 1 = cast(i64, B[i]) {
      C[i, j] = max(sum(r in m) A[i, r] * A[p, j], 0.0) + cast(f32, dim(4*n + i))
    }
    C[i, j] = (sum(r in m, q in r + 1) A[i, r] + A[i, q]) * 2.0 - -eps * (eps - (1.0 - eps)) / -(1.0)
    C[i, j] = guard(0 <= i - 1 < n, 2 <= j < m ? A[i - 1, j] : -1.5)
    C[i, j] = select(A[i, j] < eps & ~(eps <= 0.0), fma(eps, eps, pow(eps, 0.5)), rsqrt(eps))
  }
  for parallel i in n {
    for vector l in 16 {
      C[i, l] = cast(f32, (B[i] << 2:i32 | 255:i32) & 7:i32 ^ B[i] % 3:i32 // 2:i32)
    }
  }
  for i in n within 0.. {
    C[i, 0] = 0.5
  }
  alloc local acc: f32[16, 2] {
    tile "interleave_pairs"(A[0, 0], acc[0, 0]) dims(16, n, 0, 8) {columns=16, masked=true}
  }
  when D[] == (eps != 1.0) {
    D[] = any(r in n) B[r] == 0:i32
  } else {
    D[] = true
  }
}
"""


ATTENTION = """\
prim paged(q: bf16[t, 4, 8], cache: i8[2, 2, p, 2, 128], tables: i32[s, m], ids: i32[t], at: i32[t], layer: scalar i64,
    scales: f32[2, 2, p, 2, 16], sinks: f32[4], out o: bf16[t, 4, 8]) {
  attention(queries=q, keys=paged(cache=cache, tables=tables, layer=layer, scales=scales), sequences=ids, out=o,
      positions=at, sinks=sinks) {scale=0.25, softcap=30.0, window=4}
}

prim ragged(q: f32[t, 4, 8], k: f32[t, 4, 8], v: f32[t, 4, 8], ids: i32[t], starts: i32[n], bias: f32[4, 9],
    out o: f32[t, 4, 8]) {
  attention(queries=q, keys=ragged(keys=k, values=v, starts=starts), sequences=ids, out=o, bias=bias) {scale=1.0}
}
"""


@pytest.mark.parametrize("source", [GRAPH, LOOPS, ATTENTION, GRAPH + "\n" + LOOPS], ids=["graph", "loops", "attention", "both"])
def test_canonical_text_is_a_fixed_point(source: str) -> None:
    module = parse(source)
    assert print_module(module) == source
    assert_equal(module, parse(print_module(module)))


def test_text_is_free_in_its_layout() -> None:
    spread = "func main # comment\n(x: f32[ n,\n 4 , ],) -> f32[n, 4]\n{ y = text.same\n(x) return y }"
    assert_equal(parse(spread), parse("func main(x: f32[n, 4]) -> f32[n, 4] { y = text.same(x) return y }"))


def test_lines_are_at_most_120_columns() -> None:
    names = [f"parameter_number_{i}" for i in range(40)]
    params = ", ".join(f"{n}: f32[batch, {i} + length]" for i, n in enumerate(names))
    body = f'y = call_tir @long({", ".join(names)}) -> f32[batch, length] s = text.same(y, axes=["{"a b, " * 30}"]) return s'
    expression = " + ".join(f"A[i] * {i}.0" for i in range(60))
    prim = f"prim long(A: f32[n], out B: f32[n]) {{ for i in n {{ B[i] = {expression} }} }}"
    module = parse(f"func main({params}, l: f32[length]) -> f32[batch, length] {{ {body} }} {prim}")
    text = print_module(module)
    assert max(len(line) for line in text.splitlines() if '"' not in line) <= 120
    assert_equal(module, parse(text))


# --- annotations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "object",
        "f32[]",
        "u8[2, n]",
        "any[n]",
        "any[...]",
        "bf16[...]",
        "f16[ndim=0]",
        "i8[ndim=3]",
        "shape[]",
        "shape[n, n // 2]",
        "shape[ndim=2]",
        "shape[...]",
        "scalar[any]",
        "scalar[i64]",
        "scalar[i64, n % 3]",
        "tuple[]",
        "tuple[f32[n], tuple[object, shape[n]]]",
        "fn() -> object",
        "fn(...) -> f32[n]",
        "impure fn(f32[a, b], fn(f32[a]) -> f32[a]) -> tuple[f32[b]]",
        "fn[a in 1..16 by 4, b in 0..a](f32[a, b]) -> f32[b]",
    ],
)
def test_annotations_round_trip(text: str) -> None:
    module = parse(f"func f(n: f32[n], x: {text}) -> object {{ return x }}")
    assert f", x: {text}) -> object" in print_module(module)


def test_a_signature_has_dimensions_of_its_own() -> None:
    param = parse("func f(x: f32[n], g: fn(f32[n]) -> f32[n]) -> object where n in 1..8 { return x }").graph("f").params[1]
    assert isinstance(param.type, FuncType)
    assert param.type.params is not None
    (inner,) = param.type.params
    assert isinstance(inner, TensorType)
    assert inner.shape is not None
    assert inner.shape[0].vars()[0].upper is None


def test_ranges() -> None:
    module = parse("func f(x: f32[n, m, p]) -> object where m in 0..n - 1, n in -3..9 by 3 { return x }".replace("m in 0..n - 1, ", ""))
    (param,) = module.graph("f").params
    assert isinstance(param.type, TensorType)
    assert param.type.shape is not None
    n, m, _ = (v for d in param.type.shape for v in d.vars())
    assert (n.lower, n.upper, n.multiple_of) == (-3, 9, 3)
    assert (m.lower, m.upper, m.multiple_of) == (0, None, 1)


# --- bindings ----------------------------------------------------------------------------------------------------------


def test_a_range_without_an_end_stands_before_anything() -> None:
    for source in (
        "func f(x: f32[n]) -> object where n in 1.. arena 64*n { return x }",
        "func f(x: fn[n in 1..](f32[n]) -> f32[n]) -> object { return x }",
        "prim f(A: f32[n]) where n in 1.. attrs {a=1} { A[0] = 1.0 }",
    ):
        assert_equal(parse(print_module(parse(source))), parse(source))


def test_unannotated_bindings_are_deduced_wherever_the_callee_stands() -> None:
    module = parse("""
        func main(x: f32[n, 4]) -> f32[n, 4] { y = @later(x) z = (y, x) w = z.0 return w }
        func later(a: f32[p, q]) -> f32[p, q] { return a }
    """)
    *_, last = module.graph("main").body.bindings
    assert print_node(last.var.type) == "f32[n, 4]"


def test_attributes_left_out_have_their_defaults() -> None:
    call = parse("func f(x: f32[2]) -> object { y = text.same(x, keepdims=true) return y }").graph("f").body.bindings[0].value
    assert isinstance(call, Call)
    assert call.attrs == {"axes": None, "keepdims": True, "scale": 1.0}
    assert print_node(call) == "text.same(x, keepdims=true)"


def test_an_attribute_that_text_cannot_say_is_named() -> None:
    call = Call(SAME, (), {"axes": {1, 2}})
    with pytest.raises(TypeError, match="attribute axes is"):
        print_node(call)


def test_precedence() -> None:
    """The precedence of operators, from lowest to highest: or, xor, and, comparisons, shifts, sums, products, signs."""

    def value(text: str) -> Scalar:
        stmt = parse(f"prim p(a: scalar i32, b: scalar i32, f: scalar f32, out B: f32[]) {{ B[] = {text} }}").prim("p").body
        assert isinstance(stmt, Store)
        return stmt.value

    for flat, grouped in [
        ("a < b & b <= a | a == b", "((a < b) & (b <= a)) | (a == b)"),
        ("a ^ b & a | b", "(a ^ (b & a)) | b"),
        ("a << b + a < b", "(a << (b + a)) < b"),
        ("a - b - a", "(a - b) - a"),
        ("a - b * -a % b", "a - ((b * (-a)) % b)"),
        ("~a & b", "(~a) & b"),
        ("sum(r in 4) f + f", "sum(r in 4) (f + f)"),
    ]:
        assert print_node(value(flat)) == flat == print_node(value(grouped))
    for text in ["a - (b - a)", "(a < b) == (b < a)", "(sum(r in 4) f) + f", "f * (sum(r in 4) f)", "(a + b) * a", "-(a + b)"]:
        assert print_node(value(text)) == text


# --- names in printed text ---------------------------------------------------------------------------------------------


SHARED = """\
prim main(A: f32[n], t: scalar f32, out B: f32[n]) {
  for i in n {
    B[i] = let t_1 = fma(exp(A[i]), exp(A[i] * 2.0), exp(A[i] * 3.0)) + fma(A[i], A[i], 1.0),
        t_2 = t_1 * t_1 + t_1 + (sum(r in n) let t_2 = fma(exp(A[r]), exp(A[r] * 2.0), exp(A[r] * 3.0)) +
        fma(A[r], A[r], t_1) in t_2 * t_2) in t_2 / t_2 - t_1 * t
  }
}
"""


def test_values_that_an_expression_shares_have_names() -> None:
    """A value that an expression uses several times gets a name in the text, from which the parser makes one node again. A value that is
    shared within a reduction is named within the reduction."""
    module = parse(SHARED)
    body = module.prim("main").body
    assert isinstance(body, For)
    store = body.body
    assert isinstance(store, Store)
    match store.value:
        case scalars.Apply(args=(scalars.Apply(args=(left, right)), scalars.Apply(args=(shared, _)))):
            assert left is right
            assert sum(node is shared for node in walk_scalar(store.value)) == 1
        case _:
            pytest.fail(print_node(store.value))
    text = print_module(module)
    assert text.strip() == SHARED.strip()
    assert_equal(parse(text), module)


def test_short_shared_values_are_written_out() -> None:
    source = "prim main(A: f32[n], out B: f32[n]) { for i in n { B[i] = let t = exp(A[i]) in t * t } }"
    assert "B[i] = exp(A[i]) * exp(A[i])" in print_module(parse(source))


def test_clashing_names_are_told_apart() -> None:
    n, other_n = DimVar("n"), DimVar("n", 2)
    x, y, z = Var("x", tensor([n], DType.F32)), Var("x", tensor([other_n], DType.F32)), Var("x", ObjectType())
    func = Function((x, y), Body((Block((Binding(z, Copy(y)),)),), z), ObjectType())
    module = IRModule({"main": func})
    text = print_module(module)
    assert "func main(x: f32[n], x_1: f32[n_1]) -> object\n    where n_1 in 2.. {\n  x_2: object = x_1\n" in text
    assert_equal(module, parse(text))


def test_names_that_the_language_cannot_write() -> None:
    names = ["", "a b", "0", "layers.0", "x.", "für", "if", "f32", "nan", "..", "a-b", "x_1", "x", "x"]
    params = tuple(Var(name, ObjectType()) for name in names)
    module = IRModule({"no name!": Function(params, Body((), params[-1]), ObjectType())})
    text = print_module(module)
    assert text.startswith('func "no name!"(')
    again = parse(text)
    assert_equal(module, again)
    assert not RESERVED & {p.name for p in again.graph("no name!").params}


def test_words_between_parts_are_no_names() -> None:
    """A dimension in a `where` must not look like the next function, nor the next binding like the rest of an allocation."""
    func, at = DimVar("func", 1, 8), Var("at", tensor([4], DType.F32))
    x, memory = Var("x", tensor([func], DType.F32)), Var("y", tensor([4], DType.F32))
    bindings = (Binding(memory, Alloc(tensor([4], DType.F32))), Binding(at, Copy(memory)))
    module = IRModule({"main": Function((x,), Body((Block(bindings),), at), ObjectType())})
    assert_equal(parse(print_module(module)), module)
    with pytest.raises(ParseError, match="found 'func', which is a reserved word"):
        parse("func main(x: f32[func]) -> object where func in 1..8 { return x }")


def test_a_buffer_after_a_grouped_contraction_is_no_part_of_it() -> None:
    prim = parse("""
        prim main(Q: i32[6], W: i32[6], S: f32[2], out Y: f32[1], out other: f32[1]) {
          Y[0] = contract_groups(g in 2) [contract(r in 3) Q[3*g + r] by W[3*g + r]] by S[g]
          other[0] = 1.0
        }
    """).prim("main")
    other = prim.outputs[1]
    beside = Buffer("beside", other.shape, other.dtype)
    prim = PrimFunc((*prim.params[:-1], beside), 2, rename_buffers(prim.body, {other: beside}))
    module = IRModule({"main": prim})
    assert_equal(parse(print_module(module)), module)


def test_numbers_of_other_classes_print_like_plain_numbers() -> None:
    class Way(IntEnum):
        LAST = 3

    x = Var("x", tensor([4], DType.F32))
    plain = Call(SAME, (x,), {"axes": [3], "keepdims": False, "scale": 0.5})
    for axis, flag, scale in [(Way.LAST, False, np.float64(0.5)), (np.int64(3), np.bool_(False), np.float32(0.5))]:
        assert print_node(Call(SAME, (x,), {"axes": [axis], "keepdims": flag, "scale": scale})) == print_node(plain)


def test_names_of_parameters_survive() -> None:
    source = "func f(model.layers.0.weight: object, weight: object, out: object, n: scalar[i64, n]) -> object { return n }"
    assert [p.name for p in parse(print_module(parse(source))).graph("f").params] == [
        "model.layers.0.weight",
        "weight",
        "out",
        "n",
    ]


def test_a_value_hides_a_dimension_of_its_name() -> None:
    source = "func f(x: f32[n], n: object) -> object { a: object = text.same(n, dim(n)) return a }"
    module = parse(source)
    call = module.graph("f").body.bindings[0].value
    assert isinstance(call, Call)
    assert isinstance(call.args[0], Var)
    assert isinstance(call.args[1], ScalarValue)
    assert_equal(module, parse(print_module(module)))


def test_sibling_scopes_may_reuse_names() -> None:
    source = """
        func f(x: f32[n], c: bool[]) -> object {
          r: object = if c { y = match_cast x to f32[k] return y } else { y = match_cast x to f32[k] return y }
          return r
        }
        prim p(out A: f32[n]) { for i in n { A[i] = 1.0 } for i in n { A[i] = 2.0 } }
    """
    module = parse(source)
    assert_equal(module, parse(print_module(module)))


# --- constants ---------------------------------------------------------------------------------------------------------

_ARRAYS = [np.asarray(values, dtype.numpy) for dtype in DType for values in ([0, 1], [[1], [0]], 1, [], [[[0, 1, 1]]] * 2)] + [
    np.array([0.1, -0.0, np.nan, np.inf, -np.inf, 1e-40, 3.4e38], np.float32),
    np.array([0.1, 65504.0, 6e-8], np.float16),
    np.array([0.1, 3e38, 1e-40], ml_dtypes.bfloat16),
    np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32),  # NaNs with unusual payloads
    np.array([-(2**63), 2**63 - 1], np.int64),
    np.arange(1000, dtype=np.float32),
    np.arange(1000, dtype=np.int8).reshape(2, 500)[:, ::2],  # not contiguous
    np.zeros((0, 7), np.float32),
]


@pytest.mark.parametrize("array", _ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_constants_round_trip_bit_by_bit(array: Any) -> None:
    module = IRModule({"f": Function((), Body((), Constant(array)), ObjectType())})
    result = parse(print_module(module)).graph("f").body.result
    assert isinstance(result, Constant)
    assert result.data.dtype == array.dtype
    assert result.data.shape == array.shape
    assert result.data.tobytes() == array.tobytes()


def test_large_constants_can_stay_outside_the_text() -> None:
    big = np.arange(4096, dtype=np.float32)
    module = IRModule({"f": Function((), Body((), Constant(big)), ObjectType())})
    arrays: dict[str, Any] = {}
    text = print_module(module, arrays)
    assert len(text) < 300
    assert_equal(module, parse(text, arrays))
    with pytest.raises(ParseError, match="is not in the text; pass the arrays"):
        parse(text)


# --- positions in error messages ---------------------------------------------------------------------------------------


def _func(body: str) -> str:
    return f"func f(x: f32[n, 4], c: bool[]) -> object {{\n{body}\n}}"


def _prim(body: str) -> str:
    return f"prim p(A: f32[n], s: scalar f32, out B: f32[n]) {{\n{body}\n}}"


def test_a_dimension_nested_too_deep_is_an_error_of_the_text() -> None:
    nested = "(3*" * 33 + "n" + "".join(f" + 1) // (m + {i})" for i in range(33))
    with pytest.raises(ParseError, match="33 deep, expected at most 32; bind a part of it to a variable"):
        parse(f"func f(x: f32[{nested}]) -> object {{ return x }}")


@pytest.mark.parametrize(
    ("source", "line", "column", "message"),
    [
        ("function", 1, 1, "expected func or prim, found 'function'"),
        ("func f(x f32[n]) -> object { return x }", 1, 10, "expected ':' after parameter x, found 'f32'"),
        ("func f(x: f33[n]) -> object { return x }", 1, 11, "unknown element type f33; similar: f32"),
        ("func f(x: f32[n]) -> f32[m] { return x }", 1, 26, "unknown dimension m; known: n"),
        ("func f(x: f32[n // 0]) -> object { return x }", 1, 17, "n divided by 0, which is always zero"),
        ("func f(x: f32[n, 4 % n]) -> object where n in 0..0 { return x }", 1, 20, "4 divided by n, which is always zero"),
        ("func f(x: f32[n]) -> object where k in 0..4 { return x }", 1, 35, "no parameter or match_cast defines it"),
        ("func f(x: f32[n]) -> object where n in 0..4, n in 1..2 { return x }", 1, 46, "has a range already"),
        ("func f(x: f32[n]) -> object where n in 0..m { return x }", 1, 43, "no parameter or match_cast defines it"),
        ("func f(x: f32[n]) -> object where n in 0.. by 0 { return x }", 1, 47, "at least 1"),
        ("func f(x: object, x: object) -> object { return x }", 1, 19, "x is defined twice"),
        ("func f(x: object) -> object { return x } func f(x: object) -> object { return x }", 1, 47, "f is defined twice"),
        ("func f(if: object) -> object { return x }", 1, 8, "which is a reserved word"),
        ("func f(weight a: object, b: object) -> object { return b }", 1, 26, "weights come last"),
        ("func f(x: f32[n]) -> object { return x } }", 1, 42, "expected 'func' or 'prim', found '}'"),
        ("func f(x: f32[n]) -> object { return x", 1, 39, "expected '}' after the result"),
        ("func f(x: f32[99999999999999999999999]) -> object { return x }", 1, 15, "does not fit in 64 bits"),
        (_func("y = text.smae(x) return y"), 2, 5, "unknown operator text.smae; similar: text.same"),
        (_func("y = text.same(x, axis=1) return y"), 2, 5, "text.same has no attribute axis; it has: axes, keepdims, scale"),
        (_func("y = text.strict(x) return y"), 2, 5, "text.strict needs the attribute axis"),
        (_func("y = text.same(x, axes=0, axes=1) return y"), 2, 26, "attribute axes is given twice"),
        (_func("y = text.same(axes=0, x) return y"), 2, 23, "attributes come last"),
        (_func("y = text.same(xx) return y"), 2, 15, "unknown variable xx"),
        (_func("y = text.same() return y"), 2, 1, "its operator cannot take these operands"),
        (_func("y = @g(x) return y"), 2, 1, "y: unknown function g"),
        (_func("y = match_cast x to i32[n, 4] return y\n z = y.0 return z"), 3, 2, "expected '}'"),
        (_func("y: f32[k, 4] = x return y"), 2, 8, "unknown dimension k"),
        (_func("y = if c { z = match_cast x to f32[k, 4] return z } else { return x } w = shape[k] return y"), 2, 81, "dimension k"),
        (_func("y = if c { z = x return z } else { return z } return y"), 2, 43, "unknown variable z"),
        (_func("x = c return x"), 2, 1, "x is defined twice"),
        (_func("dataflow { y = x return y } return y"), 2, 18, "which is a reserved word"),
        (_func("y = const f32[2] [1.0] return y"), 2, 18, "expected 2 elements, found 1"),
        (_func("y = const i8[1] [300] return y"), 2, 14, "does not fit i8"),
        (_func("y = const i8[1] [3.5] return y"), 2, 18, "3.5 does not fit i8"),
        (_func('y = const f32[2] base64 "AAAA" return y'), 2, 25, "3 bytes, expected 8"),
        (_func('y = const f32[2] base64 "A!" return y'), 2, 25, "not valid base64"),
        (_func('y = text.same(x, axes="a\\x") return y'), 2, 23, "is not a valid string"),
        (_func('y = text.same(x, axes="a'), 2, 23, "a string that does not end"),
        (_func("y = x $"), 2, 7, "unexpected character '$'"),
        (_prim("B[i] = 1.0"), 2, 3, "unknown dimension i"),
        (_prim("for i in n { C[i] = 1.0 }"), 2, 14, "unknown buffer C"),
        (_prim("for i in n { B[i] = t }"), 2, 21, "unknown scalar t; known: s"),
        (_prim("for i in n { B[i] = i }"), 2, 21, "i is an index; as a number write dim(i)"),
        (_prim("for i in n { B[i] = exo(s) }"), 2, 21, "unknown function of scalars exo; similar: exp"),
        (_prim("for i in n { B[i] = pow(s) }"), 2, 21, "pow takes 2 operands; it is called with 1"),
        (_prim("for i in n { for i in 4 { } }"), 2, 18, "i is a variable here already"),
        (_prim("for paralel i in n { }"), 2, 5, "unknown kind of loop paralel; similar: parallel"),
        (_prim("attention(querys=A)"), 2, 11, "unknown operand of attention querys; similar: queries"),
        (_prim("attention(queries=C)"), 2, 19, "unknown buffer C; known: A, B"),
        (_prim("attention(queries=A, queries=A)"), 2, 22, "queries is given twice"),
        (_prim("attention(keys=pages(cache=A))"), 2, 16, "unknown kind of keys pages; similar: paged"),
        (_prim("attention(keys=paged(cache=A, tables=A))"), 2, 16, "paged needs the field layer"),
        (_prim("attention(queries=A, out=B) {scales=1.0}"), 2, 30, "unknown parameter of attention scales; similar: scale"),
        (_prim("attention(queries=A, out=B) {window=1.5}"), 2, 37, "window is '1.5', expected an integer"),
        (_prim("attention(keys=paged(cache=A) {has_values=1})"), 2, 43, "has_values is '1', expected true or false"),
        (_prim("attention(queries=A, out=B)"), 2, 1, "attention needs the field keys"),
        (_prim("alloc loc A: f32[2] { }"), 2, 7, "unknown scope of memory loc; similar: local"),
        (_prim("B[0] = s < s < s"), 2, 14, "comparisons do not chain"),
        (_prim("B[0] = 1.5:i32"), 2, 8, "1.5 does not fit i32"),
        (_prim("B[0] = guard(0 < n ? s : s)"), 2, 16, "expected '<=' in low <= index < high"),
        ("prim p(out A: f32[n], B: f32[n]) { }", 1, 23, "outputs are the last buffers"),
        ("prim p(A: f32[n]) { 3 }", 1, 21, "expected a statement or '}', found '3'"),
    ],
)
def test_errors_point_at_the_place(source: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(source)
    error = caught.value
    assert message in error.message
    assert (error.line, error.column) == (line, column), str(error)
    *_, shown, caret = str(error).splitlines()
    assert caret.strip() == "^"
    assert shown[2:] == source.splitlines()[line - 1]


def test_an_error_in_a_long_line_shows_the_place() -> None:
    source = "func f(x: object) -> object { " + "y = x " * 200 + "$"
    with pytest.raises(ParseError) as caught:
        parse(source)
    *_, shown, caret = str(caught.value).splitlines()
    assert len(shown) < 130
    assert shown[caret.index("^")] == "$"


@pytest.mark.parametrize(
    "source",
    [
        f"func f(x: f32[{'(' * 5000}n{')' * 5000}]) -> object {{ return x }}",
        f"func f(x: f32[{'-' * 5000}n]) -> object {{ return x }}",
        f"func f(x: {'tuple[' * 5000}) -> object {{ return x }}",
        _func(f"y = text.same(x, axes={'[' * 5000}) return y"),
        _func("y: object = if c { " * 5000),
        _func(f"y = const f32[{'1, ' * 5000}] {'[' * 5000} return y"),
        _prim(f"B[0] = {'(' * 5000}"),
        _prim(f"B[0] = {'~' * 5000}s"),
        _prim(f"B[0] = {'s + (' * 5000}"),
        _prim(f"B[0] = {'s + ' * 5000}s"),
        _prim("for i in n { " * 5000),
        _prim("when true { " * 5000),
    ],
)
def test_nesting_is_bounded(source: str) -> None:
    with pytest.raises(ParseError, match=f"nested more than {MAX_NESTING} levels deep|variable here already"):
        parse(source)


def test_long_programs_are_no_deep_ones() -> None:
    body = "\n".join(f"v{i} = text.same({f'v{i - 1}' if i else 'x'})" for i in range(5000))
    sums = " + ".join(["s"] * 90)
    module = parse(_func(f"{body}\nreturn v4999") + _prim(f"B[0] = {sums}"))
    assert_equal(module, parse(print_module(module)))


# --- random text never crashes the parser ------------------------------------------------------------------------------

_WORDS = [
    *sorted(RESERVED),
    *("weight", "out", "scalar", "fn", "tuple", "object", "any", "ndim", "at", "to", "library"),
    *("x", "n", "A", "f", "text.same", "text.strict", "sum", "max", "exp", "guard", "cast", "parallel", "vector", "local"),
    *("base64", "digest", "0", "1", "2.5", '"a"', "+", "-", "*", "/", "//", "%", "<", "<=", "==", "&", "|", "?", "->"),
    *("..", "...", "{", "}", "(", ")", "[", "]", ",", ":", "=", "@", "."),
]


def _never_crashes(source: str) -> None:
    try:
        module = parse(source)
    except ParseError as error:
        assert error.line >= 1
        return
    assert_equal(module, parse(print_module(module)))


@given(st.text(max_size=200))
def test_any_characters(source: str) -> None:
    _never_crashes(source)


@given(st.lists(st.sampled_from(_WORDS), max_size=60))
def test_any_words(words: list[str]) -> None:
    _never_crashes(" ".join(words))


@given(st.data())
def test_damaged_programs(data: st.DataObject) -> None:
    """A program in which random words are replaced, deleted or repeated either parses or raises ParseError."""
    words = data.draw(st.sampled_from([GRAPH, LOOPS])).replace("(", " ( ").replace("[", " [ ").replace(",", " , ").split(" ")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at : at + data.draw(st.integers(0, 2))] = data.draw(st.lists(st.sampled_from(_WORDS + words), max_size=2))
    _never_crashes(" ".join(words))


# --- random programs round-trip ----------------------------------------------------------------------------------------

_N, _M = DimVar("n", 1, 64), DimVar("m", 0, None, 8)
_S, _T = scalars.ScalarParam("s", DType.F32), scalars.ScalarParam("s", DType.I32)
_A, _B = Buffer("A", (_N.dim, _M.dim), DType.F32), Buffer("A", (Dim.of(4),), DType.I32)


_DIM_FNS = [Dim.__add__, Dim.__sub__, Dim.__mul__, dim_min, dim_max, lambda a, b: a // 4 + b, lambda a, b: a % 3 - b]


def _dims(variables: list[DimVar]) -> st.SearchStrategy[Dim]:
    leaves = st.one_of(st.integers(-9, 99).map(Dim.of), st.sampled_from(variables).map(Dim.of))
    return st.one_of(leaves, st.builds(lambda fn, a, b: fn(a, b), st.sampled_from(_DIM_FNS), leaves, leaves))


_FLOATS = st.floats(width=32)
_CONSTS = st.one_of(
    st.builds(scalars.Const, _FLOATS, st.sampled_from([DType.F32, DType.F16, DType.BF16])),
    st.builds(scalars.Const, st.integers(-128, 127), st.sampled_from([DType.I8, DType.I32, DType.I64, DType.U8])),
    st.builds(scalars.Const, st.booleans(), st.just(DType.BOOL)),
)


@st.composite
def _scalars(draw: st.DrawFn, variables: list[DimVar], depth: int = 4) -> Scalar:
    """Draw an expression tree in which element types need not agree."""
    dims = _dims(variables)
    if depth == 0 or draw(st.booleans()):
        return draw(
            st.one_of(
                _CONSTS,
                st.sampled_from([_S, _T]),
                dims.map(scalars.DimScalar),
                st.builds(lambda i, j: scalars.Load(_A, (i, j)), dims, dims),
                dims.map(lambda i: scalars.Load(_B, (i,))),
            )
        )
    inner = _scalars(variables, depth - 1)
    match draw(st.integers(0, 3)):
        case 0:
            fn = draw(st.sampled_from(Fn))
            return scalars.Apply(fn, tuple(draw(inner) for _ in range(ARITY[fn])))
        case 1:
            if draw(st.booleans()):
                return scalars.Element(
                    draw(st.sampled_from([PANEL8, WIDENED4])), draw(dims), tuple(draw(st.lists(inner, min_size=1, max_size=2)))
                )
            return scalars.Cast(draw(inner), draw(st.sampled_from(DType)))
        case 2:
            conditions = draw(st.lists(st.tuples(dims, dims, dims), min_size=1, max_size=2))
            return scalars.Guard(tuple(conditions), draw(inner), draw(inner))
        case _:
            axes: list[tuple[DimVar, Dim]] = []
            for _ in range(draw(st.integers(1, 2))):
                extent = draw(_dims(variables))
                upper = draw(st.sampled_from([extent - 1, None]))
                axes.append((DimVar(draw(st.sampled_from(["r", "i", "n"])), 0, upper), extent))
                variables = [*variables, axes[-1][0]]
            inner = _scalars(variables, depth - 1)
            if len(axes) == 1 and draw(st.booleans()):
                return scalars.Contraction(tuple(axes), draw(inner), draw(inner))
            if draw(st.booleans()):
                dots = tuple(
                    scalars.Contraction(((DimVar("k", 0, 7), Dim.of(8)),), draw(inner), draw(inner)) for _ in range(draw(st.integers(1, 2)))
                )
                begins = tuple(draw(inner) for _ in range(draw(st.sampled_from([0, len(dots)]))))
                optional = draw(st.one_of(st.none(), inner)), draw(st.one_of(st.none(), inner))
                return scalars.GroupedContraction(tuple(axes), dots, begins, draw(inner), *optional)
            return scalars.Reduce(tuple(axes), draw(st.sampled_from(ReduceFn)), draw(inner))


@st.composite
def _stmts(draw: st.DrawFn, variables: list[DimVar], depth: int = 3) -> Stmt:
    dims = _dims(variables)
    kind = draw(st.integers(0, 4)) if depth else 0
    if kind == 0:
        return Store(_A, (draw(dims), draw(dims)), draw(_scalars(variables)))
    if kind == 1:
        extent = draw(dims)
        var = DimVar(draw(st.sampled_from(["i", "j", "n"])), 0, extent - 1)
        return For(var, extent, draw(_stmts([*variables, var], depth - 1)), draw(st.sampled_from(LoopKind)))
    if kind == 2:
        var = DimVar("p", draw(st.integers(-1, 0)), draw(st.sampled_from([None, 7, _N.dim])))
        return Let(var, draw(_scalars(variables)), draw(_stmts([*variables, var], depth - 1)))
    inner = _stmts(variables, depth - 1)
    if kind == 3:
        return Seq(tuple(draw(st.lists(inner, max_size=3))))
    return When(draw(_scalars(variables, 2)), draw(inner), draw(st.one_of(st.none(), inner)))


@given(_stmts([_N, _M]))
def test_any_loop_nest_round_trips(body: Stmt) -> None:
    module = IRModule({"p": PrimFunc((_S, _T, _B, _A), 1, body)})
    text = print_module(module)
    again = parse(text)
    assert_equal(module, again)
    assert print_module(again) == text


_TYPES: st.SearchStrategy[Type] = st.recursive(
    st.one_of(
        st.just(ObjectType()),
        st.builds(TensorType, st.lists(_dims([_N, _M]), max_size=3).map(tuple), st.one_of(st.none(), st.sampled_from(DType))),
        st.builds(lambda dtype, ndim: TensorType(None, dtype, ndim), st.sampled_from(DType), st.one_of(st.none(), st.integers(0, 5))),
        st.builds(ShapeType, st.lists(_dims([_N, _M]), max_size=3).map(tuple)),
        st.builds(ScalarType, st.sampled_from(DType), st.one_of(st.none(), _dims([_N, _M]))),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda fields: TupleType(tuple(fields))),
        st.builds(FuncType, st.one_of(st.none(), st.lists(inner, max_size=2).map(tuple)), inner, st.booleans()),
    ),
    max_leaves=6,
)


@given(st.lists(_TYPES, max_size=4))
def test_any_annotation_round_trips(types: list[Type]) -> None:
    params = (Var("x", tensor([_N, _M], DType.F32)), *(Var("x", t) for t in types))
    module = IRModule({"f": Function(params, Body((), params[0]), ObjectType())})
    text = print_module(module)
    again = parse(text)
    assert_equal(module, again)


def test_bindings_print_alone() -> None:
    (binding,) = parse("func f(x: f32[n, 4]) -> object { y = text.same(x) return y }").graph("f").body.bindings
    assert print_binding(binding) == "y: f32[n, 4] = text.same(x)"
