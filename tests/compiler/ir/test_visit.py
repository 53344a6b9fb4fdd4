"""Visitors and rewriters of the IR: what they find and what they change. Nodes that do not change stay the same objects."""

from __future__ import annotations

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.equal import assert_equal, structural_equal
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ir.graph.function import Binding, Function, If
from compiler.ir.graph.values import Alloc, Call, CallTir, Copy, MatchCast
from compiler.ir.graph.visit import (
    atom_dims,
    called_nests,
    free_vars,
    fresh_function,
    map_atoms,
    map_bindings,
    map_operands,
    operands,
    used_vars,
    walk_values,
)
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Const, DimScalar, Load, Reduce, ScalarParam
from compiler.ir.loops.statements import Allocate, For, Let, Seq, Store, Tile
from compiler.ir.loops.visit import (
    bound_dims,
    free_dims,
    fresh_prim,
    inside_out,
    loads,
    map_scalar,
    map_scalars,
    map_stmt,
    rename_buffers,
    replace_loads,
    rewrite_dims,
    scalar_depth,
    sequence,
    statements,
    subscalars,
    walk_scalars,
    walk_stmts,
)
from compiler.ir.module import IRModule
from compiler.ir.op import OPS, OpDef
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_node
from compiler.ir.types import tensor, vars_of

SAME = OPS.get("visit.same") or OPS.add("visit.same", OpDef("visit.same", {"axis": None}, lambda args, attrs: args[0]))

LOOPS = """
prim p(A: f32[n, m], I: i32[n], eps: scalar f32, k: dim, out B: f32[n, m]) where n in 1..64 {
  for i in n, j in m {
    let q within 0..n - 1 = I[i] {
      B[i, j] = (sum(r in m) A[q, r] * A[i, r]) + guard(0 <= i - 1 < n ? A[i - 1, j] : eps) + cast(f32, dim(k))
    }
  }
  alloc global t: f32[2*n] {
    for i in n { t[2*i] = eps  tile "dot_bf16_rows"(t[2*i], B[i, 0]) dims(n) {columns=4, rows=1} }
    when eps < 1.0 { B[0, 0] = -t[0] } else { B[0, 0] = eps }
  }
}
"""

GRAPH = """
func main(x: f32[n, 4], y: f32[n, 4], c: bool[], s: shape[m]) -> object where n in 1..64 {
  dataflow {
    a = visit.same(x, axis=dim(2*m))
    b = call_tir @p(a, y, n) -> f32[n, 4]
  }
  d = match_cast b to f32[k, 4]
  e: f32[ndim=2] = if c {
    f = visit.same(d)
    g = match_cast f to f32[l, 4]
    return g
  } else {
    return a
  }
  h = alloc f32[n, 4] at 16*m
  launch @p(h, x)
  t = (e, shape[k, m], 3)
  u = call_library "lib"(t) {dims=[dim(m)]} -> f32[k, 4]
  return u
}
"""


def _prim() -> PrimFunc:
    return parse(LOOPS).prim("p")


def _main() -> Function:
    return parse(GRAPH).graph("main")


def _names(variables: tuple[Var | DimVar, ...]) -> list[str]:
    return [v.name for v in variables]


# --- loop nests --------------------------------------------------------------------------------------------------------


def test_sequences() -> None:
    a, b = (Store(Buffer("A", (), DType.F32), (), Const(v, DType.F32)) for v in (1.0, 2.0))
    assert statements(Seq((a, Seq((Seq(()), b))))) == (a, b)
    assert statements(a) == (a,)
    assert sequence((a,)) is a
    assert statements(sequence((a, b))) == (a, b)


def test_walks_go_outside_in() -> None:
    body = _prim().body
    kinds = [type(s).__name__ for s in walk_stmts(body)]
    assert kinds[:5] == ["Seq", "For", "For", "Let", "Store"]
    assert sorted(set(kinds)) == ["Allocate", "For", "Let", "Seq", "Store", "Tile", "When"]
    assert [print_node(load) for load in loads(body)] == ["I[i]", "A[q, r]", "A[i, r]", "A[i - 1, j]", "t[0]"]
    assert sum(isinstance(s, ScalarParam) for s in walk_scalars(body)) == 4


