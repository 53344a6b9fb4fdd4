"""The pass moves a cast before a gathering or a look-up if nothing else reads the result, and if the cast makes it smaller."""

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


def test_rows_are_rounded_before_they_are_looked_up(becomes: Callable[[Pass, str, str], None]) -> None:
    """Also if several products read the rows, which each round them."""
    given = "func main(x: f32[n, 8], i: i32[3 * n], weight w: bf16[4, 8], weight v: bf16[4, 8]) -> object"
    products = "a = linear({}, w) b = linear({}, v) t = (a, b) return t"
    before = f'{given} {{ y = embedding(x, i) r = cast(y, dtype="bf16") s = cast(y, dtype="bf16") {products.format("r", "s")} }}'
    cast = '{} = cast(x, dtype="bf16") {} = embedding({}, i)'
    expected = f"{given} {{ y = embedding(x, i) {cast.format('p', 'r', 'p')} {cast.format('q', 's', 'q')} {products.format('r', 's')} }}"
    becomes(gather_rounded, before, expected)


def test_a_table_with_more_rows_than_are_looked_up_is_not_rounded(stays: Callable[[Pass, str], None]) -> None:
    given = "func main(x: f32[100, 8], i: i32[n]) -> bf16[n, 8] where n in 0..50"
    stays(gather_rounded, f'{given} {{ y = embedding(x, i) r = cast(y, dtype="bf16") return r }}')


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
