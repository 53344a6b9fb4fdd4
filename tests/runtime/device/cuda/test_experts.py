"""Products in which each row chooses one of several matrices are accurate on tensor cores. The result of a row has the same bits alone as
in a batch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu]


def program(depth: int, group: int) -> str:
    return f"""
func main(x: bf16[t, {depth}], e: i32[t], weight q: u8[4, 72, {depth // 2}], weight s: bf16[4, 72, {depth // group}],
          weight b: f32[4, 72]) -> object where t in 0..256 {{
  dataflow {{ w = dequantize(q, s, bits=4, group={group}) y = expert_linear(x, w, e, b, out_dtype="f32") }}
  return y
}}
"""


@pytest.mark.parametrize(("target", "depth", "group"), [("sm_80", 96, 32), ("sm_90a", 192, 64)])
def test_near_the_meaning_and_the_same_bits_alone(target: str, depth: int, group: int, software_gpu: SoftwareGpu) -> None:
    module = parse(program(depth, group))
    executable = compile_module(module, Options(get(target)))
    assert [len(k.phases) for k in executable.meta.kernels] == [1], "expected one launch"
    rng = np.random.default_rng(0)
    experts = np.repeat([3, 0, 1, 0], [70, 9, 2, 1]).astype(np.int32)
    x = rng.standard_normal((len(experts), depth)).astype(ml_dtypes.bfloat16)
    weights = {
        "q": rng.integers(0, 256, (4, 72, depth // 2)).astype(np.uint8),
        "s": rng.random((4, 72, depth // group)).astype(ml_dtypes.bfloat16),
        "b": rng.standard_normal((4, 72)).astype(np.float32),
    }
    session = Session(executable)
    bind_values(session, executable, "main", weights)
    together = session.call("main", x, experts)
    meaning = Interpreter(module).call("main", x, experts, *weights.values())
    np.testing.assert_allclose(together, meaning, rtol=1e-4, atol=1e-5 * abs(meaning).max())
    for rows in (slice(0, 1), slice(60, 73), slice(69, 82), slice(81, 82)):
        np.testing.assert_array_equal(session.call("main", x[rows], experts[rows]), together[rows])
