"""Mistakes in the kernel of a product by `wgmma`, as it ships, are noticed by the software GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.errors import DeviceFault
from runtime.executable import Executable
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.runtime.device.cuda.test_products import random

pytestmark = needs_pycuda

ROWS, COLUMNS, DEPTH, GROUP = 8, 64, 768, 128
BF16 = f"""
func main(x: bf16[n, {DEPTH}], w: bf16[{COLUMNS}, {DEPTH}]) -> object where n in 0..{ROWS} {{
  dataflow {{ y = linear(x, w, out_dtype="f32") }} return y
}}
"""
INT4 = f"""
func main(x: bf16[n, {DEPTH}], q: u8[{COLUMNS}, {DEPTH // 2}], s: bf16[{COLUMNS}, {DEPTH // GROUP}]) -> object where n in 0..{ROWS} {{
  dataflow {{ w = dequantize(q, s, bits=4, group={GROUP}) y = linear(x, w, out_dtype="f32") }} return y
}}
"""


@dataclass(frozen=True)
class Mistake:
    old: str  # text of the PTX
    new: str
    fault: str  # part of the fault's message
    number: int | None = None  # which occurrence is replaced; None: all
    program: str = BF16

    def made_in(self, ptx: str) -> str:
        parts = ptx.split(self.old)
        assert len(parts) > 1 + (self.number or 0), f"{self.old} is not in the kernel"
        if self.number is None:
            return self.new.join(parts)
        before, after = parts[: self.number + 1], parts[self.number + 1 :]
        return self.old.join(before) + self.new + self.old.join(after)


MISTAKES = {
    "no fence between copied rows and tensor cores": Mistake("fence.proxy.async.shared::cta;", "", "without fence.proxy.async", 1),
    "no wait for copied rows": Mistake("cp.async.wait_group \t2;", "", "copy in flight"),
    "no barrier before other warps' rows are read": Mistake("bar.sync \t0;", "", "a race", 1),
    "fewer bytes announced than copied": Mistake(", 16384;", ", 16368;", "hang|in flight"),
    "no wait for panels": Mistake(", 1, 0, p; }", ", 1, 1, p; }", "copy in flight"),
    "no wait for the products of the previous stage": Mistake("wgmma.wait_group.sync.aligned 1;", "", "still reads"),
    "results read before the last product has ended": Mistake("wgmma.wait_group.sync.aligned 0;", "", "has not waited for"),
    "weights converted over those that a product reads": Mistake(
        "wgmma.wait_group.sync.aligned 0; }", "wgmma.wait_group.sync.aligned 2; }", "has not waited for|still reads", program=INT4
    ),
    "a group's sums added before its last product has ended": Mistake(
        "\twgmma.wait_group.sync.aligned 0;\n", "", "has not waited for", program=INT4
    ),
}


@cache
def executable(program: str) -> Executable:
    return compile_module(parse(program), Options(get("sm_90a")))


def run(executable: Executable, program: str) -> tuple[np.ndarray, np.ndarray]:
    """Run a program. Return its result and the expected result."""
    types = [p.type for p in parse(program).graph("main").params]
    arrays = [random(i, *(ROWS if not d.is_const else d.const for d in t.shape), dtype=str(t.dtype)) for i, t in enumerate(types)]
    return Session(executable).call("main", *arrays), Interpreter(parse(program)).call("main", *arrays)


@pytest.mark.parametrize("program", [BF16, INT4], ids=["bf16", "int4"])
def test_the_kernel_as_it_ships_is_right(program: str, software_gpu: SoftwareGpu) -> None:
    found, expected = run(executable(program), program)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_a_fault(mistake: Mistake, software_gpu: SoftwareGpu) -> None:
    broken = mistake.made_in(executable(mistake.program).object_code.decode())
    with pytest.raises(DeviceFault):
        run(replace(executable(mistake.program), object_code=broken.encode()), mistake.program)
    assert re.search(mistake.fault, software_gpu.faults[-1]), software_gpu.faults[-1]
