"""Programs with a false annotation at each boundary run between guard pages. Every false annotation is refused, and no memory outside the
buffers is read or written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.random_programs.false_facts import BOUNDARIES

ROOT = Path(__file__).parents[2]


def guarded(first: int, last: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.compiler.random_programs.guarded", str(first), str(last), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def results(ran: subprocess.CompletedProcess[str]) -> dict[int, dict[str, Any]]:
    lines = ran.stdout.splitlines()
    started = [int(line.removeprefix("program ")) for line in lines if line.startswith("program ")]
    if ran.returncode == -signal.SIGSEGV:
        last = started[-1]
        pytest.fail(f"program {last} touched foreign memory; python -m tests.compiler.random_programs.guarded {last} {last + 1}")
    assert ran.returncode == 0, f"program {started[-1:]}: {ran.stderr[-3000:]}"
    return dict(zip(started, (json.loads(line) for line in lines if line.startswith("{")), strict=True))


def count_refusals(found: dict[int, dict[str, Any]]) -> dict[str, int]:
    """Return for each boundary how many calls were refused, and require that the interpreter refused the same calls."""
    refused = dict.fromkeys(BOUNDARIES, 0)
    for seed, result in found.items():
        for expected, happened in result.get("calls", ()):
            assert happened == expected, f"program {seed}, {result['boundary']}: {happened}, but the interpreter {expected}"
            refused[result["boundary"]] += happened == "refused"
    return refused


def test_false_facts_are_refused_and_foreign_memory_stays_untouched() -> None:
    refused = count_refusals(results(guarded(0, 3 * len(BOUNDARIES))))
    assert all(refused.values()), f"refused per boundary: {refused}"


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1800, 80))
def test_false_facts_at_length(start: int) -> None:
    refused = count_refusals(results(guarded(start, start + 80)))
    assert all(refused.values()), f"refused per boundary: {refused}"


def test_guard_pages_catch_a_compiler_that_trusts_annotations() -> None:
    """Without the checks that the compiler inserts, a program with a false annotation crashes. This shows that the other tests of this file
    can fail."""
    assert guarded(0, 3 * len(BOUNDARIES), "--trusting").returncode == -signal.SIGSEGV
