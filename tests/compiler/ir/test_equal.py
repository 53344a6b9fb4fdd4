"""Structural equality ignores names and finds every other difference."""

from __future__ import annotations

import re

import numpy as np
import pytest

from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.equal import assert_equal, structural_equal, structural_hash
from compiler.ir.graph.atoms import Constant, ScalarValue, Var
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function
from compiler.ir.graph.values import Call, Copy
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Const
from compiler.ir.loops.statements import For, Seq, Store
from compiler.ir.module import IRModule
from compiler.ir.op import OPS, OpDef
from compiler.ir.text.parser import parse
from compiler.ir.types import ObjectType, tensor

SAME = OPS.get("equal.same") or OPS.add("equal.same", OpDef("equal.same", {"axis": 0}, lambda args, attrs: args[0]))
OTHER = OPS.get("equal.other") or OPS.add("equal.other", OpDef("equal.other", {}, lambda args, attrs: args[0]))

PROGRAM = """
func main(x: f32[n, m], y: f32[n, m], c: bool[], f: fn(f32[a]) -> f32[a]) -> object where n in 1..8 {
  dataflow {
    a = equal.same(x, y, axis=1)
    b = call_tir @add(a, y, n) -> f32[n, m]
  }
  d = match_cast b to f32[k, m]
  e: object = if c { r = equal.same(a) return r } else { return d }
  s = shape[n, k]
  g = const f32[2] [1.0, nan]
  t = (a, b, 3, 2.5)
  u_0 = t.1
  return e
}
prim add(A: f32[n, m], B: f32[n, m], k: dim, out C: f32[n, m]) {
  for i in n, j in m { C[i, j] = A[i, j] + (sum(r in n) B[r, j]) + 1.0 }
  for i in n { let p = 3 { alloc local t: f32[4] { t[0] = 2.0 when A[p, 0] < t[0] { C[i, 0] = t[0] } } } }
}
"""

NAMES = {"n": "rows", "m": "n", "k": "cols", "x": "m", "y": "x", "a": "z", "b": "a", "i": "row", "r": "i", "A": "B", "B": "A", "t": "u"}
RENAMED = re.sub(r"\b\w+\b", lambda word: NAMES.get(word[0], word[0]), PROGRAM)


def test_names_do_not_matter() -> None:
    a, b = parse(PROGRAM), parse(RENAMED)
    assert_equal(a, b)
    assert structural_hash(a) == structural_hash(b)


