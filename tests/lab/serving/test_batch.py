"""The benchmark of batches says what it did."""

from __future__ import annotations

from tests.lab.serving.batch import how_killed


def test_a_server_that_was_not_killed_is_said_so() -> None:
    assert how_killed([3, 17]) == "killed at 3, 17"
    assert how_killed([]) == "not killed"
