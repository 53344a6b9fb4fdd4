"""Global buffers that a kernel allocates become parameters of the kernel, so that the memory planner can place them."""

from __future__ import annotations

from collections.abc import Callable

from compiler.passes.base import Pass
from compiler.passes.memory.lift_workspace import lift_workspace

NEST = "for i in n { t[i] = A[i, 0] } for i in n, j in m { B[i, j] = A[i, j] - t[i] }"


def test_workspace_becomes_an_output_of_the_caller_s_size(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"""
        func main(x: f32[2*k, 3]) -> f32[2*k, 3] where k in 1..  {{ y = call_tir @f(x) -> f32[2*k, 3] return y }}
        prim f(A: f32[n, m], out B: f32[n, m]) where m in 1.. {{ alloc global t: f32[n] {{ {NEST} }} }}
    """.replace("main(x: f32[2*k, 3])", "main(s: shape[k], x: f32[2*k, 3])")
    expected = f"""
        func main(s: shape[k], x: f32[2*k, 3]) -> f32[2*k, 3] where k in 1.. {{
          all = call_tir @f(x) -> (f32[2*k, 3], f32[2*k])
          y = all.0
          return y
        }}
        prim f(A: f32[n, m], out B: f32[n, m], out t: f32[n]) where m in 1.. attrs {{num_workspaces=1}} {{ {NEST} }}
    """
    becomes(lift_workspace, before, expected)


def test_results_are_taken_of_the_whole(becomes: Callable[[Pass, str, str], None]) -> None:
    """After the pass a call also returns its workspace. The pass builds a new tuple `y` of the original results. Code that reads only one
    result (here `z`) reads the call's own tuple, because reading `y` would put an instruction between launches."""
    nest = NEST + " for i in n { C[i] = t[i] }"
    before = f"""
        func main(x: f32[4, 3]) -> f32[4] {{ y = call_tir @f(x) -> (f32[4, 3], f32[4]) z = y.1 return z }}
        prim f(A: f32[n, m], out B: f32[n, m], out C: f32[n]) where m in 1.. {{ alloc global t: f32[n] {{ {nest} }} }}
    """
    expected = f"""
        func main(x: f32[4, 3]) -> f32[4] {{
          all = call_tir @f(x) -> (f32[4, 3], f32[4], f32[4])
          a = all.0
          b = all.1
          y = (a, b)
          z = all.1
          return z
        }}
        prim f(A: f32[n, m], out B: f32[n, m], out C: f32[n], out t: f32[n]) where m in 1.. attrs {{num_workspaces=1}} {{ {nest} }}
    """
    becomes(lift_workspace, before, expected)


def test_local_buffers_stay(stays: Callable[[Pass, str], None]) -> None:
    stays(lift_workspace, "prim f(A: f32[n], out B: f32[n]) { alloc local t: f32[1] { for i in n { t[0] = A[i] B[i] = t[0] } } }")