@pytest.mark.parametrize(
    ("old", "new", "path", "left", "right"),
    [
        ("y: f32[n, m], c", "y: f32[m, n], c", "main.params[1].type.shape[0]", "n", "m"),
        ("y: f32[n, m], c", "y: f32[n, 4], c", "main.params[1].type.shape[1]", "m", "4"),
        ("y: f32[n, m], c", "y: f16[n, m], c", "main.params[1].type.dtype", "f32", "f16"),
        ("y: f32[n, m], c", "y: f32[ndim=2], c", "main.params[1].type.shape", "(n, m)", "None"),
        ("c: bool[], f", "c: bool[], weight f", "main.weights[0]", "absent", "f"),
        ("fn(f32[a]) -> f32[a]", "fn(f32[a]) -> f32[b]", "main.params[3].type.result.shape[0]", "a", "b"),
        ("1..8", "1..9", "main.n.upper", "8", "9"),
        ("1..8", "1..8 by 2", "main.n.multiple_of", "1", "2"),
        ("func main", "impure func main", "main.pure", "True", "False"),
        ("equal.same(x, y, axis=1)", "equal.other(x, y)", "main.a.op", "equal.same", "equal.other"),
        ("equal.same(x, y, axis=1)", "equal.same(x, y)", "main.a.attrs.axis", "1", "0"),
        ("equal.same(x, y, axis=1)", "equal.same(x, y, axis=1.0)", "main.a.attrs.axis", "1", "1.0"),
        ("equal.same(x, y, axis=1)", "equal.same(y, x, axis=1)", "main.a.args[0]", "x", "y, but x is already paired with x"),
        ("equal.same(x, y, axis=1)", "equal.same(x, axis=1)", "main.a.args[1]", "y", "absent"),
        ("@add(a, y, n)", "@sub(a, y, n)", "main.b.func", "add", "sub"),
        ("@add(a, y, n) -> f32[n, m]", "@add(a, y, n) -> f32[m, n]", "main.b.out[0].shape[0]", "n", "m"),
        ("call_tir @add(a, y, n)", "call_tir_inplace @add(a, y, n) [0]", "main.b.inplace[0]", "absent", "0"),
        ("dataflow", "captured", "main.kind", "dataflow", "captured"),
        ("s = shape[n, k]", "s = shape[n, m]", "main.s.dims[1]", "k", "m"),
        ("return r }", "return a }", "main.e.then.result", "r", "a"),
        ("return d }", "z = d return z }", "main.e.orelse.z", "absent", "z"),
        ("[1.0, nan]", "[1.5, nan]", "main.g", "const f32[2] [1.0, nan]", "const f32[2] [1.5, nan]"),
        ("const f32[2] [1.0, nan]", "equal.same(a)", "main.g", "const f32[2] [1.0, nan]", "equal.same(a)"),
        ("3, 2.5)", "4, 2.5)", "main.t.fields[2].value", "3", "4"),
        ("3, 2.5)", "3, 2.5:f16)", "main.t.fields[3].dtype", "f32", "f16"),
        ("t.1", "t.0", "main.u_0.index", "1", "0"),
        ("return e\n", "return c\n", "main.result", "e", "c"),
        ("A[i, j] +", "A[i, j] -", "add.body[0].body.body.value.args[0].fn", "add", "sub"),
        ("A[i, j] +", "B[i, j] +", "add.body[0].body.body.value.args[0].args[0].buffer", "A", "B"),
        ("A[i, j] +", "A[j, i] +", "add.body[0].body.body.value.args[0].args[0].indices[0]", "i", "j"),
        ("sum(r in n)", "max(r in n)", "add.body[0].body.body.value.args[0].args[1].fn", "sum", "max"),
        ("sum(r in n)", "sum(r in m)", "add.body[0].body.body.value.args[0].args[1].axes[0][0].r.upper", "n - 1", "m - 1"),
        ("+ 1.0", "+ 1.0:f16", "add.body[0].body.body.value.args[1].dtype", "f32", "f16"),
        ("for i in n {", "for parallel i in n {", "add.body[1].kind", "serial", "parallel"),
        ("let p = 3", "let p within 0..3 = 3", "add.body[1].body.var.p.upper", "None", "3"),
        ("alloc local", "alloc shared", "add.body[1].body.body.buffer.scope", "local", "shared"),
        ("k: dim, out C", "k: scalar i64, out C", "add.params[2]", "k", "ScalarParam"),
        ("B: f32[n, m], k: dim, out", "out B: f32[n, m], k: dim, out", "add.num_outputs", "1", "2"),
    ],
)
def test_the_first_difference_is_named(old: str, new: str, path: str, left: str, right: str) -> None:
    assert PROGRAM.count(old) == 1, old
    a, b = parse(PROGRAM), parse(PROGRAM.replace(old, new))
    difference = structural_equal(a, b)
    assert difference is not None
    assert difference.path == path
    assert difference.left.startswith(left)
    assert difference.right.startswith(right)
    assert structural_equal(b, a) is not None
    assert structural_hash(a) != structural_hash(b)
    with pytest.raises(AssertionError, match="the programs differ at"):
        assert_equal(a, b)


def test_functions_are_compared_by_name() -> None:
    a, b = parse("func f(x: object) -> object { return x }"), parse("func g(x: object) -> object { return x }")
    difference = structural_equal(a, b)
    assert difference is not None
    assert difference.path == "f"
    assert structural_equal(a.graph("f"), b.graph("g")) is None
    assert structural_hash(a) != structural_hash(b)


def test_the_order_of_functions_does_not_matter() -> None:
    f, g = "func f(x: object) -> object { return x }", "func g(x: f32[n]) -> object { return x }"
    assert_equal(parse(f + g), parse(g + f))
    assert structural_hash(parse(f + g)) == structural_hash(parse(g + f))


def test_one_variable_is_not_two() -> None:
    """A program with two variables never equals a program that uses one variable twice, because variables are paired in both directions."""
    two = parse("func f(x: f32[n], y: f32[m]) -> object { return x }")
    one = parse("func f(x: f32[n], y: f32[n]) -> object { return x }")
    assert structural_equal(one, two) is not None
    assert structural_equal(two, one) is not None


def test_variables_that_stand_alone_later_are_paired_first() -> None:
    a = parse("func f(x: f32[n * 2 + m], y: f32[n], z: f32[m]) -> object { return x }")
    b = parse("func f(x: f32[m * 2 + n], y: f32[m], z: f32[n]) -> object { return x }")
    assert_equal(a, b)
    c = parse("func f(x: f32[n + m * 2], y: f32[n], z: f32[m]) -> object { return x }")
    assert structural_equal(a, c) is not None


def test_dimensions_among_the_parameters_of_a_nest_are_paired_first() -> None:
    """Equality does not depend on whether a variable's range is declared, although a declaration creates the variable earlier and thereby
    changes the order of the terms in a sum."""
    a, b = (parse(f"prim f(A: f32[n + m], n: dim, m: dim, out C: f32[]) {where} {{ C[] = A[n] }}") for where in ("", "where m in 0.."))
    assert_equal(a, b)
    c = parse("prim f(A: f32[n + m], m: dim, n: dim, out C: f32[]) { C[] = A[n] }")
    assert structural_equal(a, c) is not None


def _function(body: Body, *params: Var) -> Function:
    return Function(params, body, ObjectType())


