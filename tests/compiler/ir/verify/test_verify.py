"""For each rule of the verifier, a program that breaks the rule is refused. A test fails if a rule has no such program."""

from __future__ import annotations

import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import ScalarValue, ShapeValue, Var
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function, If, Value
from compiler.ir.graph.values import Alloc, Call, CallTir, Copy, Launch, MatchCast, TupleGet
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Const, Load, ScalarParam
from compiler.ir.loops.statements import Allocate, For, Seq, Stmt, Store
from compiler.ir.module import IRModule
from compiler.ir.op import OPS, REQUIRED, OpDef
from compiler.ir.text.parser import parse
from compiler.ir.types import ObjectType, ScalarType, TensorType, TupleType, Type, tensor
from compiler.ir.verify.graph import GRAPH_RULES
from compiler.ir.verify.loops import LOOP_RULES
from compiler.ir.verify.module import VerifyError, dims_have_one_function, functions_have_plain_names, verify

SAME = OPS.get("verify.same") or OPS.add("verify.same", OpDef("verify.same", {"axis": REQUIRED}, lambda args, attrs: args[0]))
PRINT = OPS.get("verify.print") or OPS.add("verify.print", OpDef("verify.print", {}, lambda args, attrs: args[0], pure=False))

PRIMS = """
prim add(A: f32[n, m], B: f32[n, m], out C: f32[n, m]) { for i in n, j in m { C[i, j] = A[i, j] + B[i, j] } }
prim scale(A: f32[n], s: scalar f32, k: dim, out B: f32[n]) { for i in n { B[i] = A[i] * s + cast(f32, dim(k)) } }
prim square(A: f32[n, n], out B: f32[n]) { for i in n { B[i] = A[i, i] } }
"""

NOISY = "impure func noisy(a: object) -> object { return a }"

SOUND = (
    PRIMS
    + """
func main(x: f32[n, 4], y: f32[n, 4], c: bool[], s: shape[m], weight w: f32[m]) -> f32[ndim=2] where n in 1..8 {
  dataflow {
    a = call_tir @add(x, y) -> f32[n, 4]
    b = verify.same(a, axis=0)
    v = call_tir @scale(w, 0.5, n) -> f32[m]
    p = call_tir_inplace @add(a, b) [0] -> f32[n, 4]
    h = @helper(p)
  }
  d = match_cast b to f32[k, 4]
  e = call_tir @add(d, d) -> f32[k, 4]
  r: f32[ndim=2] = if c {
    q = match_cast e to f32[l, 4]
    q2 = call_tir @add(q, q) -> f32[l, 4]
    return q2
  } else {
    return x
  }
  t = (x, c, r)
  u = t.2
  mem = alloc f32[n, 4] at 64*n
  captured { launch @add(x, y, mem) launch library "host.check"(mem) }
  return u
}
func helper(x: f32[p, q]) -> f32[p, q] { return x }
impure func noisy(x: f32[p], g: impure fn(f32[a]) -> f32[a]) -> object { y = verify.print(x) z = call g(y) return z }
prim loops(A: f32[n, m], I: i32[n], eps: scalar f32, k: dim, out B: f32[n, m], out F: bool[]) where k in 0..n {
  for parallel i in n {
    alloc local acc: f32[16] {
      for vector l in 16 { acc[l] = max(A[i, l], eps) }
      for unroll l in 16 { B[i, l] = acc[l] }
    }
    for j in m { let p within 0..n - 1 = I[i] { B[i, j] = sum(r in m, q in r + 1) A[p, q] * guard(0 <= k < n ? A[k, r] : 0.0) } }
    when I[i] < 3:i32 & ~(eps <= 0.0) { B[i, 0] = select(eps < 1.0, 1.0, pow(eps, 2.0)) } else { tile "stream"(B[i, 0], A[i, 0]) }
  }
  F[] = any(i in n) I[i] == 0:i32
}
"""
)


def test_a_sound_module_passes() -> None:
    verify(parse(SOUND))


# --- rules for graph functions -----------------------------------------------------------------------------------------

F32 = DType.F32
n, m, loose = DimVar("n"), DimVar("m"), DimVar("loose")
x, c = Var("x", tensor([n, 4], F32)), Var("c", TensorType((), DType.BOOL))
y, z = Var("y", tensor([n, 4], F32)), Var("z", tensor([n, 4], F32))
OTHER = Var("other", tensor([n, 4], F32))
X = tensor([n, 4], F32)


