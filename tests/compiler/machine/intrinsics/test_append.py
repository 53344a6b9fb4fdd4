"""The append tile lists the lanes whose mask is set, in ascending order, on every target that can run here and in the interpreter. On
AVX-512 a single instruction does this."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.interpret.loops import run_prim
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.text.parser import parse
from compiler.machine.target import NAMED

LISTING = """
prim k(x: i32[64], out list: i32[64], out count: i64[1]) {
  for parallel once in 1 {
    count[0] = 2
    alloc local hits: i32[16] {
      for b in 3 {
        for vector l in 16 { hits[l] = select(x[16*b + l] < 0:i32, 1:i32, 0:i32) }
        tile "append"(list[0], count[0], hits[0]) dims(16*b + 100)
      }
    }
  }
}
"""


def listing() -> PrimFunc:
    return parse(LISTING).prim("k")


@pytest.mark.parametrize("name", [None, *(t.name for t in NAMED.values() if t.can_run_here)])
def test_lanes_that_are_set_are_listed_in_order(run_native: Any, name: str | None) -> None:
    x = np.random.default_rng(1).integers(-3, 3, 64).astype(np.int32)
    found, count = np.zeros(64, np.int32), np.zeros(1, np.int64)
    if name is None:
        run_prim(listing(), [x, found, count])
    else:
        run_native(listing(), [x, found, count], target=NAMED[name])
    expected = 100 + np.flatnonzero(x[:48] < 0)
    assert count[0] == 2 + len(expected)
    np.testing.assert_array_equal(found[2 : count[0]], expected)


def test_lanes_are_packed_by_one_instruction() -> None:
    target = NAMED["avx512"]
    assert re.search(r"vpcompressd\s.*%zmm\d+ \{%k\d\}", link([emit_kernel("k", listing(), target)], target).assembly())
