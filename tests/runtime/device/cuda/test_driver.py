"""The runtime sets attributes of a kernel when it loads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.device.cuda import driver
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = needs_pycuda

PROGRAM = "func main(x: bf16[n, 64], w: bf16[64, 64]) -> object where n in 0..8 { dataflow { y = linear(x, w) z = softmax(y) } return z }"
CARVE_OUT, ALL = 9, 100


def test_every_kernel_prefers_all_shared_memory(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that prefer different shares of the L1 cache could not overlap."""
    calls: list[tuple[Any, ...]] = []
    call = driver.call

    def recording(name: str, *arguments: Any, about: str = "") -> None:
        calls.append((name, *arguments))
        call(name, *arguments, about=about)

    monkeypatch.setattr(driver, "call", recording)
    session = Session(compile_module(parse(PROGRAM), Options(get("sm_90a"))))
    session.call("main", np.ones((2, 64), np.float32).astype("bfloat16"), np.ones((64, 64), np.float32).astype("bfloat16"))
    num_kernels = sum(name == "cuModuleGetFunction" for name, *_ in calls)
    preferring = {c[1].value for c in calls if c[0] == "cuFuncSetAttribute" and c[2:4] == (CARVE_OUT, ALL)}
    assert num_kernels >= 2 and len(preferring) == num_kernels
