"""The processor seconds of a test are those of its process and of the processes that it starts."""

from __future__ import annotations

from pathlib import Path

from tests.check.cost import by_function
from tests.plain_pytest import plain_pytest

TESTS = """
import subprocess, sys, time
import pytest

BURN = "import time\\nwhile time.process_time() < 0.3: pass"

@pytest.mark.parametrize("n", [1, 2])
def test_in_a_child(n):
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_here():
    end_s = time.process_time() + 0.3
    while time.process_time() < end_s:
        pass

def test_asleep():
    time.sleep(0.3)
"""


def test_seconds_of_tests_and_their_children_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    plain_pytest(tmp_path, "-p", "tests.check.cost", "--cost", tmp_path / "cost", tmp_path / "test_it.py").check_returncode()
    found = by_function((tmp_path / "cost").read_text())
    assert list(found) == [f"test_it.py::test_{name}" for name in ("in_a_child", "here", "asleep")]
    assert found["test_it.py::test_in_a_child"] > 0.5 and found["test_it.py::test_here"] > 0.25
    assert found["test_it.py::test_asleep"] < 0.25