def test_ways_to_say_the_same() -> None:
    x, y, z = Var("x", ObjectType()), Var("y", ObjectType()), Var("z", ObjectType())
    first, second = Binding(y, x), Binding(z, Copy(y))
    one_block = _function(Body((Block((first, second)),), z), x)
    two_blocks = _function(Body((Block((first,)), Block(()), Block((Binding(z, y),))), z), x)
    assert structural_equal(one_block, two_blocks) is None
    flow = _function(Body((Block((first, second), BlockKind.DATAFLOW),), z), x)
    assert structural_equal(one_block, flow) is not None

    calls = [_function(Body((Block((Binding(y, Call(SAME, (x,), attrs)),)),), y), x) for attrs in ({}, {"axis": 0}, {"axis": 1})]
    assert structural_equal(calls[0], calls[1]) is None
    assert structural_equal(calls[0], calls[2]) is not None

    literals = [_function(Body((), ScalarValue(value, "i64"))) for value in (3, DimVar("n", 3).dim * 0 + 3)]
    assert structural_equal(*literals) is None


def _hash(func: PrimFunc) -> str:
    return structural_hash(IRModule({"p": func}))


def test_sequences_are_flat() -> None:
    n = DimVar("n")
    buffer = Buffer("A", (n.dim,), DType.F32)
    a, b, c = (Store(buffer, (n.dim * 0,), Const(v, DType.F32)) for v in (1, 2.0, 3))
    nested = PrimFunc((buffer,), 1, Seq((Seq((a,)), Seq((Seq(()), b, Seq((c,)))))))
    flat = PrimFunc((buffer,), 1, Seq((a, b, c)))
    assert structural_equal(nested, flat) is None
    assert _hash(nested) == _hash(flat)
    assert structural_equal(flat, PrimFunc((buffer,), 1, Seq((a, c, b)))) is not None
    assert structural_equal(PrimFunc((buffer,), 1, Seq((a,))), PrimFunc((buffer,), 1, a)) is None


def test_a_loop_variable_used_twice_equals_two() -> None:
    """Two consecutive loops with one variable equal two loops with different variables, because a variable's pairing ends with its loop."""
    n = DimVar("n")
    buffer = Buffer("A", (n.dim,), DType.F32)
    i, j = (DimVar(name, 0, n - 1) for name in "ij")

    def loop(var: DimVar) -> For:
        return For(var, n.dim, Store(buffer, (var.dim,), Const(1.0, DType.F32)))

    shared = PrimFunc((buffer,), 1, Seq((loop(i), loop(i))))
    apart = PrimFunc((buffer,), 1, Seq((loop(i), loop(j))))
    assert structural_equal(shared, apart) is None
    assert structural_equal(apart, shared) is None
    assert _hash(shared) == _hash(apart)


def test_constants_are_compared_by_bits() -> None:
    def constant(array: object) -> IRModule:
        return IRModule({"f": _function(Body((), Constant(np.asarray(array, np.float32))))})

    assert structural_equal(constant([np.nan]), constant([np.nan])) is None
    assert structural_equal(constant([0.0]), constant([-0.0])) is not None
    assert structural_equal(constant([1.0]), constant([[1.0]])) is not None
    big = np.arange(4096)
    assert structural_hash(constant(big)) == structural_hash(constant(big.copy()))
    big[7] = 0
    assert structural_hash(constant(big)) != structural_hash(constant(np.arange(4096)))


def test_the_hash_ignores_when_variables_were_made() -> None:
    m1, n1 = DimVar("m"), DimVar("n")
    n2, m2 = DimVar("n"), DimVar("m")
    modules = [
        IRModule({"f": _function(Body((), ScalarValue(n * m + n)), Var("x", tensor([n, m], DType.F32)))}) for n, m in ((n1, m1), (n2, m2))
    ]
    assert_equal(*modules)
    assert structural_hash(modules[0]) == structural_hash(modules[1])


def test_many_bindings_are_no_depth() -> None:
    body = "\n".join(f"v{i} = equal.same({f'v{i - 1}' if i else 'x'})" for i in range(3000))
    text = f"func f(x: f32[n]) -> object {{ {body} return v2999 }}"
    assert_equal(parse(text), parse(text))


def test_a_shared_value_is_equal_to_its_copies() -> None:
    """A shared value equals separate copies of this value. The comparison visits each pair of nodes once, although 2**60 paths lead to the
    nodes here."""
    kernel = "prim f(A: f32[n], out B: f32[n]) {{ for i in n {{ B[i] = {} }} }}"
    copies, shared = "exp(A[i]) + exp(A[i])", "let t = exp(A[i]) in t + t"
    assert_equal(parse(kernel.format(copies)), parse(kernel.format(shared)))
    doublings = ", ".join(["t0 = A[i]", *(f"t{k + 1} = t{k} + t{k}" for k in range(60))])
    assert_equal(*(parse(kernel.format(f"let {doublings} in t60 + 1.0")) for _ in range(2)))
    difference = structural_equal(*(parse(kernel.format(f"let {doublings} in t60 + {end}")) for end in ("1.0", "2.0")))
    assert difference is not None and difference.right == "2.0"