def test_free_and_bound_dims() -> None:
    func = _prim()
    assert _names(free_dims(func.body)) == ["n", "m", "k"]
    assert _names(tuple(bound_dims(func.body))) == ["i", "j", "q", "i", "r"]
    loop = next(s for s in walk_stmts(func.body) if isinstance(s, Let))
    assert _names(free_dims(loop)) == ["i", "j", "m", "n", "k"]
    reduce = next(s for s in walk_scalars(func.body) if isinstance(s, Reduce))
    assert _names(free_dims(reduce)) == ["m", "q", "i"]


def test_unchanged_is_the_same_object() -> None:
    body = _prim().body
    assert map_stmt(body, lambda s: s) is body
    assert map_scalars(body, lambda s: s) is body
    assert rewrite_dims(body, {}) is body
    assert rewrite_dims(body, {DimVar("n"): 3}) is body
    assert rename_buffers(body, {}) is body
    assert replace_loads(body, Buffer("A", (), DType.F32), lambda indices: Const(0, DType.F32)) is body
    for scalar in walk_scalars(body):
        assert map_scalar(scalar, lambda s: s) is scalar


def test_what_is_untouched_stays_the_same_object() -> None:
    func = _prim()
    first, second = statements(func.body)
    mapped = replace_loads(func.body, func.buffers[0], lambda indices: Const(2.0, DType.F32))
    assert statements(mapped)[0] is not first
    assert statements(mapped)[1] is second


def test_replace_loads() -> None:
    func = _prim()
    a = func.buffers[0]
    body = replace_loads(func.body, a, lambda indices: DimScalar(indices[0]))
    assert not any(load.buffer is a for load in loads(body))
    expected = LOOPS.replace("A[q, r]", "dim(q)").replace("A[i, r]", "dim(i)").replace("A[i - 1, j]", "dim(i - 1)")
    assert_equal(IRModule({"p": PrimFunc(func.params, 1, body)}), _unparsed(expected, func))


def _unparsed(text: str, like: PrimFunc) -> IRModule:
    module = parse(text)
    assert len(module.prim("p").params) == len(like.params)
    return module


def test_rewrite_dims_declares_anew_what_depends_on_them() -> None:
    func = _prim()
    n, m = func.buffers[0].shape
    rows, (nv, mv) = DimVar("rows", 1, 32), (n.vars()[0], m.vars()[0])
    body = rewrite_dims(func.body, {nv: rows * 2, mv: 4})
    assert _names(free_dims(body)) == ["rows", "k"]
    loops = {s.var.name: s.var for s in walk_stmts(body) if isinstance(s, For | Let)}
    assert loops["i"].upper == rows * 2 - 1
    assert loops["j"].upper == 3
    assert loops["q"].upper == rows * 2 - 1
    (temporary,) = (s for s in walk_stmts(body) if isinstance(s, Allocate))
    assert temporary.buffer.shape == (rows * 4,)
    stored = {s.buffer for s in walk_stmts(temporary.body) if isinstance(s, Store)}
    assert temporary.buffer in stored
    assert all(load.buffer in {*func.buffers, temporary.buffer} for load in loads(body))
    (tile,) = (s for s in walk_stmts(body) if isinstance(s, Tile))
    assert tile.operands[0].buffer is temporary.buffer
    assert tile.dims == (rows * 2,)


def test_rewrite_dims_leaves_variables_bound_inside() -> None:
    """`rewrite_dims` does not replace a variable inside the statement that binds it."""
    i = DimVar("i", 0, 3)
    a = Buffer("A", (Dim.of(4),), DType.F32)
    store = Store(a, (i.dim,), Const(1.0, DType.F32))
    both = Seq((store, For(i, Dim.of(4), store)))
    first, loop = statements(rewrite_dims(both, {i: 2}))
    assert isinstance(first, Store)
    assert first.indices == (Dim.of(2),)
    assert loop is both.stmts[1]


