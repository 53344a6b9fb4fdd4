"""Launches that follow each other without a branch become a captured region, which runs in one call."""

from __future__ import annotations

from collections.abc import Callable

from compiler.passes.base import Pass
from compiler.passes.capture import capture

E1 = "prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = exp(A[i]) } }"


def test_what_needs_the_host_ends_a_region(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"""
        func main(x: f32[n]) -> object {{
          a = alloc f32[n] at 0
          launch @e(x, a)
          v = reshape(a, shape[n])
          launch @e(v, a)
          launch library "sort"(a, a) {{axis=0, descending=false}}
          launch @e(a, a)
          return a
        }}
        {E1}
    """
    expected = f"""
        func main(x: f32[n]) -> object {{
          captured {{
            a = alloc f32[n] at 0
            launch @e(x, a)
            v = reshape(a, shape[n])
            launch @e(v, a)
          }}
          launch library "sort"(a, a) {{axis=0, descending=false}}
          captured {{ launch @e(a, a) }}
          return a
        }}
        {E1}
    """
    becomes(capture, before, expected)


def test_a_check_of_dimensions_alone_comes_before_the_region_that_it_stands_in(becomes: Callable[[Pass, str, str], None]) -> None:
    check, names = "ok = match_cast dim(n) to scalar[i64, max(n, 1)]", "k = match_cast dim(n) to scalar[i64, m]"
    before = f"""
        func main(x: f32[n]) -> object {{
          a = alloc f32[n] at 0
          launch @e(x, a)
          {check}
          launch @e(a, a)
          {names}
          launch @e(a, a)
          return a
        }}
        {E1}
    """
    expected = f"""
        func main(x: f32[n]) -> object {{
          {check}
          captured {{
            a = alloc f32[n] at 0
            launch @e(x, a)
            launch @e(a, a)
          }}
          {names}
          captured {{ launch @e(a, a) }}
          return a
        }}
        {E1}
    """
    becomes(capture, before, expected)


def test_inside_of_branches(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"""
        func main(c: bool[], x: f32[n]) -> object {{
          a = alloc f32[n] at 0
          y: f32[n] = if c {{ launch @e(x, a) return a }} else {{ return x }}
          return y
        }}
        {E1}
    """
    becomes(capture, before, before.replace("{ launch @e(x, a) return a }", "{ captured { launch @e(x, a) } return a }"))


def test_memory_of_its_own_needs_the_host(stays: Callable[[Pass, str], None]) -> None:
    stays(capture, "func main(x: f32[n]) -> object { a = alloc f32[n] return a }")
