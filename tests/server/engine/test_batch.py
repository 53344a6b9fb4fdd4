"""The arrays of a step are built while the device computes the step before it, and built anew if the plan has changed since."""

from __future__ import annotations

import threading

import pytest

from runtime.cache_groups import PAGE_SIZE
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.plan import Plan
from server.engine.step_model import Logits, StepBatch
from server.messages import Abort, SamplingParams, Submit


def submit(name: str, num_prompt: int = 4) -> Submit:
    return Submit(name, (*range(1, num_prompt), len(name)), SamplingParams(30, temperature=0.0, ignore_eos=True))


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


@pytest.mark.parametrize("engine_class", [Engine, OverlappedEngine])
def test_prompts_stand_before_single_tokens(rig, monkeypatch: pytest.MonkeyPatch, engine_class: type[Engine]) -> None:
    """Attention computes the first tokens of a prompt faster if no other tokens share their tile."""
    streams, prompts = [submit("a"), submit("bb")], [submit("ccc", 20), submit("dddd", 32)]
    one, alone = rig(engine_class), rig()
    for each in streams:
        one.engine.submit(each)
    one.steps(3)
    model, begins = one.engine._model, list[list[int]]()
    run = model.run

    def spy(batch: StepBatch) -> Logits:
        begins.append(batch.query_starts.tolist())
        return run(batch)

    monkeypatch.setattr(model, "run", spy)
    for each in prompts:
        one.engine.submit(each)
    outcomes = one.run()
    assert begins[0] == [0, 32, 52, 53, 54]
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == {
        name: outcome.token_ids for each in (*streams, *prompts) for name, outcome in alone.run([each]).items()
    }


def test_tables_have_no_pages_beyond_a_sequence(rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps reuse the buffer of the page tables. Before a step, a row is cleared only as far as the sequence reached that had it before."""
    one, seen = rig(), 0
    model = one.engine._model
    run = model.run

    def spy(batch: StepBatch) -> Logits:
        nonlocal seen
        for places in batch.places:
            for row, length in zip(places.page_tables, batch.context_lens, strict=True):
                num_pages = -(-int(length) // PAGE_SIZE)
                assert row[:num_pages].all() and not row[num_pages:].any()
                seen = max(seen, len(row) - num_pages)
        return run(batch)

    monkeypatch.setattr(model, "run", spy)
    one.run([submit("a", 60), submit("bb", 60)])
    one.run([submit("ccc", 4), submit("dddd", 60), submit("eeeee", 20)])
    assert seen > 2, "some sequences are shorter than others of the same step"
