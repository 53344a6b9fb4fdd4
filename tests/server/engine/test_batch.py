"""The arrays of a step are built while the device computes the step before it, and built anew if the plan has changed since."""

from __future__ import annotations

import threading

import pytest

from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.scheduler import Plan
from server.engine.step_model import StepBatch
from server.messages import Abort, SamplingParams, Submit


def submit(name: str) -> Submit:
    return Submit(name, (1, 2, 3, len(name)), SamplingParams(30, temperature=0.0, ignore_eos=True))


def test_arrays_are_built_beside_the_device_and_anew_after_a_change(rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one, alone = rig(OverlappedEngine), rig()
    builder, by_caller = one.engine._batches, list[bool]()
    built = builder._built

    def spy(plan: Plan) -> StepBatch:
        by_caller.append(threading.current_thread() is threading.main_thread())
        return built(plan)

    monkeypatch.setattr(builder, "_built", spy)
    for each in (one, alone):
        for name in ("a", "bb"):
            each.engine.submit(submit(name))
    one.steps(3)
    by_caller.clear()
    one.steps(4)
    assert by_caller == [False] * 4
    for change in (lambda: one.engine.submit(submit("ccc")), lambda: one.engine.abort(Abort("bb"))):
        by_caller.clear()
        change()
        one.step()
        assert by_caller == [True, False], "built by the caller for this step, and beside it for the next step"
    expected = alone.run()["a", 0].token_ids
    assert one.run()["a", 0].token_ids == expected
