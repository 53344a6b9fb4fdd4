"""Calls of loop nests become allocations and launches."""

from __future__ import annotations

from collections.abc import Callable

from compiler.passes.base import Pass
from compiler.passes.memory.explicit_memory import explicit_memory

PRIMS = """
    prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = exp(A[i]) } }
    prim two(A: f32[n], out B: f32[n], out C: f32[1]) { for i in n { B[i] = A[i] } C[0] = 1.0 }
    prim bump(A: f32[n], out B: f32[n]) attrs {inplace=[[0, 1]]} { for i in n { B[i] = A[i] + 1.0 } }
"""


def test_one_output_several_and_those_in_place(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"""
        func main(x: f32[n]) -> object {{
          dataflow {{
            a = call_tir @e(x) -> f32[n]
            b = call_tir @two(a) -> (f32[n], f32[1])
            c = b.0
          }}
          d = call_tir_inplace @bump(c) [0] -> f32[n]
          r = (d, b)
          return r
        }}
        {PRIMS}
    """
    expected = f"""
        func main(x: f32[n]) -> object {{
          a = alloc f32[n]
          launch @e(x, a)
          b0 = alloc f32[n]
          b1 = alloc f32[1]
          launch @two(a, b0, b1)
          b = (b0, b1)
          launch @bump(b0, b0)
          r = (b0, b)
          return r
        }}
        {PRIMS}
    """
    becomes(explicit_memory, before, expected)


def test_a_routine_that_alone_knows_the_size_keeps_its_call(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n]) -> object {
          s = call_library "sort"(x) {axis=0, descending=false} -> f32[n]
          u = call_library "unique"(s) -> f32[ndim=1]
          return u
        }
    """
    expected = """
        func main(x: f32[n]) -> object {
          s = alloc f32[n]
          launch library "sort"(x, s) {axis=0, descending=false}
          u = call_library "unique"(s) -> f32[ndim=1]
          return u
        }
    """
    becomes(explicit_memory, before, expected)