def func(*bindings: Binding, result: object = x, kind: BlockKind = BlockKind.PLAIN, params: tuple[Var, ...] = (x, c)) -> Function:
    return Function(params, Body((Block(bindings, kind),), result), ObjectType())  # pyright: ignore[reportArgumentType]


def bind(value: Value, type_: Type = X, name: str = "y") -> Binding:
    return Binding(Var(name, type_), value)


def side(*bindings: Binding, result: Var) -> Body:
    return Body((Block(bindings),), result)


def text(body: str, params: str = "x: f32[n, 4], c: bool[]", head: str = "func") -> Function:
    return parse(f"{PRIMS} {NOISY} {head} main({params}) -> object {{ {body} }}").graph("main")


_defined_in_branch = bind(Copy(x), name="inner")

GRAPH_BREACHES: dict[str, list[tuple[Function, str]]] = {
    "operands_are_atoms": [
        (func(bind(Copy(Call(SAME, (x,))))), "is not an atom"),  # pyright: ignore[reportArgumentType]  # an operand that is no atom
        (func(result=Call(SAME, (x,))), "is not an atom"),
    ],
    "values_are_defined_once": [
        (func(Binding(y, Copy(x)), Binding(y, Copy(x))), "y is defined a second time"),
        (func(Binding(x, Copy(c))), "x is defined a second time"),
        (func(params=(x, x)), "parameter x appears twice"),
        (func(bind(If(c, side(Binding(y, Copy(x)), result=y), side(Binding(y, Copy(x)), result=y)), name="w")), "y is defined a second"),
    ],
    "values_are_defined_before_use": [
        (func(Binding(y, Copy(z)), Binding(z, Copy(x))), "z is used, but not defined"),
        (func(Binding(y, Copy(y))), "y is used"),
        (func(result=OTHER), "other is used"),
        (func(bind(If(c, side(_defined_in_branch, result=x), side(result=x))), result=_defined_in_branch.var), "inner is used"),
        (func(bind(If(c, side(_defined_in_branch, result=x), side(result=_defined_in_branch.var)))), "inner is used"),
    ],
    "signature_defines_its_dims": [
        (func(params=(x, Var("w", tensor([m * 2], F32)))), "parameter w mentions dimension m"),
        (func(params=(x, Var("w", tensor([DimVar("k", 0, loose.dim)], F32)))), "the range of k mentions dimension loose"),
        (Function((x,), Body((), x), tensor([loose], F32)), "the annotation of the result mentions dimension loose"),
        (func(params=(x, Var("w", ScalarType(DType.I64, m + 1)))), "dimension m"),
    ],
    "dims_are_defined_before_use": [
        (func(bind(Copy(ShapeValue((loose.dim,))))), "the value mentions dimension loose"),
        (func(bind(CallTir("add", (x, x), (tensor([loose, 4], F32),)))), "the value mentions dimension loose"),
        (func(bind(Call(SAME, (x,), {"axis": (loose.dim,)}))), "the value mentions dimension loose"),
        (func(bind(Alloc(X, loose.dim))), "the value mentions dimension loose"),
        (func(bind(MatchCast(x, tensor([loose * 2, 4], F32)))), "the value mentions dimension loose"),
        (func(bind(Copy(x), tensor([loose, 4], F32))), "the annotation mentions dimension loose"),
        (func(result=ScalarValue(loose.dim)), "the result mentions dimension loose"),
        (func(bind(MatchCast(x, tensor([DimVar("k", 0, loose.dim), 4], F32)), ObjectType())), "the range of k mentions"),
        (
            # Here a use of m comes before the match_cast that defines m. Fusion must never produce this order.
            func(
                bind(CallTir("add", (x, x), (tensor([m, 4], F32),)), tensor([m, 4], F32)),
                bind(MatchCast(x, tensor([m, 4], F32)), name="z"),
            ),
            "the value mentions dimension m",
        ),
        (
            func(
                bind(If(c, side(bind(MatchCast(x, tensor([m, 4], F32))), result=x), side(result=x))),
                bind(Copy(ShapeValue((m.dim,))), ObjectType()),
            ),
            "dimension m",
        ),
    ],
    "launches_have_no_value": [
        (func(Binding(y, Launch("add", (x, x, x))), Binding(z, Copy(y))), "y is used, but it names a launch"),
    ],
    "weights_are_parameters": [(Function((x,), Body((), x), ObjectType(), True, 2), "num_inputs is 2, expected 0 to 1")],
    "blocks_are_straight_lines": [
        (func(bind(If(c, side(result=x), side(result=x))), kind=BlockKind.DATAFLOW), "an if is in a dataflow block"),
        (func(bind(If(c, side(result=x), side(result=x))), kind=BlockKind.CAPTURED), "an if is in a captured block"),
    ],
    "functions_exist": [
        (text("y = call_tir @ad(x, x) -> f32[n, 4] return y"), "no loop-level function 'ad'; known: add, scale, square"),
        (text("y = call_tir @main(x, x) -> f32[n, 4] return y"), "not a loop-level function 'main'"),
        (text("launch @ad(x) return x"), "no loop-level function 'ad'"),
        (text("y: object = @nothing(x) return y"), "no graph-level function 'nothing'; known: noisy, main"),
        (text("y: object = @add(x) return y"), "not a graph-level function 'add'"),
        (text("return @add"), "not a graph-level function 'add'"),
    ],
    "dataflow_is_pure": [
        (text("dataflow { y = verify.print(x) } return y", head="impure func"), "the impure operator verify.print is in a dataflow"),
        (text("dataflow { launch @add(x, x, x) } return x"), "a launch, which writes memory, is in a dataflow block"),
        (text("dataflow { y: object = @noisy(x) } return y", head="impure func"), "a call of an impure function is in"),
    ],
    "pure_functions_do_nothing_impure": [
        (text("y = verify.print(x) return y"), "the impure operator verify.print is in a function that is declared pure"),
        (text("y: object = @noisy(x) return y"), "a call of an impure function"),
        (text("y = call g(x) return y", "x: f32[n, 4], g: impure fn(object) -> object"), "a call of an impure function"),
    ],
    "attributes_are_known": [
        (func(bind(Call(SAME, (x,), {"axis": 0, "axes": 1}))), "verify.same has no attribute axes; it has: axis"),
        (func(bind(Call(SAME, (x,)))), "verify.same needs the attribute axis"),
    ],
    "scalars_suit_their_type": [
        (func(result=ScalarValue(1.5, "i64")), "scalar 1.5 does not fit i64"),
        (func(result=ScalarValue(n.dim, "f32")), "scalar n does not fit f32"),
        (func(result=ScalarValue(True, "i32")), "scalar True does not fit i32"),
        (func(result=ScalarValue(1, "bool")), "scalar 1 does not fit bool"),
        (func(result=ScalarValue(128, "i8")), "scalar 128 does not fit i8"),
        (func(result=ScalarValue(-1, "u32")), "scalar -1 does not fit u32"),
        (func(result=ScalarValue(Dim.of(2**63), "i64")), "scalar 9223372036854775808 does not fit i64"),
    ],
    "annotations_hold": [
        (func(bind(Copy(x), tensor([n, 5], F32))), "annotated f32[n, 5], but it is f32[n, 4]: dimension 1: 5 against 4"),
        (func(bind(Copy(x), tensor([n, 4], DType.F16))), "element type: f16 against f32"),
        (func(bind(TupleGet(x, 0))), "field 0 is read from"),
        (func(bind(MatchCast(x, tensor([n, 5], F32)), tensor([n, 5], F32))), "match_cast can never succeed"),
        (text("y: object = @main(x) return y"), "takes 2 arguments; it is called with 1"),
        (text("y: object = @main(c, c) return y"), "argument 0 is"),
        (Function((x,), Body((), x), tensor([n, 5], F32)), "the result contradicts its annotation f32[n, 5]"),
    ],
    "branches_join": [
        (text("y: f32[n, 4] = if c { return x } else { return c } return y"), "the second branch gives bool[]"),
        (text("y: f32[n, 4] = if c { z = match_cast x to f32[k, 4] return z } else { return x } return y"), "first branch gives f32[k, 4]"),
    ],
    "conditions_are_bool": [
        (text("y: object = if x { return x } else { return c } return y"), "the condition is f32[n, 4], expected a bool scalar"),
        (text("y: object = if 3 { return x } else { return c } return y"), "the condition is scalar[i64, 3]"),
    ],
    "calls_fit_their_prims": [
        (text("y = call_tir @add(x) -> f32[n, 4] return y"), "the loop-level function takes 2 arguments; it is called with 1"),
        (text("y = call_tir @add(x, c) -> f32[n, 4] return y"), "argument for B: element type bool, expected f32"),
        (text("z = match_cast x to f32[k, 4] y = call_tir @scale(z, 1.0, n) -> f32[n] return y"), "argument for A: rank 2, expected 1"),
        (text("y = call_tir @add(x, x) -> f32[n, 5] return y"), "argument for C: dimension 1 is 5, expected 4"),
        (text("y = call_tir @add(x, x) -> (f32[n, 4], f32[n]) return y"), "the loop-level function has 1 outputs; the call has 2"),
        (text("y = call_tir @add(x, x) -> f32[ndim=2] return y"), "expected a tensor of known shape, so that it can be allocated"),
        (text("y = call_tir @scale(v, 1.0:f16, 3) -> f32[n] return y", "v: f32[n]"), "argument for s: a scalar f16, expected f32"),
        (text("y = call_tir @scale(v, 1.0, 3:i32) -> f32[n] return y", "v: f32[n]"), "argument for k: scalar[i32], expected a scalar i64"),
        (text("y = call_tir @scale(v, v, 3) -> f32[n] return y", "v: f32[n]"), "argument for s: f32[n], expected a scalar"),
        (text("y = call_tir @scale(o, 1.0, 3) -> f32[4] return y", "o: object"), "check it with match_cast first"),
        (text("y = call_tir @scale(o, 1.0, 3) -> f32[4] return y", "o: f32[...]"), "a tensor of unknown rank"),
        (text("y = call_tir @square(v) -> f32[3] return y", "v: f32[3, 4]"), "argument for A: dimension 1 is 4, expected 3"),
        (text("y = call_tir_inplace @add(x, x) [2] -> f32[n, 4] return y"), "reuses argument 2, expected the index of a tensor among"),
        (text("y = call_tir_inplace @add(x, x) [0, 1] -> f32[n, 4] return y"), "inplace has 2 entries for 1 outputs"),
        (text("y = call_tir_inplace @scale(w, 1.0, 3) [0] -> f32[n] return y", "x: f32[n], w: f16[n]"), "element type f16"),
        (text("m = alloc f32[n, 4] launch @add(x, m) return m"), "the loop-level function takes 3 arguments; it is called with 2"),
        (text("m = alloc f32[n, 5] launch @add(x, x, m) return m"), "argument for C: dimension 1 is 5, expected 4"),
    ],
    "allocations_have_a_size": [
        (text("m = alloc f32[ndim=2] return m"), "f32[ndim=2] is allocated, expected a tensor of known shape"),
        (text("m = alloc any[n] return m"), "any[n] is allocated"),
        (func(bind(Alloc(TupleType(())), TupleType(()))), "tuple[] is allocated"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "function", "message"),
    [(rule, function, message) for rule, breaches in GRAPH_BREACHES.items() for function, message in breaches],
)
def test_graph_rules(rule: str, function: Function, message: str) -> None:
    module = parse(PRIMS + NOISY).update({"main": function})
    with pytest.raises(VerifyError) as caught:
        verify(module)
    assert caught.value.rule == rule, str(caught.value)
    assert message in str(caught.value)
    assert str(caught.value).startswith("function 'main'")


# --- rules for loop nests ----------------------------------------------------------------------------------------------

A, B = Buffer("A", (n.dim,), F32), Buffer("B", (n.dim,), F32)
i = DimVar("i", 0, n - 1)
ONE, ZERO = Const(1.0, F32), Dim.of(0)


def prim(body: Stmt, *params: Buffer | ScalarParam | DimVar, num_outputs: int = 1) -> PrimFunc:
    return PrimFunc(params or (A, B), num_outputs, body)


def loop(body: str, params: str = "A: f32[n], I: i32[n], s: scalar f32, out B: f32[n]") -> PrimFunc:
    return parse(f"prim p({params}) {{ B[0] = 0.0 {body} }}").prim("p")


def in_loop(body: Stmt, var: DimVar = i) -> For:
    return For(var, n.dim, body)


def attention(
    *,
    q: str = "f32[t, 4, 8]",
    cache: str = "f32[2, 2, 9, 2, 128]",
    ids: str = "i32[t]",
    at: str = "i32[t]",
    o: str = "f32[t, 4, 8]",
    keys: str = "cache=cache, tables=tables, layer=1",
    has_values: str = "true",
    more: str = ", positions=at",
    parameters: str = "scale=0.5",
    before: str = "",
) -> PrimFunc:
    text = f"""
prim p(q: {q}, cache: {cache}, tables: i32[s, m], ids: {ids}, at: {at}, scales: f32[2, 2, 9, 2, 16], sinks: f32[5], out o: {o}) {{
  {before}
  attention(queries=q, keys=paged({keys}) {{has_values={has_values}}}, sequences=ids, out=o{more}) {{{parameters}}}
}}
"""
    return parse(text).prim("p")


_STORE = Store(B, (ZERO,), ONE)

LOOP_BREACHES: dict[str, list[tuple[PrimFunc, str]]] = {
    "signature_is_sound": [
        (prim(_STORE, num_outputs=3), "num_outputs is 3, expected 0 to 2"),
        (prim(_STORE, B, B), "parameter B appears twice"),
        (prim(_STORE, Buffer("L", (Dim.of(4),), F32, Scope.LOCAL), B), "parameter L is local memory"),
    ],
    "signature_determines_its_dims": [
        (prim(_STORE, Buffer("A", (m * 2,), F32), B), "dimension m in the shape of A is neither a parameter"),
        (prim(_STORE, DimVar("k", 0, m.dim), B), "the range of k mentions m"),
    ],
    "variables_are_bound_once": [
        (prim(Seq((in_loop(in_loop(_STORE)),))), "variable i is bound inside its own scope"),
        (prim(For(n, Dim.of(4), _STORE)), "variable n is bound inside its own scope"),
    ],
    "dims_are_in_scope": [
        (prim(Store(B, (i.dim,), ONE)), "dimension i is not in scope"),
        (prim(Seq((in_loop(_STORE), Store(B, (i.dim,), ONE)))), "dimension i"),
        (prim(Store(B, (ZERO,), Load(A, (loose.dim,)))), "dimension loose"),
        (prim(For(i, loose.dim, _STORE)), "dimension loose"),
        (prim(Allocate(Buffer("t", (loose.dim,), F32), _STORE)), "dimension loose"),
        (prim(in_loop(_STORE, DimVar("j", 0, loose.dim))), "dimension loose"),
    ],
    "buffers_are_in_scope": [
        (prim(Store(A, (ZERO,), ONE), B), "buffer A is neither a parameter nor allocated"),
        (prim(Store(B, (ZERO,), Load(A, (ZERO,))), B), "buffer A is neither a parameter nor allocated"),
        (prim(Seq((Allocate(A, _STORE), Store(A, (ZERO,), ONE))), B), "buffer A is neither"),
        (prim(Allocate(A, Allocate(A, _STORE)), B), "buffer A is allocated inside its own scope"),
    ],
    "scalars_are_parameters": [(prim(Store(B, (ZERO,), ScalarParam("s", F32))), "scalar s is not a parameter")],
    "ranks_agree": [
        (loop("B[0, 0] = 1.0"), "2 indices for B, which has rank 1"),
        (loop("B[0] = A[]"), "0 indices for A, which has rank 1"),
        (loop('tile "stream"(B[0], A[0, 0])'), "2 indices for A"),
    ],
    "operands_have_the_right_number": [(prim(Store(B, (ZERO,), Apply(Fn.ADD, (ONE,)))), "add takes 2 operands; it is called with 1")],
    "numbers_suit_their_type": [
        (prim(Store(B, (ZERO,), Const(1.5, DType.I32))), "1.5 does not fit i32"),
        (prim(Store(B, (ZERO,), Const(128, DType.I8))), "128 does not fit i8"),
        (prim(Store(B, (ZERO,), Const(-1.0, DType.U8))), "-1.0 does not fit u8"),
    ],
    "element_types_agree": [
        (loop("B[0] = 1.0:f16"), "f16 is stored to B, which holds f32"),
        (loop("let p = s { B[p] = s }"), "p is f32, expected an integer"),
        (loop("when s { }"), "the condition is f32, expected bool"),
        (loop("B[0] = s + 1.0:f16"), "add of f32, f16; cast them to one type"),
        (loop("B[0] = select(s, s, s)"), "select is decided by f32, expected bool"),
        (loop("B[0] = cast(f32, 1:i32 / 2:i32)"), "div of i32, expected a float"),
        (loop("B[0] = cast(f32, exp(1:i32))"), "exp of i32, expected a float"),
        (loop("B[0] = cast(f32, bits(1:i32))"), "bits of i32, expected f32"),
        (loop("B[0] = s // s"), "floordiv of f32, expected an integer"),
        (loop("B[0] = s & s"), "and of f32, expected bool or an integer"),
        (loop("B[0] = cast(f32, true + false)"), "add of bool, expected a number"),
        (loop("B[0] = guard(0 <= 0 < n ? s : 1:i32)"), "guard chooses between f32 and i32"),
        (loop("B[0] = cast(f32, any(r in n) A[r])"), "any folds f32, expected bool"),
        (loop("B[0] = cast(f32, sum(r in n) A[r] < s)"), "sum folds bool, expected a number"),
        (loop("B[0] = contract_groups(g in 2) [contract(r in n) A[r] by A[r]] by 1.0"), "contract_groups sums f32, expected i32"),
        (loop("B[0] = contract_groups(g in 2) [contract(r in n) 1:i32 by 2:i32] by 1"), "contract_groups multiplies by i64, expected f32"),
        (
            loop("B[0] = contract_groups(g in 2) [contract(r in n) 1:i32 by 2:i32] from [1:i32, 2:i32] by 1.0"),
            "contract_groups has 1 sums and 2 initial values; expected 1 or 2 sums, and as many values or none",
        ),
        (
            loop("B[0] = contract_groups(g in 2) [contract(r in n) 1:i32 by 2:i32, contract(r in n) 1:i32 by 2:i32] when 1 by 1.0"),
            "the condition of the second sum of contract_groups is i64, expected bool",
        ),
        (
            loop("B[0] = contract_groups(g in 2) [contract(r in n) 1:i32 by 2:i32] by 1.0 beside 2"),
            "the term of contract_groups is i64, expected f32",
        ),
        (loop("B[0] = contract(r in n) A[r] by 2"), "contract of f32 by i64; cast them to one type"),
        (loop("B[0] = cast(f32, contract(r in n) true by false)"), "contract of bool, expected numbers"),
        (loop("B[0] = contract(r in n, q in 2) A[r] by A[q]"), "contract runs over 2 axes, expected 1"),
    ],
    "attention_stands_alone": [(attention(before="o[0, 0, 0] = 1.0"), "attention is one of several statements")],
    "attention_operands_agree": [
        (attention(q="f32[t, 4]"), "queries q has rank 2, expected 3: [tokens, heads, size]"),
        (attention(o="f32[t, 4, 16]"), "out o has 16 size, expected 8, the size of queries"),
        (attention(cache="f32[2, 3, 9, 2, 128]"), "cache cache has 3 2, expected 2"),
        (
            attention(has_values="false", cache="f32[2, 1, 9, 2, 128]", o="f32[t, 4, 9]"),
            "out o has values of 9 elements, expected at most 8, the size of a key",
        ),
        (attention(cache="f32[2, 2, 9, 3, 128]"), "queries q have 4 heads, expected a multiple of 3, the kv heads of cache"),
        (attention(cache="f32[2, 2, 9, 0, 128]"), "queries q have 4 heads, expected a multiple of 0, the kv heads of cache"),
        (attention(ids="f32[t]"), "sequences ids holds f32, expected integers"),
        (attention(q="i32[t, 4, 8]"), "queries q holds i32, expected floats"),
        (attention(cache="i8[2, 2, 9, 2, 128]"), "cache cache is i8 and has no scales"),
        (attention(keys="cache=cache, tables=tables, layer=0.5"), "layer is f32, expected an integer"),
        (attention(keys="cache=cache, tables=tables, layer=0, scales=scales"), "cache cache is f32 and has scales scales"),
        (attention(at="i32[t, 3]"), "positions at has 3 2, expected 2"),
        (attention(at="i32[t, 2]", parameters="scale=0.5, window=4"), "window is 4 and positions have two columns, expected 0"),
        (attention(more=""), "positions are missing, and pages do not tell how long a sequence is"),
        (attention(more=", positions=at, sinks=sinks"), "sinks sinks has 5 heads, expected 4, the heads of queries"),
        (attention(parameters="scale=0.5, window=-1"), "window is -1, expected a number of positions"),
        (attention(parameters="scale=0.5, softcap=-2.0"), "softcap is -2.0, expected a cap above 0"),
    ],
    "tiles_have_their_operands": [
        (loop('tile "stream"(B[0])'), "tile stream: it has 1 operands, expected 2: place, lanes"),
        (loop('tile "stream"(B[0], I[0])'), "tile stream: lanes is in I, which holds i32, expected f32"),
        (loop('tile "stream"(B[0], A[0]) dims(n)'), "tile stream: it has 1 dimensions, expected 0: none"),
        (loop('tile "amx_configure"() {rows=33}'), "tile amx_configure: rows are 33, expected 1 to 32"),
    ],
    "outputs_are_written": [
        (parse('prim p(A: f32[n], out B: f32[n]) { tile "stream"(A[0], B[0]) }').prim("p"), "output B is never written"),
        (prim(in_loop(Store(A, (i.dim,), ONE))), "output B is never written"),
        (prim(Seq(())), "output B is never written"),
    ],
    "lanes_are_counted": [
        (loop("for vector l in n { }"), "a vector loop has extent n, expected a constant"),
        (loop("for unroll l in n { }"), "unroll loop has extent n"),
    ],
    "loops_keep_their_range": [
        (loop("for l in n within 0..n - 2 { }"), "variable l runs over 0 .. n - 1, but its declared range is smaller"),
        (loop("for l in n within 1.. { }"), "variable l runs over"),
        (loop("for l in 8 within 0..7 by 4 { }"), "variable l runs over"),
        (loop("B[0] = sum(l in n within 0..n - 2) A[l]"), "variable l runs over"),
    ],
    "local_memory_has_constant_size": [
        (loop("alloc local t: f32[n] { }"), "local buffer t has dimension n, expected a constant"),
        (loop("alloc shared t: f32[4, n] { }"), "shared buffer t has dimension n"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "function", "message"),
    [(rule, function, message) for rule, breaches in LOOP_BREACHES.items() for function, message in breaches],
)
def test_loop_rules(rule: str, function: PrimFunc, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(IRModule({"p": function}))
    assert caught.value.rule == rule, str(caught.value)
    assert message in str(caught.value)


# --- modules -----------------------------------------------------------------------------------------------------------


def test_functions_share_no_dimension() -> None:
    cast = func(bind(MatchCast(x, tensor([m, 4], F32)), ObjectType()))
    loops = prim(in_loop(Store(B, (i.dim,), ONE)))
    clean = Function((), Body((), ScalarValue(1.0, "f32")), ObjectType())
    measured = func(params=(Var("a", tensor([m], F32)),), result=ScalarValue(m.dim))
    for first, second, name in [(func(), func(), "n"), (func(), loops, "n"), (cast, measured, "m")]:
        with pytest.raises(VerifyError, match=f"dimension {name} belongs to function 'first'") as caught:
            verify(IRModule({"first": first, "clean": clean, "second": second}))
        assert caught.value.rule == dims_have_one_function.__name__
        assert caught.value.function == "second"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *[(name, "the name must begin with a letter or _") for name in ("a b", "x(y)", "é", "", "0", "a-b", "a$b", "main\n")],
        *[(name, f"names that begin with {name[:-2]} belong to the compiler") for name in ("vm.f", "lib.f", "llvm.f")],
        ("llvm", "names that begin with llvm belong to the compiler"),
    ],
)
def test_names_of_functions_are_plain(name: str, message: str) -> None:
    for function in (func(), prim(in_loop(Store(B, (i.dim,), ONE)))):
        verify(IRModule({"main.llvm_0": function}))
        with pytest.raises(VerifyError) as caught:
            verify(IRModule({name: function}))
        assert caught.value.rule == functions_have_plain_names.__name__ and message in str(caught.value)


def test_every_rule_is_broken_by_some_program() -> None:
    assert set(GRAPH_BREACHES) == {rule.__name__ for rule in GRAPH_RULES}
    assert set(LOOP_BREACHES) == {rule.__name__ for rule in LOOP_RULES}


def test_the_error_shows_function_binding_line_and_rule() -> None:
    with pytest.raises(VerifyError) as caught:
        verify(parse(f"{PRIMS} func main(x: f32[n, 4]) -> object {{ out = call_tir @add(x) -> f32[n, 4] return out }}"))
    assert str(caught.value) == (
        "function 'main', binding 'out': the loop-level function takes 2 arguments; it is called with 1 (rule calls_fit_their_prims)\n"
        "  out = call_tir @add(x) -> f32[n, 4]"
    )
