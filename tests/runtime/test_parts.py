"""A value that is computed in parts is the result of its last part, and another value may take its turn at any time."""

from __future__ import annotations

from runtime.parts import InParts, OneAtATime, whole


def numbers(count: int, ended: list[int]) -> InParts[list[int]]:
    """Yield `count` times."""
    try:
        for _ in range(count):
            yield
        return [count]
    finally:
        ended.append(count)


def test_all_parts_run_one_after_another() -> None:
    ended: list[int] = []
    assert whole(numbers(5, ended)) == [5] and whole(numbers(0, ended)) == [0] and ended == [5, 0]


def test_one_value_is_computed_at_a_time() -> None:
    ended: list[int] = []
    one = OneAtATime[list[int]]()

    def advance(count: int) -> list[int] | None:
        return one.advance(count, lambda: numbers(count, ended))

    assert [advance(2), advance(2), advance(2)] == [None, None, [2]]
    assert [advance(3), advance(3)] == [None, None] and ended == [2]
    assert advance(1) is None and ended == [2, 3], "the first value is dropped"
    assert advance(1) == [1]
    assert [advance(3) for _ in range(4)] == [None, None, None, [3]], "a value that was dropped begins anew"
    assert advance(0) == [0]
