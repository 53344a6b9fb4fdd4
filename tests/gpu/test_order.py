"""Launches that overlap on the software GPU: right ones run, and each access that no griddepcontrol.wait orders is a fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from runtime.device.cuda import driver
from runtime.device.cuda.card import Card
from runtime.device.cuda.driver import Parameters
from runtime.errors import DeviceFault
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = needs_pycuda

THREADS = 64
BEGIN = """
  .reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [record];
  ld.global.u64 %rd2, [%rd1]; ld.global.u64 %rd3, [%rd1+8];
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd2, %rd2, %rd4; add.s64 %rd3, %rd3, %rd4;
  setp.ne.u32 %p1, %r1, 5;
"""
WAIT, LET_BEGIN = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
LOAD, STORE = "ld.global.u32 %r2, [%rd2];", "st.global.u32 [%rd3], %r2;"
COPY = f"{LET_BEGIN} {WAIT} {LOAD} {STORE}"


@dataclass(frozen=True)
class Step:
    """A kernel that copies from one array to another, or does so in a wrong order."""

    body: str
    source: int = 0
    target: int = 1
    overlaps: bool = True


FIRST = Step(COPY, overlaps=False)


def run(steps: Sequence[Step], event_before: int | None = None) -> np.ndarray:
    """Launch the steps as one graph, twice. Return the arrays; array 0 is given, and the first step writes array 1. Before step
    `event_before`, record an event."""
    card, owner = Card(0), Step("")
    kernels = [f".visible .entry k{i}(.param .u64 record) {{ {BEGIN} {s.body} ret; }}" for i, s in enumerate(steps)]
    text = "\n".join((".version 8.4", ".target sm_90a", ".address_size 64", *kernels))
    arrays, event = [card.allocate(owner, 4 * THREADS, "array") for _ in range(4)], card.event(owner)
    card.upload(arrays[0], np.arange(THREADS, dtype=np.uint32).view(np.uint8))
    with card:
        module = driver.load_module(text.encode())
        records: list[Parameters] = []
        for step in steps:
            records.append(Parameters(card.allocate(owner, 16, "record")))
            words = np.array([arrays[step.source], arrays[step.target]], np.int64)
            card.upload(records[-1].address, words.view(np.uint8))
        with card.capturing(), driver.captured(card.stream.handle) as found:
            for i, (step, record) in enumerate(zip(steps, records, strict=True)):
                function = driver.function_of(module, f"k{i}")
                if i == event_before:
                    card.record(event)
                driver.launch(function, 1, THREADS, 0, record, card.stream.handle, f"k{i}", overlaps=step.overlaps)
        for _ in range(2):
            found[0].launch(card.stream.handle, "steps")
        card.wait()
    got = np.empty((4, THREADS), np.uint32)
    for row, array in zip(got, arrays, strict=True):
        card.download(row.view(np.uint8), array)
    return got


RIGHT = {
    "each kernel waits first": [FIRST, Step(COPY, 1, 2), Step(COPY, 2, 3)],
    "a constant is read early": [FIRST, Step(f"{LOAD} {WAIT} {STORE}", 0, 2), Step(f"{LOAD} {WAIT} {STORE}", 0, 3)],
    "no launch overlaps": [Step(LOAD + STORE, overlaps=False), Step(LOAD + STORE, 1, 2, overlaps=False), Step(COPY, 2, 3)],
    "an early read of what a launch wrote that has ended": [
        FIRST,
        Step(COPY, 1, 2, overlaps=False),
        Step(f"{LOAD} {WAIT} {STORE}", 1, 3),
    ],
}
WRONG = {
    "no wait": ([FIRST, Step(f"{LET_BEGIN} {LOAD} {STORE}", 1, 2)], r"reads before griddepcontrol.wait what launch \d+ wrote"),
    "a wait after the first read": ([FIRST, Step(f"{LOAD} {WAIT} {STORE}", 1, 2)], r"reads before griddepcontrol.wait"),
    "a write before the wait": ([FIRST, Step(f"{LOAD} {STORE} {WAIT}", 0, 2)], "writes before griddepcontrol.wait"),
    "an atomic before the wait": ([FIRST, Step(f"red.global.add.u32 [%rd3], 1; {WAIT}", 0, 2)], "writes before griddepcontrol.wait"),
    "a wait in some threads": ([FIRST, Step(f"@%p1 {WAIT} {LOAD} {STORE}", 1, 2)], r"reads before .* thread \(5, 0, 0\)"),
    "a successor that does not wait, so that its own successor could write what the first one reads": (
        [FIRST, Step(LET_BEGIN, 1, 2), Step(COPY, 2, 0)],
        "ends without griddepcontrol.wait, so that the next launch would not wait for launch",
    ),
    "an early read of what the launch before the last one wrote": (
        [FIRST, Step(COPY, 0, 2), Step(f"{LOAD} {WAIT} {STORE}", 1, 3)],
        r"reads before griddepcontrol.wait what launch \d+ wrote",
    ),
}


@pytest.mark.parametrize("steps", RIGHT.values(), ids=list(RIGHT))
def test_launches_that_wait_are_right(steps: list[Step], software_gpu: SoftwareGpu) -> None:
    got = run(steps)
    assert (got[1:] == np.arange(THREADS)).all()


@pytest.mark.parametrize(("steps", "fault"), WRONG.values(), ids=list(WRONG))
def test_a_missing_wait_is_a_fault(steps: list[Step], fault: str, software_gpu: SoftwareGpu) -> None:
    with pytest.raises(DeviceFault):
        run(steps)
    assert re.search(fault, software_gpu.faults[0]), software_gpu.faults


@pytest.mark.parametrize(
    ("steps", "event_before"), [([Step(COPY)], None), ([FIRST, Step(COPY, 1, 2)], 1)], ids=["the begin of a graph", "an event"]
)
def test_a_launch_that_overlaps_something_else_than_a_kernel_is_a_fault(
    steps: list[Step], event_before: int | None, software_gpu: SoftwareGpu
) -> None:
    with pytest.raises(DeviceFault):
        run(steps, event_before)
    assert "what is before it is not one kernel" in software_gpu.faults[0], software_gpu.faults
