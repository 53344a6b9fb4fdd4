"""Two reductions along rows share one launch only if they may run at the same time."""

from __future__ import annotations

import pytest

from compiler.backends.cuda.schedule.rows import schedule_rows
from compiler.ir.text.parser import parse


@pytest.mark.parametrize(
    ("second", "matched"),
    [
        ("B[n - 1 - i] = sum(r in 8) X[i, r] * 2.0", True),
        ("A[n - 1 - i] = sum(r in 8) X[i, r] * 2.0", False),
        ("B[n - 1 - i] = sum(r in 8) X[i, r] * A[n - 1 - i, 0]", False),
    ],
    ids=["independent", "both write one buffer", "the second reads the first"],
)
def test_two_programs_share_a_launch(second: str, matched: bool) -> None:
    second = second.replace("[n - 1 - i]", "[n - 1 - i, 0]")
    text = f"""
        prim f(X: f32[n, 8], out A: f32[n, 2], out B: f32[n, 2]) {{
          for i in n {{ A[i, 0] = sum(r in 8) X[i, r] }}
          for i in n {{ {second} }}
        }}
    """
    assert (schedule_rows(parse(text).prim("f")) is not None) is matched
