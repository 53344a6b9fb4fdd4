"""`python -m tests.lab compiler` reports figures for its own example programs. The values of the figures are not tested."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.compute import compiler


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(run: Callable[[], object], **_: object) -> float:
        run()
        return 1e-3

    monkeypatch.setattr(compiler, "best_s", measured)


def test_growth_is_reported_for_each_number_of_operators() -> None:
    names = [f.name for f in compiler.fusion_growth()]
    assert names == [*(f"compile a chain of {k} doublings" for k in (8, 16, 32, 64)), "compile a chain of 600 exponentials"]


def test_a_call_is_reported_in_microseconds() -> None:
    """The time of a call is reported in microseconds. If a thousand calls take a millisecond, each takes one microsecond."""
    assert {f.name: (f.value, f.unit) for f in compiler.empty_call()} == {"empty_call_us": (1.0, "us"), "empty_launch_us": (1.0, "us")}
