"""Waits between the streams of several cards: a wait that the driver refuses is a fault that names its card."""

from __future__ import annotations

import pytest

from runtime.device.cuda.card import Card
from runtime.device.cuda.lockstep import Lockstep
from runtime.errors import DeviceFault
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda


@needs_pycuda
def test_a_card_that_cannot_wait_is_named(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu.driver.calls import Result
    from tests.gpu.driver.card import machine, note_fault

    software_gpu.has_cards(2, monkeypatch)
    lockstep = Lockstep([Card(0), Card(1)])
    lockstep.fork()
    for context in machine.contexts.values():
        if context.card == 1:
            note_fault(context, Result.ILLEGAL_ADDRESS, "a fault on card 1")
    with pytest.raises(DeviceFault, match=r"GPU 1 \(.*\), step: .*illegal"):
        lockstep.fork()
