"""The planner places values in the arena. Two values share a place only if their lifetimes do not overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.values import Alloc
from compiler.ir.text.parser import parse
from compiler.ir.types import ObjectType
from compiler.passes.base import Pass
from compiler.passes.memory.plan_memory import _Life, place, plan_memory

E1 = "prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = exp(A[i]) } }"


def arena(text: str) -> str:
    return str(plan_memory(parse(text)).graph("main").arena)


def test_memory_is_reused_behind_the_last_use(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"""
        func main(x: f32[n]) -> object where n in 0..16 {{
          a = alloc f32[n]
          launch @e(x, a)
          b = alloc f32[n]
          launch @e(a, b)
          c = alloc f32[n]
          launch @e(b, c)
          return c
        }}
        {E1}
    """
    expected = before.replace("where n in 0..16", "where n in 0..16 arena 128")
    for name, offset in [("a", 0), ("b", 64), ("c", 0)]:
        expected = expected.replace(f"{name} = alloc f32[n]", f"{name} = alloc f32[n] at {offset}")
    becomes(plan_memory, before, expected)


@pytest.mark.parametrize(
    "alias",
    [
        "v = match_cast a to f32[m]",
        "v = reshape(a, shape[n])",
        "v = a",
        "t = (a, x) v = t.0",
        "v: f32[n] = if c { return a } else { return x }",
    ],
    ids=["match_cast", "view", "name", "tuple", "branch"],
)
def test_an_alias_keeps_memory_alive(alias: str) -> None:
    def program(late: str) -> str:
        return f"""
            func main(c: bool[], x: f32[n]) -> object where n in 0..16 {{
              a = alloc f32[n]
              launch @e(x, a)
              {alias}
              b = alloc f32[n]
              launch @e(a, b)
              d = alloc f32[n]
              launch @e(b, d)
              launch @e({late}, d)
              return d
            }}
            {E1}
        """

    assert arena(program("x")) == "128"
    assert arena(program("v")) == "192"


def test_sides_of_a_branch_share_memory() -> None:
    text = f"""
        func main(c: bool[], x: f32[n]) -> object where n in 0..16 {{
          r: f32[n] = if c {{ a = alloc f32[n] launch @e(x, a) return a }} else {{ b = alloc f32[n] launch @e(x, b) return b }}
          d = alloc f32[n]
          launch @e(r, d)
          return d
        }}
        {E1}
    """
    # The arena has room for the results of both branches, because the branch is chosen at run time.
    assert arena(text) == "192"


def test_reuse_needs_a_proof_of_not_more_than_and_no_equality() -> None:
    """A value may reuse a place that is provably large enough, even if its size is different: n elements fit into a place of 2*n elements.
    If neither n <= m nor m <= n can be proved, their values get separate places."""
    text = f"""
        func main(x: f32[n], y: f32[2*n], z: f32[m]) -> object {{
          a = alloc f32[2*n]
          launch @e(y, a)
          b = alloc f32[n]
          launch @e(x, b)
          c = alloc f32[n]
          launch @e(b, c)
          return c
        }}
        {E1}
    """
    assert arena(text) == "64*((n + 7) // 8) + 64*((n + 15) // 16)"
    other = text.replace("b = alloc f32[n]", "b = alloc f32[m]").replace("@e(x, b)", "@e(z, b)")
    assert arena(other) == "64*((n + 7) // 8) + 64*((m + 15) // 16)"


def test_a_called_function_has_an_arena_but_its_result_has_memory_of_its_own() -> None:
    module = plan_memory(
        parse("""
            func main(x: f32[8]) -> object { a = alloc f32[8] launch @e(x, a) b = @helper(a) return b }
            func helper(x: f32[8]) -> f32[8] { a = alloc f32[8] launch @e(x, a) b = alloc f32[8] launch @e(a, b) return b }
            prim e(A: f32[n], out B: f32[n]) { for i in n { B[i] = exp(A[i]) } }
        """)
    )
    assert str(module.graph("main").arena) == "64"
    assert str(module.graph("helper").arena) == "64"
    temporary, result = (b.value for b in module.graph("helper").body.bindings if isinstance(b.value, Alloc))
    assert str(temporary.offset) == "0" and result.offset is None


def test_a_length_that_data_decides_is_not_part_of_the_arena() -> None:
    text = f"""
        func main(x: f32[ndim=1]) -> object {{ y = match_cast x to f32[k] a = alloc f32[k] launch @e(y, a) return a }} {E1}
    """
    module = parse(text)
    assert plan_memory(module) is module


# --- random lifetimes ----------------------------------------------------------------------------------------------------

N, M = DimVar("n", 1), DimVar("m", 1)
SIZES = [Dim.of(64), Dim.of(128), Dim.of(4096), N * 64, N * 128, M * 64, N * M * 64, N * 64 + 64]


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 12), st.integers(0, 6)), max_size=12), st.integers(1, 5), st.integers(1, 5)
)
def test_those_that_live_at_once_do_not_overlap(drawn: list[tuple[Dim, int, int]], n: int, m: int) -> None:
    lives = [_Life(Var("v", ObjectType()), size, first, first + length) for size, first, length in sorted(drawn, key=lambda d: d[1])]
    offsets, total = place(lives)
    values = {N: n, M: m}
    spans = [(life, offsets[life.var].evaluate(values), life.size.evaluate(values)) for life in lives]
    for i, (a, start, size) in enumerate(spans):
        assert start % 64 == 0
        assert start + size <= total.evaluate(values)
        for b, other, length in spans[:i]:
            meets = a.first <= b.last and b.first <= a.last
            assert not meets or start + size <= other or other + length <= start
