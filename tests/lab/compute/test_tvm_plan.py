"""The benchmark translates our functions for TVM, with the same allocations and lifetimes, and TVM plans their memory. If TVM is not
installed, the tests check only the error that says so."""

from __future__ import annotations

import sys

import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.driver import Options
from compiler.frontend.decoder import StepBounds
from compiler.ir.text.parser import parse
from server.settings import SettingsError
from tests.lab.compute import compiler
from tests.lab.compute.tvm_plan import planned_bytes

STEP = """
func step(x: f32[n], state: f32[n], rows: i32[r]) -> f32[r] where n in 0..64, r in 0..16 {
  dataflow {
    a = call_tir @copy(x) -> f32[n]
    column: f32[n, 1] = reshape(a, shape[n, 1])
    b = call_tir @spread(column) -> f32[n, 4]
    kept = call_tir_inplace @touch(state, b) [0] -> f32[n]
    c = call_tir @copy(kept) -> f32[n]
    halves = call_tir @split(c, b) -> (f32[n], f32[n])
    half: f32[n] = halves.1
    y = call_tir @pick(a, column, kept, half, rows) -> f32[r]
  }
  return y
}
"""


def test_views_tuples_and_results_in_place_keep_their_meaning():
    pytest.importorskip("tvm", reason="TVM is an optional peer")
    # The bytes of a, b, c, the two halves, and y. `column` is a view of a, and `kept` reuses the memory of `state`, so they add nothing.
    planned = 256 + 1024 + 256 + 2 * 256 + 64
    assert planned_bytes(parse(STEP).graph("step")) == planned
    fresh = STEP.replace("call_tir_inplace @touch(state, b) [0]", "call_tir @touch(state, b)")
    assert planned_bytes(parse(fresh).graph("step")) == planned + 256


def test_a_length_without_a_bound_is_no_plan():
    pytest.importorskip("tvm", reason="TVM is an optional peer")
    with pytest.raises(ValueError, match="upper bounds"):
        planned_bytes(parse(STEP.replace("n in 0..64", "n in 0..")).graph("step"))


def test_sizes_of_every_form_are_planned():
    """TVM plans sizes that contain quotients, remainders, minima and maxima of variables, and sizes with a variable that a match_cast
    defines."""
    pytest.importorskip("tvm", reason="TVM is an optional peer")
    text = """
      func step(x: f32[n]) -> f32[min(n, 16)] where n in 0..64, m in 0..32 {
        dataflow {
          a = call_tir @pad(x) -> f32[max(n, 24)]
          b = call_tir @halve(a) -> f32[n // 2 + n % 2]
          rows: f32[m] = match_cast b to f32[m]
          c = call_tir @copy(rows) -> f32[m]
          y = call_tir @pick(a, c) -> f32[min(n, 16)]
        }
        return y
      }
    """
    # The lifetimes of each operand and its result overlap. The bound of n // 2 + n % 2 is 33, the sum of the bounds 32 and 1.
    assert planned_bytes(parse(text).graph("step")) == 4 * (64 + 33 + 32 + 16)


def test_the_step_of_a_decoder_is_planned():
    pytest.importorskip("tvm", reason="TVM is an optional peer")
    bounds = StepBounds(64, 64, 512)
    module = pipeline(Options().target).until("lift_workspace")(compiler.decoder(2, bounds))
    arena = pipeline(Options().target).only(("explicit_memory", "plan_memory"))(module).graph("step").arena
    assert arena is not None and arena.is_const
    theirs = planned_bytes(module.graph("step"))
    assert arena.const <= theirs < 10 * arena.const


def test_an_absent_peer_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm", None)
    with pytest.raises(SettingsError, match="pip install apache-tvm"):
        compiler.main(["--peer", "tvm"])
