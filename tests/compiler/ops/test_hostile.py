"""Every operator with random attributes, sizes and indices, and valid calls with bad indices, between guard pages in a child process: no
signal ends the process, only named errors are raised, and interpreter and compiled code agree (the result, or that both refuse the
call)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compiler.ops
from compiler.ir.op import OPS
from compiler.ops.tables import INDICES
from tests.compiler.ops.hostile.cases import CASES
from tests.compiler.ops.hostile.draws import ROWS
from tests.compiler.ops.hostile.run import TARGETS

assert compiler.ops

ROOT = Path(__file__).parents[3]
OPERATORS = sorted(name for name in OPS if "." not in name)  # operators that tests define have a dot in the name


def start(first: int, last: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.compiler.ops.hostile.run", str(first), str(last), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def hostile(first: int, last: int) -> list[str]:
    """Run the draws, and return what is wrong. A signal ends the process; the draws after it then run in a new process."""
    wrong: list[str] = []
    while first < last:
        ran = start(first, last)
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


def test_every_operator_with_index_operands_has_a_case() -> None:
    assert {case.op for case in CASES.values()} == set(INDICES)


def test_hostile_calls() -> None:
    assert not (wrong := hostile(0, len(TARGETS))), "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 500))
def test_hostile_calls_at_length(first: int) -> None:
    """Run 500 of 10,000 draws. Repeat one with `python -m tests.compiler.ops.hostile.run NUMBER NUMBER+1`."""
    assert not (wrong := hostile(first, first + 500)), "\n\n".join(wrong)


@pytest.mark.parametrize("name", ["paged_attention:0", "ragged_mean:0", "kv_append:0"])
def test_bad_indices_lead_out_of_memory_without_protection(name: str) -> None:
    """Without the safe copies, a bad index reads foreign memory. This shows that the campaign can fail."""
    assert start(0, 10, name, "--trusting").returncode == -signal.SIGSEGV