def test_rename_buffers() -> None:
    func = _prim()
    a, b = func.buffers[0], func.buffers[-1]
    body = rename_buffers(func.body, {b: a})
    written: set[Buffer] = {s.buffer for s in walk_stmts(body) if isinstance(s, Store)}
    assert b not in written
    assert a in written
    (tile,) = (s for s in walk_stmts(body) if isinstance(s, Tile))
    assert tile.operands[1].buffer is a


def test_fresh_prims_share_nothing() -> None:
    func = _prim()
    fresh = fresh_prim(func)
    assert_equal(func, fresh)
    assert not set(_everything(func)) & set(_everything(fresh))


def _everything(func: PrimFunc) -> list[object]:
    allocated = [s.buffer for s in walk_stmts(func.body) if isinstance(s, Allocate)]
    used: list[Buffer] = [load.buffer for load in loads(func.body)]
    return [*func.params, *allocated, *used, *free_dims(func.body), *bound_dims(func.body)]


# --- graph functions ---------------------------------------------------------------------------------------------------


def test_called_nests_are_found_inside_branches() -> None:
    func = parse(GRAPH.replace("f = visit.same(d)", "f = call_tir @q(d) -> f32[n, 4]") + LOOPS + LOOPS.replace("prim p(", "prim q(")).graph(
        "main"
    )
    assert list(called_nests(func.body)) == ["p", "q", "p"], "expected a call, a call in a branch, and a launch"
    assert [type(v).__name__ for v in walk_values(func.body)][3:6] == ["If", "CallTir", "MatchCast"]


def _value(name: str) -> tuple[Binding, ...]:
    return tuple(b for b in _main().body.bindings if b.var.name == name)


def test_uses() -> None:
    uses = {b.var.name: used_vars(b.value) for b in _main().body.bindings}
    assert {name: (_names(u.values), _names(u.dims)) for name, u in uses.items()} == {
        "a": (["x"], ["m"]),
        "b": (["a", "y"], ["n"]),
        "d": (["b"], []),
        "e": (["c", "d", "a"], ["k"]),
        "h": ([], ["n", "m"]),
        "_": (["h", "x"], []),
        "t": (["e"], ["k", "m"]),
        "u": (["t"], ["m", "k"]),
    }


def test_free_vars() -> None:
    func = _main()
    assert _names(free_vars(func.body).values) == ["x", "y", "c"]
    assert _names(free_vars(func.body).dims) == ["m", "n"]
    (branch,) = (b.value for b in func.body.bindings if isinstance(b.value, If))
    assert _names(free_vars(branch.then).values) == ["d"]
    assert _names(free_vars(branch.then).dims) == ["k"]


def test_a_cast_to_a_known_dimension_uses_it() -> None:
    """A match_cast to a dimension that already has a value tests the value. Otherwise the match_cast defines the dimension."""
    known = parse("func f(x: f32[n], y: f32[m]) -> object { z = shape[n] w = match_cast y to f32[n] return w }").graph("f").body
    assert _names(free_vars(known).dims) == ["n"]
    new = parse("func f(x: f32[n], y: f32[m]) -> object { w = match_cast y to f32[k] z = shape[k] return w }").graph("f").body
    assert free_vars(new).dims == ()


def test_operands() -> None:
    func = _main()
    assert [len(operands(b.value)) for b in func.body.bindings] == [1, 3, 1, 1, 0, 2, 3, 1]
    (call,) = (b.value for b in func.body.bindings if isinstance(b.value, CallTir))
    assert _names(atom_dims(call.args[2])) == ["n"]


