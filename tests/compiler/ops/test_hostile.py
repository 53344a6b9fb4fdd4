"""Every operator with random attributes, sizes and indices, between guard pages in a child process: no signal ends the process, only named
errors are raised, and interpreter and compiled code agree (the result, or that both refuse the call)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compiler.ops
from compiler.ir.op import OPS
from tests.compiler.ops.hostile import table
from tests.compiler.ops.hostile.draws import ROWS

assert compiler.ops and table

ROOT = Path(__file__).parents[3]
OPERATORS = sorted(name for name in OPS if "." not in name)  # operators that tests define have a dot in the name


def hostile(first: int, last: int, *operators: str) -> list[str]:
    """Run the draws, and return what is wrong. A signal ends the process; the draws after it then run in a new process."""
    wrong: list[str] = []
    while first < last:
        command = [sys.executable, "-m", "tests.compiler.ops.hostile.run", str(first), str(last), *operators]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = ran.stdout.splitlines()
        draws = [line.removeprefix("draw ") for line in lines if line.startswith("draw ")]
        outcomes: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
        wrong += [f"draw {draw}: {outcome['wrong']}" for draw, outcome in zip(draws, outcomes, strict=False) if "wrong" in outcome]
        if ran.returncode == 0:
            break
        assert draws, ran.stderr[-3000:]
        wrong.append(f"draw {draws[-1]}: exit status {ran.returncode}; {ran.stderr[-400:]}")
        first = int(draws[-1].split()[0]) + 1
    return wrong


def test_every_operator_has_a_row() -> None:
    assert sorted(ROWS) == OPERATORS


def test_hostile_calls() -> None:
    assert not (wrong := hostile(0, len(OPERATORS))), "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 10_000, 500))
def test_hostile_calls_at_length(start: int) -> None:
    """10,000 draws. Repeat one with `python -m tests.compiler.ops.hostile.run NUMBER NUMBER+1`."""
    assert not (wrong := hostile(start, start + 500)), "\n\n".join(wrong)
