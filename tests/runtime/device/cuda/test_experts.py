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
from tests.runtime.device.cuda.test_products import random

pytestmark = [needs_pycuda, pytest.mark.gpu]


# For each kind of weights: the depth, the group of a scale (0: no scales), how the matrix is made, and the weights' types.
KINDS = {
    "bf16": (128, 0, "w = q", "bf16", ""),
    "int4": (192, 64, "w = dequantize(q, s, bits=4, group=64)", "u8", "bf16"),
    "int8": (128, 128, "w = dequantize(q, s)", "i8", "f32"),
    "mxfp4": (192, 32, 'w = dequantize(q, s, bits=4, group=32, kind="e2m1")', "u8", "bf16"),
}


def program(kind: str) -> str:
    depth, group, made, holds, scale = KINDS[kind]
    scales = f", weight s: {scale}[4, 72, {depth // group}]" if group else ""
    return f"""
func main(x: f32[t, {depth}], e: i32[t], weight q: {holds}[4, 72, {depth // (2 if holds == "u8" else 1)}]{scales},
          weight b: f32[4, 72]) -> object where t in 0..256 {{
  dataflow {{ {made} y = expert_linear(x, w, e, b, tolerates="bf16") }}
  return y
}}
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", KINDS)
def test_near_the_meaning_and_the_same_bits_alone(target: str, kind: str, software_gpu: SoftwareGpu) -> None:
    """One launch rounds the rows to bf16, another one multiplies them on tensor cores."""
    module = parse(program(kind))
    executable = compile_module(module, Options(get(target)))
    depth, group, _, holds, scale = KINDS[kind]
    by_mma, by_wgmma = (instruction in executable.object_code for instruction in (b"mma.sync", b"wgmma.mma_async"))
    assert len(executable.meta.kernels) == 2 and by_mma != by_wgmma
    assert by_wgmma == (target == "sm_90a" and kind != "mxfp4"), "the groups of mxfp4 are shorter than a step of wgmma"
    rng = np.random.default_rng(0)
    experts = np.repeat([3, 0, 1, 0], [70, 9, 2, 1]).astype(np.int32)
    x = rng.standard_normal((len(experts), depth), np.float32)
    weights = {"q": random(1, 4, 72, depth // (2 if holds == "u8" else 1), dtype=holds)}
    if group:
        weights["s"] = random(2, 4, 72, depth // group, dtype=scale)
    weights["b"] = random(3, 4, 72, dtype="f32")
    session = Session(executable)
    bind_values(session, executable, "main", weights)
    together = session.call("main", x, experts)
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    meaning = Interpreter(module).call("main", rounded, experts, *weights.values())
    np.testing.assert_allclose(together, meaning, rtol=1e-4, atol=1e-5 * abs(meaning).max())
    for rows in (slice(0, 1), slice(60, 73), slice(69, 82), slice(81, 82)):
        np.testing.assert_array_equal(session.call("main", x[rows], experts[rows]), together[rows])
