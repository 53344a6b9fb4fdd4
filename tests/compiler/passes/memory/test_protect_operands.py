"""An in-place call overwrites its operand only if the old value is not read later. Otherwise the call overwrites a copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.passes.base import Pass
from compiler.passes.memory.protect_operands import protect_operands

BUMP = "prim bump(A: f32[n], out B: f32[n]) attrs {inplace=[[0, 1]]} { for i in n { B[i] = B[i] + 1.0 } }"
COPY = "prim copy(a: f32[n], out out: f32[n]) { for i in n { out[i] = a[i] } }"
FRESH = "prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = exp(A[i]) } }"


@pytest.mark.parametrize(
    "body",
    [
        "a = call_tir @e(x) -> f32[n] b = call_tir_inplace @bump(a) [0] -> f32[n] r = (b, a) return r",
        "a = call_tir @e(x) -> f32[n] v = reshape(a, shape[n]) b = call_tir_inplace @bump(a) [0] -> f32[n] r = (b, v) return r",
        "a = call_tir @e(x) -> f32[n] v = match_cast a to f32[m] b = call_tir_inplace @bump(a) [0] -> f32[n] r = (b, v) return r",
        """a = call_tir @e(x) -> f32[n] v: f32[n] = if c { return a } else { return x }
           b = call_tir_inplace @bump(a) [0] -> f32[n] r = (b, v) return r""",
        "a = call_tir @e(x) -> f32[n] v = @same(a) b = call_tir_inplace @bump(a) [0] -> f32[n] r = (b, v) return r",
    ],
    ids=["name", "view", "match_cast", "branch", "function"],
)
def test_what_is_read_later_under_any_name_is_copied(becomes: Callable[[Pass, str, str], None], body: str) -> None:
    others = f"{FRESH} {BUMP} func same(x: f32[n]) -> f32[n] {{ return x }}"
    before = f"func main(c: bool[], x: f32[n]) -> object {{ {body} }} {others}"
    call = "b = call_tir_inplace @bump(a) [0] -> f32[n]"
    copied = "own = call_tir @copy(a) -> f32[n] b = call_tir_inplace @bump(own) [0] -> f32[n]"
    becomes(protect_operands, before, f"func main(c: bool[], x: f32[n]) -> object {{ {body.replace(call, copied)} }} {others} {COPY}")


def test_the_memory_of_a_caller_is_copied(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"func main(x: f32[n]) -> object {{ b = call_tir_inplace @bump(x) [0] -> f32[n] return b }} {BUMP}"
    expected = f"""
        func main(x: f32[n]) -> object {{
          own = call_tir @copy(x) -> f32[n] b = call_tir_inplace @bump(own) [0] -> f32[n] return b
        }} {BUMP} {COPY}
    """
    becomes(protect_operands, before, expected)


def test_what_a_function_takes_is_copied_for_those_who_read_it_later(becomes: Callable[[Pass, str, str], None]) -> None:
    """An argument that a called function overwrites is copied if it is read later. `keeper` passes its argument to `taker`, which
    overwrites it; `reader` only reads its argument, so no copy is needed."""
    functions = f"""
        impure func taker(x: f32[n]) -> f32[n] {{ b = call_tir_inplace @bump(x) [0] -> f32[n] return b }}
        impure func keeper(x: f32[n], y: f32[n]) -> f32[n] {{ v = reshape(x, shape[n]) b = @taker(v) return b }}
        impure func reader(x: f32[n]) -> f32[n] {{ b = call_tir @e(x) -> f32[n] return b }}
        {FRESH} {BUMP}
    """
    before = """
        impure func main(x: f32[n]) -> object {
          a = call_tir @e(x) -> f32[n]
          b = @reader(a)
          c = @keeper(a, b)
          r = (a, b, c)
          return r
        }
    """
    expected = before.replace("c = @keeper(a, b)", "own = call_tir @copy(a) -> f32[n] c = @keeper(own, b)")
    becomes(protect_operands, before + functions, expected + functions + COPY)


def test_memory_that_the_same_call_reads_by_another_name_is_copied(becomes: Callable[[Pass, str, str], None]) -> None:
    turn = "prim turn(A: f32[n], C: f32[n], out B: f32[n]) attrs {inplace=[[0, 2]]} { for i in n { B[i] = B[i] + C[n - 1 - i] } }"
    before = f"""
        func main(x: f32[n]) -> object {{
          a = call_tir @e(x) -> f32[n] v = reshape(a, shape[n]) b = call_tir_inplace @turn(a, v) [0] -> f32[n] return b
        }} {FRESH} {turn}
    """
    becomes(
        protect_operands,
        before,
        before.replace("b = call", "own = call_tir @copy(a) -> f32[n] b = call").replace("(a, v)", "(own, v)") + COPY,
    )


@pytest.mark.parametrize(
    "text",
    [
        "func main(x: f32[n]) -> object { a = call_tir @e(x) -> f32[n] b = call_tir_inplace @bump(a) [0] -> f32[n] return b }",
        "impure func main(x: f32[n]) -> object { b = call_tir_inplace @bump(x) [0] -> f32[n] return b }",
    ],
    ids=["ours", "given"],
)
def test_what_is_ours_and_read_no_more_is_taken(stays: Callable[[Pass, str], None], text: str) -> None:
    stays(protect_operands, f"{text} {FRESH} {BUMP}")


def test_fields_of_a_tuple_lie_apart(becomes: Callable[[Pass, str, str], None]) -> None:
    """Both fields of a tuple can be overwritten in place without a copy, because the program has a separate name for each field."""
    both = """prim both(A: f32[n], C: f32[n], out B: f32[n], out D: f32[n]) attrs {inplace=[[0, 2], [1, 3]]} {
      for i in n { B[i] = B[i] + 1.0 } for i in n { D[i] = D[i] + 1.0 }
    }"""
    before = f"""
        impure func main(x: f32[n], y: f32[n]) -> object {{
          a = call_tir_inplace @both(x, y) [0, 1] -> (f32[n], f32[n])
          p = (a, a)
          q = p.0
          r = p.1
          c = q.0
          d = r.1
          b = call_tir_inplace @both(c, d) [0, 1] -> (f32[n], f32[n])
          return b
        }} {both}
    """
    becomes(protect_operands, before, before)
    shared = before.replace("@both(c, d)", "@both(c, c)")
    copied = "e = call_tir @copy(c) -> f32[n] f = call_tir @copy(c) -> f32[n] b = call"
    becomes(protect_operands, shared, shared.replace("b = call", copied).replace("@both(c, c)", "@both(e, f)") + COPY)


def test_a_function_states_what_it_overwrites(becomes: Callable[[Pass, str, str], None]) -> None:
    """Passes and code generation ask the function whether its buffers share memory, and the function reads that memory by the name of the
    output. Calls that overwrite nothing keep their function."""
    before = """
        impure func main(x: f32[n], y: f32[n]) -> object {
          a = call_tir @add(x, y) -> f32[n]
          b = call_tir_inplace @add(a, y) [0] -> f32[n]
          c = call_tir_inplace @add(y, b) [0] -> f32[n]
          return c
        }
        prim add(A: f32[n], B: f32[n], out C: f32[n]) { for i in n { C[i] = A[i] + B[i] } }
    """
    stated = "prim add_1(A: f32[n], B: f32[n], out C: f32[n]) attrs {inplace=[[0, 2]]} { for i in n { C[i] = C[i] + B[i] } }"
    becomes(protect_operands, before, before.replace("call_tir_inplace @add", "call_tir_inplace @add_1") + stated)


def test_a_function_that_reads_what_it_overwrites_by_another_name_is_copied(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"impure func main(x: f32[n]) -> object {{ b = call_tir_inplace @bump(x) [0] -> f32[n] return b }} {BUMP}"
    before = before.replace("B[i] +", "A[i] +")
    becomes(protect_operands, before, f"{before.replace('@bump', '@bump_1')} {BUMP.replace('bump', 'bump_1')}")
