"""For every weight format, a kernel measures how many multiplications per second the machine can do. The tests run these kernels."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import Target, get, host
from deploy.bench import limits
from deploy.bench.limits import Gauge, Limits, mean_seconds, multiplying
from runtime.session import Session

FORMATS = ["f32", "bf16", "int8", "int4-32"]


def runs(held: str, target: Target) -> None:
    text, steps, operations, args = multiplying(held, target)
    session = Session(compile_module(parse(text), Options(target)), device_threads=1)
    assert session.call("main", *args, (1,)).shape == (64,)
    session.close()
    assert operations > steps > 1


@pytest.mark.parametrize("held", FORMATS)
def test_what_only_multiplies_runs(held: str) -> None:
    runs(held, host())


@pytest.mark.skipif(not get("x86-64-v3").can_run_here, reason="not an x86-64-v3")
def test_words_by_bytes_run() -> None:
    text, _, _, (rows, _) = multiplying("int8", get("x86-64-v3"))
    assert rows.dtype == np.int16 and '"dot_words"' in text
    runs("int8", get("x86-64-v3"))


@pytest.mark.parametrize("held", FORMATS)
def test_what_only_multiplies_runs_on_matrix_units(amx: Target, matrix_unit: Any, held: str) -> None:
    """The kernel uses the matrix unit for every weight format except f32, which the unit cannot multiply."""
    before = matrix_unit.counts
    runs(held, amx)
    multiplied = (matrix_unit.counts - before)[-1]
    assert matrix_unit.library is None or (multiplied > 0) == (held != "f32")


@pytest.mark.parametrize("name", ["x86-64-v3", "avx512"])
def test_the_plain_multiply_add_fills_registers_and_no_more(name: str) -> None:
    """The kernel has exactly as many accumulators as fit into registers. Spilling them would halve the speed on a machine with 16
    registers."""
    text, _, _, (values,) = multiplying("f32", get(name))
    assert values.nbytes * 8 == get(name).vector_bits
    assert "alloc local a: f32[12," in text


def test_the_peak_is_a_mean_over_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 4 ms and 8 ms in turns: the peak is that of all runs of the span, not that of the fastest run."""
    now, lasts = [100.0], itertools.cycle((0.004, 0.008))

    def run() -> None:
        now[0] += next(lasts)

    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert mean_seconds(run, 0.02) == pytest.approx(0.006)


class Spans(Gauge):
    """A fake gauge that records how long each reading lasts."""

    def __init__(self) -> None:
        self.spans: list[float] = []

    def sample(self, span_s: float = limits.SHORTEST_S) -> None:
        self.spans.append(span_s)
        self._read_s = self._multiply_s = self._operations = 1.0


def test_readings_last_as_long_as_the_step_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 300 ms spends part of its time in slow phases of the machine, so the peak it is compared with must do so too."""
    now, lasts = [100.0], iter((9.0, 0.3, 0.25, 0.001, 5.0))

    def run() -> None:
        now[0] += next(lasts)

    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    gauge = Spans()
    best, _ = gauge.beside(run, seconds=100.0, most=4)
    assert best == pytest.approx(0.001)
    assert gauge.spans == pytest.approx([0.3, 0.25, limits.SHORTEST_S, limits.LONGEST_S])


def test_the_slower_of_two_limits_holds() -> None:
    limits = Limits(bytes_per_s=10.0, flops=100.0)
    assert limits.seconds(50.0, 100.0) == 5.0
    assert limits.seconds(10.0, 300.0) == 3.0
