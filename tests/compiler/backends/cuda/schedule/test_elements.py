"""The reference schedule of GPUs: one thread per element, one launch per stage."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Tile
from compiler.ir.loops.visit import statements, walk_stmts
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import canonical_text
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops

SILU = """
func main(x: f32[n, 48], y: f32[n, 48]) -> f32[n, 48] where n in 0..64 {
  dataflow { s = silu(x) out = multiply(s, y) }
  return out
}
"""


def scheduled(program: str) -> IRModule:
    module = pipeline(get("sm_80")).until("schedule_kernels")(parse(program))
    verify(module)
    return module


def test_a_thread_computes_an_element() -> None:
    (prim,) = scheduled(SILU).prim_functions.values()
    assert canonical_text("k", prim) == EXPECTED.strip()


EXPECTED = """
prim k(b1: f32[d1, 48], b2: f32[d1, 48], out b3: f32[d1, 48])
    where d1 in 0..64 attrs {schedule="elements"} {
  for block d2 in (3*d1 + 7) // 8 {
    for thread d3 in 128 {
      when dim(128*d2 + d3) < dim(48*d1) {
        let d4 within 0..47 = dim((32*d2 + d3) % 48) {
          let d5 within 0..d1 - 1 = dim(2*d2 + ((32*d2 + d3) // 48)) {
            b3[d5, d4] = b2[d5, d4] / (1.0 + exp(-b2[d5, d4])) * b1[d5, d4]
          }
        }
      }
    }
  }
}
"""


@pytest.mark.parametrize(
    "program",
    [
        SILU,
        "func main(x: f32[n, 48], w: f32[20, 48]) -> f32[n, 20] where n in 0..64 { dataflow { y = linear(x, w) } return y }",
        "func main(x: f32[n, 48], w: f32[48]) -> f32[n, 48] where n in 0..64 "
        "{ dataflow { y = rms_norm(x, w, eps=1e-5, weight_offset=0.0) } return y }",
        "func main(x: f32[n, 48], w: i32[n]) -> f32[n, 48] where n in 1..64 { dataflow { y = embedding(x, w) } return y }",
    ],
)
def test_the_meaning_stays(program: str) -> None:
    rng = np.random.default_rng(0)
    params = parse(program).graph("main").params
    shapes = [tuple(7 if d.var is not None else d.const for d in p.type.shape) for p in params]
    args = [
        rng.integers(0, 7, s).astype(np.int32) if str(p.type.dtype) == "i32" else rng.standard_normal(s, np.float32)
        for p, s in zip(params, shapes, strict=True)
    ]
    found, meaning = (Interpreter(m).call("main", *(a.copy() for a in args)) for m in (scheduled(program), parse(program)))
    np.testing.assert_allclose(found, meaning, rtol=1e-5, atol=1e-5)


APPEND = """
impure func main(cache: {kind}[1, 2, 3, 2, 128], k: f32[t, 2, 8], v: f32[t, 2, 8], slots: i32[t]{scales}) -> object where t in 0..8 {{
  new = kv_append(cache, k, v, slots, 0{given}) return new
}}"""


@pytest.mark.parametrize(
    ("program", "phases"),
    [
        (APPEND.format(kind="f32", scales="", given=""), 1),
        (APPEND.format(kind="i8", scales=", scales: f32[1, 2, 3, 2, 16]", given=", scales"), 3),
    ],
    ids=["keys beside values", "maxima before scales, and scales before what they scale"],
)
def test_stages_that_do_not_touch_each_other_are_one_launch(program: str, phases: int) -> None:
    module = scheduled(program)
    (prim,) = module.prim_functions.values()
    body = prim.body
    while isinstance(body, Let | Allocate):
        body = body.body
    assert len(statements(body)) == phases
    rng, held = np.random.default_rng(0), np.dtype(np.int8 if phases > 1 else np.float32)
    args = [(rng.standard_normal((1, 2, 3, 2, 128)) * 40).astype(held)]
    args += [rng.standard_normal((5, 2, 8), np.float32) for _ in range(2)]
    args += [np.array([0, 1, 17, 40, 33], np.int32)] + [rng.random((1, 2, 3, 2, 16)).astype(np.float32)] * (phases > 1)
    found, meaning = (Interpreter(m).call("main", *(a.copy() for a in args)) for m in (module, parse(program)))
    for a, b in zip(found if isinstance(found, tuple) else (found,), meaning if isinstance(meaning, tuple) else (meaning,), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("read", "phases"), [("X[i, j]", 2), ("W[i, j]", 1)])
def test_a_stage_that_reads_what_another_one_overwrites_in_place_has_a_launch_of_its_own(read: str, phases: int) -> None:
    program = f"""
        impure func main(x: f32[n, 48], w: f32[n, 48]) -> object where n in 0..64 {{
          y = call_tir_inplace @f(x, w) [0, _] -> (f32[n, 48], f32[n, 48])
          return y
        }}
        prim f(X: f32[n, 48], W: f32[n, 48], out Y: f32[n, 48], out Z: f32[n, 48]) {{
          for i in n, j in 48 {{ Z[i, j] = {read} * 3.0 }}
          for i in n, j in 48 {{ Y[i, j] = W[i, j] * 2.0 }}
        }}
    """
    module = scheduled(program)
    (prim,) = (prim for prim in module.prim_functions.values() if "schedule" in prim.attrs)
    assert len(statements(prim.body)) == phases


def test_every_phase_is_a_loop_over_blocks_with_threads_inside() -> None:
    """Each phase of a scheduled nest is a loop over blocks that contains a loop over threads. If the nest was written with CPU loops
    (parallel or vector), these are replaced as well."""
    program = """
func main(logits: f32[n, 100], rows: i32[s], tokens: i32[s], tops: i32[s]) -> object where n in 0..8, s in 0..8 {
  dataflow { r = token_logprobs(logits, rows, tokens, tops) } return r
}"""
    for text in (SILU, program):
        for prim in scheduled(text).prim_functions.values():
            body = prim.body
            while not isinstance(body, Seq | For):
                body = body.body  # type: ignore[union-attr]
            for phase in body.stmts if isinstance(body, Seq) else (body,):
                assert isinstance(phase, For) and phase.kind is LoopKind.BLOCK
                kinds = [s.kind for s in walk_stmts(phase) if isinstance(s, For)]
                assert LoopKind.THREAD in kinds and not {LoopKind.PARALLEL, LoopKind.VECTOR} & {*kinds}
                assert all(s.op.name in ("shift", "append") for s in walk_stmts(phase) if isinstance(s, Tile))