def test_map_operands_reaches_into_branches() -> None:
    func = _main()
    x, y = func.params[:2]
    for binding in func.body.bindings:
        assert map_operands(binding.value, lambda atom: atom) is binding.value
    assert map_atoms(func.body, lambda atom: atom) is func.body
    first = func.body.bindings[0].var
    body = map_atoms(func.body, lambda atom: y if atom is first else atom)
    assert first not in free_vars(body).values
    (branch,) = (b.value for b in body.bindings if isinstance(b.value, If))
    assert branch.orelse.result is y
    assert body.bindings[0] is func.body.bindings[0]
    assert x in free_vars(body).values


def test_map_bindings_keeps_identity() -> None:
    func = _main()
    assert map_bindings(func, lambda binding: [binding]) is func


def test_map_bindings_replaces_inserts_and_drops() -> None:
    func = _main()

    def rewrite(binding: Binding) -> list[Binding]:
        if isinstance(binding.value, Call):
            extra = Var("extra", binding.var.type)
            return [Binding(extra, Copy(binding.value.args[0])), Binding(binding.var, Copy(extra))]
        return [] if isinstance(binding.value, Alloc | MatchCast) else [binding]

    mapped = map_bindings(func, rewrite)
    assert _names(tuple(b.var for b in mapped.body.bindings)) == ["extra", "a", "b", "e", "_", "t", "u"]
    (branch,) = (b.value for b in mapped.body.bindings if isinstance(b.value, If))
    assert _names(tuple(b.var for b in branch.then.bindings)) == ["extra", "f"]
    assert branch.orelse is _branch(func).orelse


def _branch(func: Function) -> If:
    (branch,) = (b.value for b in func.body.bindings if isinstance(b.value, If))
    return branch


def test_blocks_that_become_empty_go() -> None:
    func = _main()
    mapped = map_bindings(func, lambda binding: [] if isinstance(binding.value, Call | CallTir) else [binding])
    assert [b.kind for b in mapped.body.blocks] == ["plain"]


def test_fresh_functions_share_nothing() -> None:
    func = _main()
    fresh = fresh_function(func)
    assert_equal(func, fresh)
    for one in (func, fresh):
        assert free_vars(one.body).values == (one.params[0], one.params[1], one.params[2])
    mine, theirs = ({v for p in f.params for v in vars_of(p.type)} | set(free_vars(f.body).dims) for f in (func, fresh))
    assert not mine & theirs
    assert not {b.var for b in func.body.bindings} & {b.var for b in fresh.body.bindings}


def test_a_changed_copy_is_no_longer_equal() -> None:
    func = _main()
    changed = map_bindings(func, lambda b: [Binding(b.var, Call(SAME, b.value.args, {"axis": 3}))] if isinstance(b.value, Call) else [b])
    assert structural_equal(func, changed) is not None
    assert isinstance(func.body.bindings[0].value, Call)


def test_scalars_and_tensors_of_no_interest_use_nothing() -> None:
    assert used_vars(ScalarValue(2.5, "f32")) == ((), ())
    x = Var("x", tensor([DimVar("n")], DType.F32))
    assert used_vars(x) == ((x,), ())


def test_shared_values_are_visited_once_and_stay_shared() -> None:
    """A shared value is visited only once and stays shared: 60 doublings in a row have 2**60 paths but only 61 nodes."""
    doublings = ", ".join(["t0 = A[i]", *(f"t{k + 1} = t{k} + t{k}" for k in range(60))])
    prim = parse(f"prim f(A: f32[n], out B: f32[n]) {{ for i in n {{ B[i] = let {doublings} in t60 }} }}").prim("f")
    buffer = prim.params[0]
    assert isinstance(buffer, Buffer)
    for body in (
        prim.body,
        fresh_prim(prim).body,
        rename_buffers(prim.body, {buffer: Buffer("C", buffer.shape, buffer.dtype)}),
        map_scalars(prim.body, lambda s: Load(s.buffer, s.indices) if isinstance(s, Load) else s),
    ):
        assert len(list(walk_scalars(body))) == 61
        assert free_dims(body)
    (store,) = [s for s in walk_stmts(prim.body) if isinstance(s, Store)]
    assert scalar_depth(store.value) == 61
    assert next(subscalars(s) for s in inside_out(store.value)) == ()
