"""Every operand whose elements are indices declares what happens to an index outside its range, and that is what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.idioms.spatial import match_spatial, stages
from compiler.interpret.graph import Interpreter
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load, Reduce, Scalar, ScalarParam
from compiler.ir.loops.statements import For, Let, Stmt, Store, Tile
from compiler.ir.loops.visit import loads, scalars_of, walk_scalar, walk_stmts
from compiler.ir.op import OPS
from compiler.ir.text.printer import print_module
from compiler.ir.types import tensor
from compiler.ops.attention.kv_cache import KV_APPEND
from compiler.ops.attention.paged import PAGED_ATTENTION
from compiler.ops.attention.plain import plain_attention
from compiler.ops.index import GATHER
from compiler.ops.indices import BadIndex, Index, Treatment
from compiler.ops.tables import INDICES, LEGALIZE, OPERANDS
from compiler.passes import legalize
from compiler.passes.share_subexpressions import share_subexpressions
from runtime.errors import ArgumentMismatch
from runtime.session import Session
from tests.compiler.ops.hostile.cases import CASES, Case, compiled
from tests.compiler.ops.test_compiled import CASES as COMPILED

ROOT = Path(__file__).parents[3]
Run = Callable[..., Any]
ALL = {**CASES, **{op: compiled(op) for op in COMPILED if op not in INDICES}}


# --- declarations ------------------------------------------------------------------------------------------------------


def data_indices(prim: PrimFunc) -> Iterator[Buffer | ScalarParam]:
    """Yield each parameter that has an integer from which an index, or the extent of a loop over indices, is computed."""
    body = plain_attention(prim.body) if isinstance(prim.body, Attention) else prim.body
    read = {stmt.var: stmt.value for stmt in walk_stmts(body) if isinstance(stmt, Let)}
    extents = {stmt.var: stmt.extent for stmt in walk_stmts(body) if isinstance(stmt, For)}
    folds = [s for stmt in walk_stmts(body) for root in scalars_of(stmt) for s in walk_scalar(root) if isinstance(s, Reduce)]
    extents |= {var: extent for reduce in folds for var, extent in reduce.axes}
    waiting, seen = [var for dim in _indices(body) for var in dim.vars()], set[DimVar]()
    while waiting:
        var = waiting.pop()
        if var in seen:
            continue
        seen.add(var)
        waiting += extents[var].vars() if var in extents else ()
        if var in read:
            yield from _sources(read[var])
            waiting += [v for scalar in walk_scalar(read[var]) for d in _dims(scalar) for v in d.vars()]


def _sources(value: Scalar) -> Iterator[Buffer | ScalarParam]:
    for scalar in walk_scalar(value):
        if isinstance(scalar, Load):
            yield scalar.buffer
        elif isinstance(scalar, ScalarParam):
            yield scalar


def _dims(scalar: Scalar) -> tuple[Dim, ...]:
    return scalar.indices if isinstance(scalar, Load) else ()


def _indices(body: Stmt) -> Iterator[Dim]:
    for stmt in walk_stmts(body):
        match stmt:
            case Store(indices=indices):
                yield from indices
            case Tile(operands=places):
                for place in places:
                    yield from place.indices
            case _:
                pass
        for scalar in scalars_of(stmt):
            for load in loads(scalar):
                yield from load.indices


def test_every_operator_has_a_case():
    assert {case.op for case in ALL.values()} == set(LEGALIZE) == set(OPERANDS) - {"shape_of", "tensor_to_shape"}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_an_operand_that_is_used_as_an_index_says_what_a_bad_index_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legalize, "with_safe_indices", lambda builder, outliner, var, call: call)
    module = legalize.legalize(case.module())
    for prim in module.prim_functions.values():
        inputs = [p for p in prim.params if isinstance(p, Buffer | ScalarParam) and p not in prim.outputs]
        names = OPERANDS[case.op]  # the last one may stand for several operands
        letters = {p: names[min("abcdefghijklmnopqrstuvw".index(p.name), len(names) - 1)] for p in inputs if len(p.name) == 1}
        used = {letters[p] for p in data_indices(prim) if p in letters and letters[p] not in ("states", "cache")}
        assert used <= set(INDICES.get(case.op, {})), f"{case.op} uses {used} as indices"


def test_the_analysis_finds_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without safe copies of indices, nests read the indices themselves, and the analysis finds them. So the test above can fail."""
    monkeypatch.setattr(legalize, "with_safe_indices", lambda builder, outliner, var, call: call)
    wanted = {"take": {"indices"}, "kv_append": {"slots", "layer"}, "paged_attention": {"page_tables", "seq_ids", "positions", "layer"}}
    for name, names in wanted.items():
        module = legalize.legalize(compiled(name).module())
        (prim,) = module.prim_functions.values()
        found = {OPERANDS[name]["abcdefghijklmnopqrstuvw".index(p.name)] for p in data_indices(prim)}
        assert found == names


def test_declarations_name_operands():
    for name, declared in INDICES.items():
        assert set(declared) <= set(OPERANDS[name]), name


# --- the documentation -------------------------------------------------------------------------------------------------


