"""A thread computes several elements of a product before it stores any, and computes none where a load could leave its buffer."""

from __future__ import annotations

import re

import pytest

from compiler.backends.cuda.schedule.branches import Branch
from compiler.backends.cuda.schedule.hold import at_once
from compiler.driver import Options, plan
from compiler.idioms.spatial import SpatialNest
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import Store
from compiler.ir.loops.write import less_equal
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.machine.target import get

RESIDUAL = """
func main(x: bf16[n, 64], y: f32[n, 64], weight w: bf16[64, 64]) -> object where n in 0..64 {
  dataflow { a = linear(x, w, out_dtype="f32") b = add(a, y) } return b
}
"""


def test_a_group_of_rows_is_loaded_before_any_is_stored() -> None:
    text = print_module(plan(parse(RESIDUAL), Options(get("sm_90a"))).module)
    groups = re.findall(r"alloc local held: f32\[(\d+)\](.*?)(?=alloc local held|\Z)", text, re.DOTALL)
    # Each tile writes rows that all exist, and in another branch those that exist.
    assert [int(count) for count, _ in groups] == [2, 2, 8, 8, 8, 8], "rows of a thread in tiles of 8, 32 and 64 rows, at most 8 at once"
    for count, group in groups:
        loads = [group.index(f"held[{number}] =") for number in range(int(count))]
        assert max(loads) < group.index("= held[0]"), "a row is stored before all rows of the group are loaded"


def test_no_branch_is_between_rows_that_all_exist() -> None:
    """With a branch between two rows that both exist, LLVM would move the load of each row behind its branch, so that a load would wait for
    the one before."""
    text = print_module(plan(parse(RESIDUAL), Options(get("sm_90a"))).module)
    groups = re.findall(r"alloc local held: f32\[(\d+)\](.*?)(?=\belse\b|alloc local held|\Z)", text, re.DOTALL)
    assert [("when" in group) for _, group in groups] == [False, True] * 3


APPENDED = """
func main(x: bf16[n, 64], slots: i32[n], cache: bf16[1, 2, 9, 1, 1024], weight w: bf16[128, 64]) -> object where n in 0..64 {
  dataflow {
    a = linear(x, w, out_dtype="f32")
    r = reshape(a, shape[n, 2, 64])
    k = slice(r, axis=1, begin=0, end=1)
    v = slice(r, axis=1, begin=1, end=2)
    after = kv_append(cache, k, v, slots, 0)
  }
  return after
}
"""


def test_places_in_the_cache_are_loaded_before_any_row_is_stored() -> None:
    """A thread loads the places in the cache of all its rows before it stores a row. Otherwise it would wait for the place of each row in
    turn."""
    text = print_module(plan(parse(APPENDED), Options(get("sm_90a"))).module)
    stores = [part for part in re.split(r"(?=alloc local held)", text) if "new_cache[" in part]
    assert len(stores) >= 4, "keys and values, in tiles of several heights"
    assert all(re.search(r"let slot within 0\.\.\d+ = held", part) and "slots[" not in part.partition("let slot")[2] for part in stores)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (4, 4), (7, 7), (12, 6), (32, 8), (11, 1)])
def test_groups_divide_what_a_thread_has(count: int, expected: int) -> None:
    assert at_once(count) == expected


N = DimVar("n", upper=64)
ROW, COLUMN = DimVar("r", upper=63), DimVar("j", upper=7)
PRODUCT, OTHER, OUT = (Buffer(name, (N.dim, Dim.of(8)), DType.F32) for name in ("p", "y", "out"))


@pytest.mark.parametrize(("row", "safe"), [(ROW.dim, True), (ROW.dim - 5, False)], ids=["its own row", "an earlier row"])
def test_a_condition_that_keeps_a_load_in_its_buffer_comes_first(row: Dim, safe: bool) -> None:
    """If a branch computes only rows from 5 on and reads the row 5 before its own, it must not compute other rows."""
    value = Load(PRODUCT, (ROW.dim, COLUMN.dim)) + Load(OTHER, (row, COLUMN.dim))
    store = Store(OUT, (ROW.dim, COLUMN.dim), value)
    nest = SpatialNest(((ROW, N.dim), (COLUMN, Dim.of(8))), (), store, less_equal(5, ROW.dim))
    assert Branch(nest, PRODUCT, 0, 0).computes_anywhere is safe
