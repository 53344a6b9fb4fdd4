"""Garbage collection scans only what the running test file has made."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest_plugins = ["pytester"]

CONFTEST = """
import gc, pytest
from tests.conftest import exempt_what_is_left

@pytest.fixture(scope="session")
def left():
    return []

@pytest.fixture
def is_scanned(left):
    return lambda: any(one is left[0] for one in gc.get_objects())
"""
EARLIER = "def test_it(left, is_scanned): left.append([[], []]); assert is_scanned()"
LATER = "def test_it(is_scanned): assert not is_scanned()"


def test_what_an_earlier_file_left_is_not_scanned(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    pytester.makepyfile(conftest=CONFTEST, test_a=EARLIER, test_b=LATER)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_no_test_gives_back_what_is_exempt() -> None:
    """`gc.unfreeze()` would give back all that this process has exempted, so that each later collection scans it."""
    assert gc.get_freeze_count() > 0
    assert [path for path in (ROOT / "tests").rglob("*.py") if "unfreeze()" in path.read_text() and path != Path(__file__)] == []
