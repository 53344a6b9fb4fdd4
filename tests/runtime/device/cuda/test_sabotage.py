"""Mistakes in the kernel of a product by `wgmma`, as it ships, are noticed by the software GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.errors import DeviceFault
from runtime.executable import Executable
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.runtime.device.cuda.test_products import random

pytestmark = needs_pycuda

ROWS, COLUMNS, DEPTH = 8, 64, 640
PROGRAM = f"""
func main(x: bf16[n, {DEPTH}], w: bf16[{COLUMNS}, {DEPTH}]) -> object where n in 0..{ROWS} {{
  dataflow {{ y = linear(x, w, out_dtype="f32") }} return y
}}
"""


@dataclass(frozen=True)
class Mistake:
    old: str  # text of the PTX
    new: str
    fault: str  # part of the fault's message
    number: int | None = None  # which occurrence is replaced; None: all

    def made_in(self, ptx: str) -> str:
        parts = ptx.split(self.old)
        assert len(parts) > 1 + (self.number or 0), f"{self.old} is not in the kernel"
        if self.number is None:
            return self.new.join(parts)
        before, after = parts[: self.number + 1], parts[self.number + 1 :]
        return self.old.join(before) + self.new + self.old.join(after)


MISTAKES = {
    "no fence between copied rows and tensor cores": Mistake("fence.proxy.async.shared::cta;", "", "without fence.proxy.async", 1),
    "no wait for copied rows": Mistake("cp.async.wait_group \t5;", "", "copy in flight"),
    "no barrier before other warps' rows are read": Mistake("bar.sync \t0;", "", "a race", 1),
    "fewer bytes announced than copied": Mistake("_, [%r43], 8192;", "_, [%r43], 8176;", "hang|in flight"),
    "no wait for panels": Mistake("mbarrier.try_wait.parity.shared::cta.b64 p, [%r40], %r41;", "setp.eq.u32 p, 1, 1;", "copy in flight"),
    "no wait for the products of the previous step": Mistake("wgmma.wait_group.sync.aligned 1;", "", "still reads"),
    "results read before the last product has ended": Mistake("wgmma.wait_group.sync.aligned 0;", "", "has not waited for"),
}


@cache
def executable() -> Executable:
    return compile_module(parse(PROGRAM), Options(get("sm_90a")))


def run(executable: Executable) -> tuple[np.ndarray, np.ndarray]:
    x, w = random(0, ROWS, DEPTH), random(1, COLUMNS, DEPTH)
    return Session(executable).call("main", x, w), x.astype(np.float32) @ w.astype(np.float32).T


def test_the_kernel_as_it_ships_is_right(software_gpu: SoftwareGpu) -> None:
    found, expected = run(executable())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_a_fault(mistake: Mistake, software_gpu: SoftwareGpu) -> None:
    broken = mistake.made_in(executable().object_code.decode())
    with pytest.raises(DeviceFault):
        run(replace(executable(), object_code=broken.encode()))
    assert re.search(mistake.fault, software_gpu.faults[-1]), software_gpu.faults[-1]