def bound_text(index: Index) -> str:
    match index.bound:
        case dict() as columns:
            return ", ".join(f"{getattr(column, 'name', column)}: `{bound}`" for column, bound in columns.items())
        case bound:
            return f"`{bound}`"


def row(op: str, operand: str, index: Index) -> str:
    return f"| `{op}` | `{operand}` | {index.treatment} | {bound_text(index)} | {'before the nest' if index.ahead else 'in the nest'} |"


def table() -> list[str]:
    rows = [(op, operand, index) for op, declared in sorted(INDICES.items()) for operand, index in declared.items()]
    return [row(*each).replace("in the nest", "at the call") if each[2].treatment is Treatment.CHECKED else row(*each) for each in rows]


def test_the_documentation_has_the_table_of_indices():
    text = (ROOT / "docs" / "indices.md").read_text()
    found = [line for line in text.splitlines() if line.startswith("| `")]
    assert found == table(), "expected in docs/indices.md:\n" + "\n".join(table())


# --- what happens ------------------------------------------------------------------------------------------------------


CACHE = np.zeros((2, 2, 3, 1, 16 * 4), np.float32)


@pytest.mark.parametrize("slot", [-1, 48, 49, 2**31 - 1, -(2**31)])
def test_nothing_is_written_at_a_slot_that_does_not_exist(run: Run, slot: int) -> None:
    ones = np.ones((2, 1, 4), np.float32)
    slots = np.array([slot, 5], np.int32)
    found = run(KV_APPEND, CACHE, ones, ones, slots, 1, shapes="2 2 p 1 64, t 1 4, t 1 4, t", compiled=True)
    assert found.sum() == 8  # the key and the value of the other token
    assert not found[0].any()


def test_an_index_is_clamped_in_every_integer_type(run: Run) -> None:
    x = np.arange(300, dtype=np.float32)[None]
    for dtype in (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint32):
        limits = np.iinfo(dtype)
        places = np.array([[limits.min, limits.max, 7]], dtype)
        found = run(GATHER, x, places, axis=1, shapes="n k, n m", compiled=True)
        assert found.tolist() == [[0, min(limits.max, 299), 7]]


@pytest.mark.parametrize("layer", [-1, 2, 2**40])
def test_a_layer_that_does_not_exist_is_refused_by_name(layer: int) -> None:
    ones = np.ones((2, 1, 4), np.float32)
    arguments = CACHE, ones, ones, np.array([1, 2], np.int32), layer
    module = Case("kv_append", arguments, "2 2 p 1 64, t 1 4, t 1 4, t").module()
    with pytest.raises(BadIndex, match=f"kv_append: operand layer is {layer}, expected 0 <= layer < 2"):
        Interpreter(module).call("main", *arguments)
    session = Session(compile_module(module))
    with pytest.raises(ArgumentMismatch, match=rf"kv_append 'v0', operand layer .*: expected .*, got {layer}$"):
        session.call("main", *arguments)
    session.close()


def test_all_layers_share_the_safe_copies():
    """The cost of safe indices does not grow with the number of layers."""
    tokens, pages, sequences = DimVar("t"), DimVar("p"), DimVar("s")
    q, cache = Var("q", tensor((tokens, 4, 8), DType.F32)), Var("cache", tensor((3, 2, pages, 2, 128), DType.F32))
    tables, ids, at = (Var(n, tensor(d, DType.I32)) for n, d in (("tables", (sequences, 4)), ("ids", (tokens,)), ("at", (tokens,))))
    builder = Builder()
    with builder.function("main", [q, cache, tables, ids, at]):
        x = q
        for layer in range(3):
            x = builder.call(PAGED_ATTENTION, x, cache, tables, ids, at, ScalarValue(Dim.of(layer), DType.I64), scale=0.3)
        builder.returns(x)
    text = print_module(share_subexpressions(legalize.legalize(builder.finish()))).partition("func main")[2]
    calls = [line for line in text.splitlines() if "call_tir" in line]
    assert len([line for line in calls if "clamp_indices" in line]) == 3, text
    assert len([line for line in calls if "paged_attention" in line]) == 3, text
    checks = [line.partition("=")[2] for line in text.splitlines() if "match_cast" in line]
    assert sorted(checks) == sorted(set(checks)), text
    assert len([check for check in checks if "I64" in check or "i64" in check]) == 2, text


def test_all_operators_are_registered():
    assert {name for name in OPS if "." not in name} == set(OPERANDS)


@pytest.mark.parametrize("name", ["kv_append", "key_append", "state_write"])
def test_a_write_that_skips_bad_indices_still_runs_on_all_threads(name: str) -> None:
    module = legalize.legalize(compiled(name).module())
    (prim,) = module.prim_functions.values()
    assert all(match_spatial(stage) for stage in stages(prim.body))


def test_scatter_stays_in_order():
    """The last of several updates at one index wins, so no schedule may compute the updates in another order."""
    (prim,) = legalize.legalize(compiled("scatter_inplace").module()).prim_functions.values()
    assert not any(match_spatial(stage) for stage in stages(prim.body))
