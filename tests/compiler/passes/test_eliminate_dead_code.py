"""Unused bindings and loop nests are removed, except for those that may have an effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.backends.registry import backend_of
from compiler.ir.graph.values import CallTir
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from compiler.passes.base import Pass
from compiler.passes.eliminate_dead_code import eliminate_dead_code

Becomes = Callable[[Pass, str, str], None]


def test_chains_of_unused_values_go(becomes: Becomes) -> None:
    before = """
        func main(c: bool[], x: f32[n]) -> f32[n] {
          a = exp(x)
          b = sin(a)
          y: f32[n] = if c { d = exp(x) return x } else { return x }
          z = cos(y)
          return z
        }
    """
    expected = """
        func main(c: bool[], x: f32[n]) -> f32[n] {
          y: f32[n] = if c { return x } else { return x }
          z = cos(y)
          return z
        }
    """
    becomes(eliminate_dead_code, before, expected)


def test_a_match_cast_is_a_check_and_stays(stays: Callable[[Pass, str], None]) -> None:
    stays(eliminate_dead_code, "func main(x: f32[n]) -> f32[n] { unused = match_cast x to f32[4] return x }")


def test_loop_nests_that_nothing_calls_go(becomes: Becomes) -> None:
    before = """
        func main(x: f32[n]) -> f32[n] { y = @helper(x) return y }
        func helper(x: f32[n]) -> f32[n] { y = call_tir @one(x) -> f32[n] return y }
        func other(x: f32[n]) -> f32[n] { y = call_tir @two(x) -> f32[n] return x }
        prim one(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] + 1.0 } }
        prim two(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] + 2.0 } }
    """
    expected = """
        func main(x: f32[n]) -> f32[n] { y = @helper(x) return y }
        func helper(x: f32[n]) -> f32[n] { y = call_tir @one(x) -> f32[n] return y }
        func other(x: f32[n]) -> f32[n] { return x }
        prim one(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] + 1.0 } }
    """
    becomes(eliminate_dead_code, before, expected)


def test_calls_of_impure_functions_stay(stays: Callable[[Pass, str], None]) -> None:
    stays(
        eliminate_dead_code,
        """
        impure func main(x: f32[n]) -> f32[n] { unused = @noisy(x) return x }
        impure func noisy(x: f32[n]) -> f32[n] { return x }
        """,
    )


@pytest.mark.parametrize("target", ["x86-64-v3", "avx512-vnni-bf16", "aarch64-neon", "wasm-relaxed", "sm_80"])
def test_every_pipeline_keeps_states_that_only_later_steps_read(target: str) -> None:
    """The last layer writes a state that no operator of the step reads. The write must stay, because the next step reads the state."""
    program = """
        func main(states: f32[1, p, 8], values: f32[m, 8], pages: i32[m], x: f32[n, 4]) -> f32[n, 4] where p in 2.. {
          dataflow {
            written = state_write(states, values, pages, 0)
            y = relu(x)
          }
          return y
        }
    """
    module = backend_of(get(target)).pipeline(get(target), ()).until("lift_workspace")(parse(program))
    called = {b.value.func for b in module.graph("main").body.bindings if isinstance(b.value, CallTir)}
    assert any("state_write" in name for name in called)
