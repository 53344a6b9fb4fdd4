"""The plugin of `make check`: order, deadline and failures."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from tests.check.plugin import SECONDS
from tests.plain_pytest import plain_pytest


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name, body in {"a": "pass", "b": "assert 1 == 2, 'a fault'", "c": "pass"}.items():
        (folder / f"test_{name}.py").write_text(f"def test_{name}():\n    {body}\n")
    return plain_pytest(folder, "-p", "tests.check.plugin", *options, *sorted(folder.glob("test_*.py")))


def test_files_run_in_the_given_order_and_failures_are_shown_at_once(tmp_path: Path) -> None:
    ranked = tmp_path / "ranked"
    ranked.write_text("test_c.py\ntest_b.py\ntest_a.py")
    result = run(tmp_path, "-v", "--until", str(time.time() + 600), "--ranked", str(ranked))
    order = [result.stdout.index(f"::test_{name} ") for name in "cba"]
    assert order == sorted(order), result.stdout
    assert result.stdout.index("a fault") < result.stdout.index("::test_a "), "the failure is shown before the next test runs"
    assert result.returncode == 1


def test_no_test_starts_after_the_deadline(tmp_path: Path) -> None:
    result = run(tmp_path, "--until", str(time.time() - 1))
    assert result.returncode == 0, result.stdout
    assert "3 left out" in result.stdout
    assert all(f"test_{name}.py" in result.stdout.partition("left out for lack of time (3 files):")[2] for name in "abc")


def test_it_remembers_how_long_files_take(tmp_path: Path) -> None:
    run(tmp_path)
    seconds = json.loads((tmp_path / SECONDS).read_text())
    assert set(seconds) == {"test_a.py", "test_b.py", "test_c.py"} and all(each >= 0 for each in seconds.values())
