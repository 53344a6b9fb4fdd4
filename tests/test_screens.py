"""Tests of a terminal or a browser run once more if they fail; others do not."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT

pytest_plugins = ["pytester"]

ONCE = """
from pathlib import Path

def runs(name):
    with open(name, "a") as file: file.write("+")
    return len(Path(name).read_text())

def test_once(): assert runs("once") > 1
"""
SCREEN = f"{ONCE}\ndef test_never(): assert runs('never') > 2\nfrom tests.terminal import terminal\n"


def test_a_test_of_a_terminal_runs_again(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run(SCREEN, pytester, monkeypatch)
    shown.assert_outcomes(failed=1, passed=1)
    assert "test_it.py::test_once failed, and then ran again" in shown.stdout.str()
    assert [(pytester.path / name).read_text() for name in ("once", "never")] == ["++", "++"]


def test_another_test_does_not(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(ONCE, pytester, monkeypatch).assert_outcomes(failed=1)
    assert (pytester.path / "once").read_text() == "+"


def run(text: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.RunResult:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing the plugins of all packages takes each process a second
    pytester.makepyfile(test_it=text)
    return pytester.runpytest_subprocess("-p", "xdist", "-p", "tests.screens", "-p", "no:cacheprovider", "-n", "2")
