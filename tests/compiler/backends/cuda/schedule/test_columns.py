"""The schedule of scans: a thread has one column of the state of a sequence, in registers, and no thread waits for another."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.backends.cuda.schedule.columns import schedule_columns
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.buffers import Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Allocate, For, LoopKind
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops

HEADS, KEYS, ROWS, SIZE = 2, 1, 6, 64


def program(beta: str, rows: int = ROWS) -> IRModule:
    given = (
        f"states: f32[2, pages, {HEADS * rows * SIZE}], q: f32[t, {KEYS}, {rows}], k: f32[t, {KEYS}, {rows}], v: f32[t, {HEADS}, {SIZE}]"
    )
    lists = f"decay: f32[t, {HEADS}], sources: i32[s], starts: i32[s + 1], saved: i32[m], places: i32[m], beta: f32[t, {HEADS}]"
    bounds = "t in 0..64, s in 0..8, m in 0..16, pages in 1..16"
    body = f"{{ dataflow {{ y = state_scan(states, q, k, v, decay, sources, starts, saved, places, 1{beta}) }} return y }}"
    return parse(f"func main({given}, {lists}) -> object where {bounds} {body}")


def at(module: IRModule, last: str) -> IRModule:
    found = pipeline(get("sm_80")).until(last)(module)
    verify(found)
    return found


@pytest.mark.parametrize("beta", ["", ", beta"], ids=["Mamba-2", "gated delta rule"])
def test_the_bits_stay(beta: str) -> None:
    """Three sequences: one goes on from a page, one begins with zeros, and one has a single token. Some states are saved."""
    rng, scheduled = np.random.default_rng(0), at(program(beta), "schedule_kernels")
    floats = [(2, 5, HEADS * ROWS * SIZE), (8, KEYS, ROWS), (8, KEYS, ROWS), (8, HEADS, SIZE)]
    given = [rng.standard_normal(shape, np.float32) for shape in floats]
    lists = [np.array(x, np.int32) for x in ((4, 0, 3), (0, 4, 7, 8), (1, 3, 6, 7), (4, 2, 1, 3))]
    args = [*given, rng.random((8, HEADS), np.float32), *lists, rng.random((8, HEADS), np.float32)]
    modules = at(program(beta), "lift_weights"), scheduled
    meaning, found = (Interpreter(m).call("main", *(a.copy() for a in args)) for m in modules)
    for a, b in zip(meaning, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("beta", ["", ", beta"], ids=["Mamba-2", "gated delta rule"])
def test_a_thread_keeps_a_column_in_registers(beta: str) -> None:
    prims = at(program(beta, rows=128), "schedule_kernels").prim_functions
    (scan,) = (prim for name, prim in prims.items() if "scan" in name)
    loops = [s for s in walk_stmts(scan.body) if isinstance(s, For)]
    threads = [loop.extent.const for loop in loops if loop.kind is LoopKind.THREAD]
    assert threads == [32], "one loop over threads, which has all columns of a block"
    arrays = {s.buffer.name: s.buffer for s in walk_stmts(scan.body) if isinstance(s, Allocate)}
    assert {buffer.scope for buffer in arrays.values()} == {Scope.LOCAL}
    assert [d.const for d in arrays["state"].shape] == [128]


def test_a_column_that_exceeds_the_registers_stays_in_shared_memory() -> None:
    prims = at(program(", beta", rows=256), "schedule_kernels").prim_functions
    (scan,) = (prim for name, prim in prims.items() if "scan" in name)
    (state,) = (s.buffer for s in walk_stmts(scan.body) if isinstance(s, Allocate) and s.buffer.name == "state")
    assert state.scope is Scope.SHARED


OWN = "for unroll v in 2 { for vector k in 16 { a[16*v + k] = x[i, 16*v + k] } }"
REFUSED = {
    "a group inside another": OWN
    + """ for unroll u in 2 { for vector l in 16 { y[i, 16*u + l] = a[16*u + l] }
        for unroll w in 2 { for vector m in 16 { a[16*w + m] = a[16*w + m] * 2.0 } } }""",
    "groups that write the same": OWN + " for unroll u in 2 { for vector l in 16 { y[i, l] = a[16*u + l] } }",
    "another column": OWN + " for unroll u in 2 { for vector l in 16 { y[i, 16*u + l] = a[16*u + l] + a[31 - 16*u - l] } }",
    "a sum over columns": OWN
    + """ alloc local b: f32[1] { b[0] = sum(r in 32) a[r]
        for unroll u in 2 { for vector l in 16 { y[i, 16*u + l] = a[16*u + l] + b[0] } } }""",
    "output read elsewhere": OWN + " for unroll u in 2 { for vector l in 16 { y[i, 16*u + l] = a[16*u + l] + y[i, 31 - 16*u - l] } }",
    "no lanes": OWN + " for unroll u in 2 { for vector l in 0 { y[i, 16*u + l] = a[16*u + l] } }",
}


def columns_of(nest: str) -> PrimFunc:
    text = f"prim f(x: f32[n, 32], out y: f32[n, 32]) {{ for parallel i in n {{ alloc local a: f32[32] {{ {nest} }} }} }}"
    return parse(text).prim("f")


@pytest.mark.parametrize("nest", REFUSED.values(), ids=list(REFUSED))
def test_columns_that_depend_on_each_other_have_another_schedule(nest: str) -> None:
    assert schedule_columns(columns_of(nest).body) is None


def test_columns_that_are_apart_are_scheduled() -> None:
    own = OWN + " for unroll u in 2 { for vector l in 16 { y[i, 16*u + l] = a[16*u + l] + y[i, 16*u + l] } }"
    assert schedule_columns(columns_of(own).body) is not None
