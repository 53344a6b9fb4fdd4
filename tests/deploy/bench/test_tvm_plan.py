"""What the peer plans is our function: the same allocations with the same lives. Without TVM only the refusal can be seen."""

from __future__ import annotations

import sys

import pytest

from compiler.ir.parser import parse
from deploy.bench import compiler
from deploy.bench.tvm_plan import planned_bytes
from server.settings import SettingsError

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
    y = call_tir @pick(half, rows) -> f32[r]
  }
  return y
}
"""


def test_views_tuples_and_results_in_place_keep_their_meaning():
    pytest.importorskip("tvm", reason="TVM is an optional peer")
    # a, then c in its place if the view is known to be one; b; both halves; y. `kept` is the memory of `state`.
    assert planned_bytes(parse(STEP).graph("step")) == 256 + 1024 + 2 * 256 + 64


def test_an_absent_peer_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm", None)
    with pytest.raises(SettingsError, match="pip install apache-tvm"):
        compiler.main(["--peer", "tvm"])
