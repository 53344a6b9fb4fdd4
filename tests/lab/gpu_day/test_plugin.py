"""The steps of a day with a card judge pytest's runs more strictly than pytest."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.plain_pytest import plain_pytest

TESTS = """
import pytest

@pytest.mark.parametrize("number", [1, 2, 3])
def test_many(number): pass

def test_one(): pass

def test_skipped(): pytest.skip("needs a card")
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS)
    return plain_pytest(folder, "-p", "tests.lab.gpu_day.plugin", *options, "test_some.py", cwd=folder)


def test_a_run_in_which_no_test_passed_has_failed(tmp_path: Path) -> None:
    """Where no card is found, all tests are skipped, and pytest alone would report success."""
    assert run(tmp_path).returncode == 0
    skipped = run(tmp_path, "-k", "skipped")
    assert skipped.returncode == 5 and "1 skipped" in skipped.stdout, skipped.stdout
    assert run(tmp_path, "-k", "skipped", "--may-skip").returncode == 0


def test_a_rehearsal_runs_one_case_of_each_test(tmp_path: Path) -> None:
    assert "4 passed, 1 skipped" in run(tmp_path).stdout
    assert "2 passed, 1 skipped" in run(tmp_path, "--one-case").stdout
    assert run(tmp_path, "--one-case", "--collect-only").returncode == 0
