"""The pass moves a cast before a gathering if nothing else reads the gathered columns, and if the cast makes them smaller."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.backends.cuda.passes.gather_rounded import gather_rounded
from compiler.passes.base import Pass


def test_each_rank_rounds_its_own_columns(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 8]) -> bf16[n, 16] { g = all_gather(x, x, axis=1) r = cast(g, dtype="bf16") return r }
    """
    expected = """
        func main(x: f32[n, 8]) -> bf16[n, 16] {
          g = all_gather(x, x, axis=1)
          p = cast(x, dtype="bf16")
          r = all_gather(p, p, axis=1)
          return r
        }
    """
    becomes(gather_rounded, before, expected)


@pytest.mark.parametrize(
    ("dtype", "rest"),
    [
        ("f32", 'r = cast(g, dtype="bf16") s = add(g, g) t = (r, s) return t'),
        ("bf16", 'r = cast(g, dtype="f32") return r'),
        ("f32", "r = add(g, g) return r"),
    ],
    ids=["read elsewhere", "a larger type", "no cast"],
)
def test_others_stay(stays: Callable[[Pass, str], None], dtype: str, rest: str) -> None:
    stays(gather_rounded, f"func main(x: {dtype}[n, 8]) -> object {{ g = all_gather(x, x, axis=1) {rest} }}")
